"""benchmarks/startup.py: the parts of a command's time add up to it, and a command that fails is not a result."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SUMMARY = {
    "setup_seconds": 6.0,
    "setup_parts": {"data": 1.0, "model": 0.5, "warm-up": 4.5},
    "train_seconds": 20.0,
    "finish_seconds": 8.0,
    "finish_parts": {"scoring": 3.0, "packing": 5.0},
    "compile_cache": "cold",
}


@pytest.fixture
def startup(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("startup")


def test_the_parts_add_up(startup: ModuleType) -> None:
    lines = [(3.0, "preparing"), (9.0, f"ready after 6.0 s of setup; {startup.READY}"), (29.0, "trained")]
    found = {row.case: row.value for row in startup.train_rows("first start", 40.0, lines, SUMMARY)}
    assert found["train: command to first step"] == 9.0
    assert found["train: imports"] == 3.0
    assert found["train: after training"] == 11.0
    assert found["train: after training: saving, exit"] == 3.0
    whole = found.pop("train: whole command")
    found.pop("train: command to first step")
    found.pop("train: after training")
    assert sum(found.values()) == whole, "the parts, without the sums"


def test_the_line_that_ends_the_setup_is_the_package_s(startup: ModuleType) -> None:
    source = Path(startup.HERE.parent / "parbank" / "training" / "run.py").read_text(encoding="utf-8")
    assert startup.READY in source


def test_a_setup_without_an_end_is_an_error(startup: ModuleType) -> None:
    with pytest.raises(SystemExit, match="when setup ended"):
        startup.train_rows("first start", 40.0, [(1.0, "nothing")], SUMMARY)


def test_commands_run_with_a_cache_of_their_own(
    startup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os; print(os.environ['PARBANK_CACHE'], 'TRITON_CACHE_DIR' in os.environ)"
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nexec {startup.sys.executable} -c "{program}"\n')
    fake.chmod(0o755)
    monkeypatch.setattr(startup.sys, "executable", str(fake))
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    seconds, lines = startup.run(["eval"], tmp_path / "cache")
    assert [line for _, line in lines] == [f"{tmp_path / 'cache'} False"]
    assert 0 < lines[0][0] <= seconds


def test_a_command_that_fails_is_no_result(
    startup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup.sys, "executable", "false")
    with pytest.raises(SystemExit, match="failed with 1"):
        startup.run(["train"], tmp_path)


def test_kernels_are_carried_from_one_cache_to_another(
    startup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[list[str], Path]] = []

    def run(words: list[str], cache: Path) -> tuple[float, list[tuple[float, str]]]:
        commands.append((words, cache))
        (tmp_path / "kernels").write_bytes(b"code")
        return 2.0, []

    monkeypatch.setattr(startup, "run", run)
    rows = startup.carry_kernels(["--recipe", "nano"], tmp_path / "kernels", tmp_path / "old", tmp_path / "new")
    assert commands == [
        (["warmup", "--recipe", "nano", "--export", str(tmp_path / "kernels")], tmp_path / "old"),
        (["warmup", "--import", str(tmp_path / "kernels")], tmp_path / "new"),
    ]
    assert [(row.case, row.provider, row.value) for row in rows] == [
        ("warmup --export", "imported", 2.0), ("warmup --import", "imported", 2.0),
    ]  # fmt: skip
