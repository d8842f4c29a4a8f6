"""Odd checkpoints, configs and names end in our own errors, soon and without a traceback."""

import io
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from parbank.artifact.safetensors import export_model, import_model
from parbank.cli.main import app
from parbank.config import override
from parbank.data.tokenizer import Tokenizer
from parbank.errors import ArtifactError, CheckpointError, ConfigError, DataError
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from parbank.training.checkpoint import find_checkpoint, load_checkpoint
from parbank.training.display import Display
from parbank.training.folder import load_run_config
from parbank.training.load import load_model, load_trained
from parbank.training.pack import pack_checkpoint
from parbank.training.run import run

PLACE = Runtime(device=torch.device("cpu"))


@pytest.fixture(scope="module")
def finished(text_spec: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("odd") / "run"
    config = override(get_recipe("nano"), f"data={json.dumps(text_spec)}", "budget.steps=4")
    run(config, PLACE, out, display=Display(file=io.StringIO()))
    return out


CHANGES: dict[str, Any] = {
    "2^63 layers": {"config": {"model": {"layers": 2**63}}},
    "a wide model": {"config": {"model": {"width": 2**30}}},
    "no config": {"config": 7},
    "no weights": {"model": []},
    "weights of another kind": {"model": {"a": "b"}},
    "averages of another kind": {"averages": None},
    "no tokenizer": {"tokenizer": 3},
}


@pytest.mark.parametrize("name", CHANGES)
def test_odd_fields_of_a_checkpoint_are_refused_soon(name: str, finished: Path, tmp_path: Path) -> None:
    state = load_checkpoint(find_checkpoint(finished))
    change = CHANGES[name]
    if isinstance(inner := change.get("config"), dict):
        change = {"config": state["config"] | {"model": state["config"]["model"] | inner["model"]}}
    torch.save(state | change, tmp_path / "step_00000004.pt")
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"step_00000004\.pt does not hold what its config says: \S"):
        load_trained(tmp_path / "step_00000004.pt", PLACE.device)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "change",
    [
        {"step": "x"},
        {"step": -1},
        {"skipped": "x"},
        {"seconds": math.nan},
        {"optimizer": 3},
        {"random": {}},
        {"averages": {"steps": [], "snapshots": 0, "ema": None, "swa": None}},
    ],
)
def test_a_malformed_checkpoint_is_not_resumed(change: dict[str, Any], finished: Path, tmp_path: Path) -> None:
    state = load_checkpoint(find_checkpoint(finished))
    out = tmp_path / "run"
    (out / "checkpoint").mkdir(parents=True)
    (out / "config.json").write_bytes((finished / "config.json").read_bytes())
    torch.save(state | change, out / "checkpoint" / "step_00000004.pt")
    with pytest.raises(CheckpointError, match=r"step_00000004\.pt is malformed"):
        run(load_run_config(out), PLACE, out, resume=True, display=Display(file=io.StringIO()))


@pytest.mark.parametrize("content", [b"\xff{}", b"", b"[" * 100_000])
def test_a_config_that_cannot_be_read_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="holds no run to resume"):
        load_run_config(tmp_path)


def test_a_tensor_name_is_shown_and_not_obeyed(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(found: object) -> list[Any]:
        rows = describe(found)
        object.__setattr__(rows[0], "name", "[red]a[/red]\x1b[31m[/x]")
        return rows

    from parbank.artifact import pack

    describe = pack.describe_tensors
    monkeypatch.setattr(pack, "describe_tensors", rename)
    done = CliRunner().invoke(app, ["inspect", str(finished / "model.pbk")])
    assert done.exit_code == 0, done.output
    assert "[red]a[/red]\u241b[31m[/x]" in done.output
    assert "\x1b" not in done.output


def test_a_text_of_one_letter_is_not_called_short_alone() -> None:
    with pytest.raises(DataError, match="or always the same; give more text that does not repeat itself"):
        Tokenizer.train(["a" * 300_000], 320)


def test_a_file_of_another_kind_is_not_replaced(finished: Path, tmp_path: Path) -> None:
    checkpoint = find_checkpoint(finished)
    before = checkpoint.read_bytes()
    with pytest.raises(ArtifactError, match="exists and is no artifact; choose another name"):
        pack_checkpoint(finished, 60_000, checkpoint)
    assert checkpoint.read_bytes() == before
    loaded = load_model(finished, PLACE.device)
    export_model(loaded, tmp_path / "a.safetensors")
    export_model(loaded, tmp_path / "a.safetensors")  # the same tokenizer: fine
    (tmp_path / "a.model").write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"a\.model, which holds another one"):
        export_model(loaded, tmp_path / "a.safetensors")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match=r"notes\.txt exists and is no artifact"):
        import_model(tmp_path / "a.safetensors", tmp_path / "notes.txt")


def test_packing_says_what_it_cost(finished: Path, tmp_path: Path) -> None:
    said = io.StringIO()
    pack_checkpoint(finished, 20_000, tmp_path / "small.pbk", display=Display(file=said))
    (line,) = (line for line in said.getvalue().splitlines() if line.startswith("measured on "))
    before, after = (float(word) for word in line.split() if word.count(".") == 1 and len(word) == 6)
    assert 0 < before <= after + 0.01 < 10
