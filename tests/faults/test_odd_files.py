"""Odd checkpoints, configs and names end in our own errors, soon and without a traceback."""

import io
import json
import math
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import parbank
from parbank.artifact.container import check_target, read_artifact, write_artifact
from parbank.artifact.safetensors import export_model, import_model
from parbank.cli.main import app
from parbank.config import override, parse_json
from parbank.data import tokenizer
from parbank.data.tokenizer import Tokenizer
from parbank.display import Display
from parbank.errors import ArtifactError, CheckpointError, ConfigError, DataError, FileError
from parbank.eval.result import read_result
from parbank.model import GPT, ModelConfig
from parbank.model.config import MAX_BUCKETS, MAX_CHANNELS, MAX_LAYERS, MAX_VOCAB
from parbank.recipes import get_recipe
from parbank.report.write import write_pages
from parbank.runtime import Runtime
from parbank.study.study import read_study
from parbank.training.checkpoint import find_checkpoint, load_checkpoint
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
    assert time.monotonic() - began < 30


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


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{}", "budget is missing"),
        (b"[1, 2]", r"RunConfig must be a table of fields, got \[1, 2\]"),
        (b'{"bogus": 1}', "bogus is not a setting"),
    ],
)
def test_a_config_of_another_program_is_named(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"config\.json is not the config of a run: .*{reason}.*; put back"):
        load_run_config(tmp_path)


def test_a_setting_of_the_user_is_not_blamed_on_the_file(finished: Path) -> None:
    with pytest.raises(ConfigError, match=r"^bogus is not a setting"):
        load_run_config(finished, "bogus=1")


def test_a_vocabulary_that_no_tokenizer_has_is_refused_before_a_model_is_made() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size must be at most 65536, got 65537"):
        ModelConfig(vocab_size=MAX_VOCAB + 1)
    assert MAX_VOCAB == tokenizer.MAX_VOCAB


@pytest.mark.parametrize(
    "setting",
    [
        "model.width=1073741824",
        "model.mlp_multiple=1e300",
        "model.mlp_multiple=Infinity",
        "model.mlp_multiple=NaN",
        *(f"model.{name}=1e300" for name in ("activation_slope", "qk_gain", "rope_base", "embedding_std", "softcap")),
        *(f"model.{name}=-1.0" for name in ("rope_base", "embedding_std", "softcap")),
        *(f"model.{name}=NaN" for name in ("activation_slope", "rope_base")),
        "model.activation_slope=-1e300",
        "model.rope_base=0.0",
        *(f"model.{name}={2**63}" for name in ("vocab_size", "bigram_buckets", "bigram_width", "value_width")),
        *(f"batch.{name}={2**63}" for name in ("batch_tokens", "prefetch")),
        f"batch.stages=[[0.5, 64, {2**63}]]",
    ],
)
def test_numbers_that_no_machine_can_hold_are_refused_by_name(setting: str) -> None:
    """Without the bounds, PyTorch ends in an error of its own, or the first step lasts for ever."""
    with pytest.raises(ConfigError, match=re.escape(setting.partition("=")[0])):
        override(get_recipe("nano"), setting)


def test_the_largest_model_that_is_allowed_can_be_described() -> None:
    sizes = {"width": MAX_CHANNELS, "mlp_multiple": 1.0, "layers": 1, "heads": 1, "kv_heads": 1, "rope_dims": 0}
    largest = ModelConfig(**sizes, vocab_size=MAX_VOCAB, bigram_buckets=MAX_BUCKETS, bigram_width=MAX_CHANNELS)
    with torch.device("meta"):
        found = GPT(largest).state_dict()
    bytes_of_a_layer = sum(4 * tensor.numel() for name, tensor in found.items() if "blocks.0" in name)
    assert MAX_LAYERS * bytes_of_a_layer < 2**63


def test_an_export_to_a_name_that_is_not_utf8_is_refused(finished: Path, tmp_path: Path) -> None:
    """safetensors opens no such file. Its folder may have any name."""
    loaded = load_model(finished / "model.pbk", PLACE.device)
    with pytest.raises(ConfigError, match="is not UTF-8"):
        export_model(loaded, tmp_path / "a\udcff.safetensors")
    folder = tmp_path / "b\udcff"
    export_model(loaded, folder / "a.safetensors")
    assert sorted(path.name for path in folder.iterdir()) == ["a.model", "a.safetensors"]


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


