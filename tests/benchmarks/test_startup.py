"""benchmarks/startup.py: the parts of a command's time add up to it, and a command that fails is not a result."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from parbank.artifact.container import read_artifact, write_artifact
from parbank.config import from_dict
from parbank.model import ModelConfig

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


def test_another_version_reads_the_paths_of_the_caller(
    startup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--data may be relative, and the older code must not be hidden by the code in the current folder."""
    old = tmp_path / "old" / "parbank"
    old.mkdir(parents=True)
    (old / "__init__.py").touch()
    (old / "__main__.py").write_text("import os, sys\nprint('old', os.path.exists(sys.argv[1]))\n")
    monkeypatch.chdir(startup.HERE.parent)
    _, lines = startup.run(["pyproject.toml"], tmp_path, root=old.parent)
    assert [line for _, line in lines] == ["old True"]


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


def test_an_earlier_version_runs_its_own_code(startup: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "before" / "parbank"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; print('the old one', *sys.argv[1:])")
    _, lines = startup.run(["eval"], tmp_path / "cache", root=package.parent)
    assert [line for _, line in lines] == ["the old one eval"]


def test_an_earlier_version_is_not_told_of_settings_that_it_does_not_need(startup: ModuleType, tmp_path: Path) -> None:
    config = ModelConfig(vocab_size=320, layers=2, width=16, heads=2, kv_heads=1, rope_dims=4, value_layers=(1,))
    meta = {"model": json.loads(json.dumps(dataclasses.asdict(config))), "context": 8}
    write_artifact(tmp_path / "a.pbk", meta, {"x": b"section"})
    found = read_artifact(startup.strip_defaults(tmp_path / "a.pbk", tmp_path / "b.pbk"))
    assert found.sections == {"x": b"section"}
    assert found.meta["context"] == 8
    assert from_dict(ModelConfig, found.meta["model"]) == config
    assert not {"dense", "window_layers"} & found.meta["model"].keys(), "which have their defaults"


def test_a_version_that_does_not_divide_its_time_has_a_row(startup: ModuleType) -> None:
    result = {"bytes": 10, "tokens": 4, "seconds": 2.0, "val_bpb": 1.5}
    found = {
        row.case: row.value for row in startup.eval_rows("ttt", "old, first start", 9.0, [(1.0, json.dumps(result))])
    }
    assert found == {"eval, ttt": 9.0, "eval, ttt: scoring alone": 2.0, "eval, ttt: bits per byte": 1.5}
    result |= {"times": {"import": 5.0, "scoring": 3.0, "text": 0.001}}
    found = {row.case: row.value for row in startup.eval_rows("ttt", "first start", 9.0, [(1.0, json.dumps(result))])}
    assert found["eval, ttt: exit"] == pytest.approx(0.999)
    assert "eval, ttt: text" not in found
    result["plain"] = {"val_bpb": 1.6, "gain_bpb": 0.1, "worst_document_bpb": -0.01}
    found = {row.case: row.value for row in startup.eval_rows("x", "first start", 9.0, [(1.0, json.dumps(result))])}
    assert (found["eval, x: gain on streaming"], found["eval, x: loss of the worst document"]) == (0.1, -0.01)


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
