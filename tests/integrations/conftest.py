"""Tests with other packages and outside the tree: `make integrations` runs them, `make test` does not.

What is in this folder is marked `integration`. Only `-m integration`, or a file's own path, collects it: these files import
packages that `make dev` does not install. A test that would skip fails instead.
"""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = config.getoption("markexpr") == "integration"
    return True if collection_path.is_relative_to(HERE) and not asked else None


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.integration)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _refuse_skip((yield))


def _refuse_skip(report: Any) -> Any:
    if report.skipped:
        report.outcome, report.longrepr = "failed", f"an integration test may not skip: {report.longrepr}"
    return report
