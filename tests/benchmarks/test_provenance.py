"""A result says which code made it, also where git is missing, and never calls changed code clean."""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def provenance(benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    module = benchmark("provenance")
    monkeypatch.setattr(module, "STAMP", tmp_path / "STAMP.json")
    return module


def test_git_is_believed_where_it_is(provenance: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "read_git", lambda: {"commit": "a" * 40, "dirty": False})
    assert provenance.read_commit() == {"commit": "a" * 40, "dirty": False, "source": "git"}


@pytest.mark.parametrize("dirty", [False, True])
def test_a_stamp_stands_in_for_git(provenance: ModuleType, monkeypatch: pytest.MonkeyPatch, dirty: bool) -> None:
    monkeypatch.setattr(provenance, "read_git", lambda: {"commit": "b" * 40, "dirty": dirty})
    provenance.write_stamp()
    monkeypatch.setattr(provenance, "read_git", lambda: None)
    assert provenance.read_commit() == {"commit": "b" * 40, "dirty": dirty, "source": "stamp"}


def test_a_stamp_of_the_same_code_outweighs_another_checkout(
    provenance: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files copied over an older checkout look changed to git; the stamp knows their commit."""
    monkeypatch.setattr(provenance, "read_git", lambda: {"commit": "b" * 40, "dirty": False})
    provenance.write_stamp()
    older = {"commit": "a" * 40, "dirty": True}
    monkeypatch.setattr(provenance, "read_git", lambda: older)
    assert provenance.read_commit() == {"commit": "b" * 40, "dirty": False, "source": "stamp"}
    monkeypatch.setattr(provenance, "code_digest", lambda: "0" * 64)
    assert provenance.read_commit() == {**older, "source": "git"}


def test_the_laws_of_plans_are_code(provenance: ModuleType) -> None:
    """Another fit chooses other models."""
    names = {path.relative_to(provenance.ROOT).as_posix() for path in provenance._code_files()}
    assert {"parbank/plan/data/fit.json", "parbank/plan/laws.py", "benchmarks/ladder.py", "pyproject.toml"} <= names


def test_a_child_runs_the_tree_and_keeps_the_packages_of_its_parent(
    provenance: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "packages")
    assert provenance.python_path(Path("old")) == os.pathsep.join(["old", "packages"])
    monkeypatch.delenv("PYTHONPATH")
    assert provenance.python_path() == str(provenance.ROOT)


def test_code_that_changed_after_the_stamp_is_dirty(provenance: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "read_git", lambda: {"commit": "c" * 40, "dirty": False})
    provenance.write_stamp()
    stamp = json.loads(provenance.STAMP.read_text())
    provenance.STAMP.write_text(json.dumps({**stamp, "code": "0" * 64}))
    monkeypatch.setattr(provenance, "read_git", lambda: None)
    found = provenance.read_commit()
    assert found["dirty"]
    assert "changed" in found["source"]


def test_without_git_and_stamp_nothing_is_claimed(provenance: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "read_git", lambda: None)
    found = provenance.read_commit()
    assert found["commit"] == "unknown"
    assert found["dirty"]


def test_a_result_names_the_code_that_it_began_with(
    benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Commits may be made while a benchmark runs, and files changed."""
    harness = benchmark("harness")
    provenance = harness.provenance
    for cached in (provenance.code_at_start, provenance.describe):
        cached.cache_clear()
    monkeypatch.setattr(provenance, "STAMP", tmp_path / "STAMP.json")
    monkeypatch.setattr(sys, "argv", ["bench.py", "--out", str(tmp_path)])
    monkeypatch.setattr(provenance, "read_git", lambda: {"commit": "a" * 40, "dirty": False})
    arguments = harness.start(argparse.ArgumentParser())
    monkeypatch.setattr(provenance, "read_git", lambda: {"commit": "b" * 40, "dirty": False})

    def write() -> dict[str, Any]:
        path = harness.write("claim", [], out=arguments.out, settings={}, measured=["benchmarks/harness.py"])
        return json.loads(path.read_text())

    try:
        assert (write()["commit"], write()["dirty"]) == ("a" * 40, False)
        monkeypatch.setattr(provenance, "code_digest", lambda: "0" * 64)
        found = write()
        assert (found["commit"], found["dirty"]) == ("a" * 40, True)
        assert found["source"] == "git; the code changed while it was measured"
    finally:
        for cached in (provenance.code_at_start, provenance.describe):
            cached.cache_clear()


def test_the_digest_covers_what_is_measured(provenance: ModuleType) -> None:
    names = {path.relative_to(provenance.ROOT).as_posix() for path in provenance._code_files()}
    assert {"pyproject.toml", "parbank/__init__.py", "benchmarks/harness.py", "benchmarks/peers/golf.py"} <= names


def test_commands_keep_no_folders(provenance: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    root = provenance.ROOT
    words = [f"{root}/benchmarks/step.py", "--out", "/somewhere/deep/out", "--data", "text:train=/a/b.xz,val=c/d.xz"]
    monkeypatch.setattr(sys, "argv", words)
    assert provenance.command_line() == "python benchmarks/step.py --out .../out --data text:train=.../b.xz,val=c/d.xz"


def test_packages_that_a_run_needs_at_its_end_are_looked_for_at_the_start(
    provenance: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert provenance.missing_packages() == []
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "constriction" else find(name))
    assert provenance.missing_packages() == ["constriction"]
