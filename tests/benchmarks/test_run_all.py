"""Every benchmark can be imported here, and understands the command by which run_all.py starts it."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = sorted(
    path.relative_to(HERE).with_suffix("").as_posix() for path in [*HERE.glob("*.py"), *HERE.glob("*/*.py")]
)


class Started(Exception):
    """A benchmark has read its command line."""


@pytest.mark.parametrize("name", [name.replace("/", ".") for name in SCRIPTS])
def test_it_can_be_imported(benchmark: Callable[[str], ModuleType], name: str) -> None:
    assert benchmark(name).__doc__


def test_commands_are_understood(benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    def start(parser: argparse.ArgumentParser) -> argparse.Namespace:
        parser.add_argument("--out")
        raise Started(parser.parse_args())

    run_all = benchmark("run_all")
    for name in run_all.BENCHMARKS:
        arguments = argparse.Namespace(data="text:folder", seed=7, model=None)
        _, script, *words = run_all.command_of(name, arguments)
        module = benchmark(Path(script).relative_to(HERE).with_suffix("").as_posix().replace("/", "."))
        monkeypatch.setattr(module if hasattr(module, "start") else module.harness, "start", start)
        monkeypatch.setattr(sys, "argv", [script, *words])
        with pytest.raises(Started):
            module.main()