def test_a_text_of_one_letter_is_not_called_short() -> None:
    with pytest.raises(DataError, match="repeats itself too much for a vocabulary of 320 tokens") as caught:
        Tokenizer.train(["a" * 300_000], 320)
    assert "short" not in str(caught.value)
    with pytest.raises(DataError, match="the text is too short for a vocabulary of 320 tokens"):
        Tokenizer.train(["hello"], 320)


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
    with pytest.raises(ArtifactError, match=r"notes\.txt exists and is no artifact"):
        parbank.load(finished, "cpu").save(tmp_path / "notes.txt")
    write_pages([finished], tmp_path / "page.html")
    write_pages([finished], tmp_path / "page.html")  # a page replaces a page
    with pytest.raises(FileError, match=r"notes\.txt exists and is no page of parbank"):
        write_pages([finished], tmp_path / "notes.txt")
    (tmp_path / "b.safetensors").write_text("mine")
    with pytest.raises(ConfigError, match=r"b\.safetensors exists and was not exported by parbank"):
        export_model(loaded, tmp_path / "b.safetensors")
    assert {(tmp_path / name).read_text() for name in ("notes.txt", "b.safetensors")} == {"mine"}


@pytest.mark.parametrize("kind", ["a file", "a link"])
def test_packing_without_a_name_replaces_no_file_of_the_user(kind: str, finished: Path, tmp_path: Path) -> None:
    """The artifact is named by its cap, in the folder of the run."""
    shutil.copytree(finished / "checkpoint", tmp_path / "checkpoint")
    (tmp_path / "notes.txt").write_text("mine")
    target = tmp_path / "model-60000.pbk"
    if kind == "a link":
        target.symlink_to(tmp_path / "notes.txt")
    else:
        target.write_text("mine")
    with pytest.raises(ArtifactError, match=r"model-60000\.pbk exists and is no artifact"):
        pack_checkpoint(tmp_path, 60_000, None)
    assert target.read_text() == "mine"


def test_the_artifact_that_a_summary_describes_is_not_replaced(finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pbk"
    before = (finished / "model.pbk").read_bytes()
    path.write_bytes(before)
    check_target(path)
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"is the result of a run, and .*summary\.json holds its score"):
        pack_checkpoint(finished, 60_000, path)
    assert path.read_bytes() == before


def test_an_artifact_does_not_choose_which_files_are_read(finished: Path, tmp_path: Path) -> None:
    artifact = read_artifact(finished / "model.pbk")
    for given, kept in ("stdlib", "stdlib"), ("text:/home", None), ("shards:/home", None):
        write_artifact(tmp_path / "named.pbk", artifact.meta | {"data": given}, artifact.sections)
        assert load_model(tmp_path / "named.pbk", PLACE.device).data == kept


def test_packing_says_what_it_cost(finished: Path, tmp_path: Path) -> None:
    said = io.StringIO()
    pack_checkpoint(finished, 20_000, tmp_path / "small.pbk", display=Display(file=said))
    (line,) = (line for line in said.getvalue().splitlines() if line.startswith("measured on "))
    before, after = (float(word) for word in line.split() if word.count(".") == 1 and len(word) == 6)
    assert 0 < before <= after + 0.01 < 10


def test_json_that_is_nested_too_deeply_is_damaged_json(finished: Path, tmp_path: Path) -> None:
    """Python's parser raises a RecursionError, which few readers expect."""
    deep = tmp_path / "study.json"
    deep.write_text("[" * 20_000 + "]" * 20_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(deep.read_bytes())
    with pytest.raises(ConfigError, match=r"cannot read the result .*: it is nested too deeply"):
        read_result(deep)
    with pytest.raises(CheckpointError, match="holds no study that can be read"):
        read_study(tmp_path)
    for value, why in ("[" * 5000, "nested too deeply"), ("9" * 5000, "4300 digits"):
        with pytest.raises(ConfigError, match=f"a value of 5,000 characters cannot be read: .*{why}"):
            override(get_recipe("nano"), f"model.width={value}")
    folder = shutil.copytree(finished, tmp_path / "run")
    shutil.copy(deep, folder / "summary.json")
    with pytest.raises(CheckpointError, match="holds no run that has ended"):
        parbank.Run.open(folder)
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"holds no run that has ended \(summary\.json is not a table"):
        parbank.Run.open(tmp_path)
    (tmp_path / "t.txt").write_text("hello")
    done = CliRunner().invoke(app, ["eval", str(folder), "--data", f"text:val={tmp_path / 't.txt'}"])
    assert done.exit_code == 0, done.output
