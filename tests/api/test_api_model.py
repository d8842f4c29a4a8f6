"""`parbank.load` and `Model`: one model by every way to it, and no guess at what a string means."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import parbank
from parbank.errors import ArtifactError, CheckpointError, ConfigError, DataError
from parbank.model import GPT
from parbank.recipes import get_recipe
from parbank.training.checkpoint import find_checkpoint

TEXT = "def answer():\n    return 42  # naïve ∞\n"


@pytest.fixture(scope="module")
def model(first: parbank.Run, home: Path) -> parbank.Model:
    return parbank.load(home / first.folder, device="cpu")


def test_an_artifact_a_run_folder_and_a_checkpoint(first: parbank.Run, home: Path, model: parbank.Model) -> None:
    folder = home / first.folder
    packed = parbank.load(str(folder / "model.pbk"), device="cpu")
    trained = parbank.load(find_checkpoint(folder), device="cpu")
    assert packed.score(TEXT) == model.score(TEXT)
    assert trained.score(TEXT).bpb == pytest.approx(model.score(TEXT).bpb, rel=0.05)
    assert trained.score(TEXT) != model.score(TEXT), "not yet rounded"
    assert (model.context, model.device.type) == (64, "cpu")
    assert model.data is not None
    assert model.data.startswith("text:"), "a run's folder knows it"
    assert packed.data is None, "a path of one machine is not for a file that travels"
    assert repr(packed).startswith("Model(")
    with pytest.raises(CheckpointError, match="does not exist"):
        parbank.load(folder / "other.pt")


def test_text_a_path_bytes_and_a_spec_are_told_apart(
    model: parbank.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "poem.txt"
    file.write_text(TEXT, encoding="utf-8")
    expected = model.score(TEXT)
    assert expected.bytes == len(TEXT.encode())
    assert model.score(TEXT.encode()) == model.score(file) == model.score(f"text:val={file}") == expected
    assert expected.bpb == pytest.approx(expected.loss * expected.tokens / expected.bytes / 0.693147, rel=1e-5)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"'poem.txt' names a file or folder here.*Path\('poem.txt'\)"):
        model.score("poem.txt")
    assert model.score(b"poem.txt").bytes == 8
    assert model.score("poem").bytes == 4, "names nothing here, so it is text"
    with pytest.raises(DataError, match=r"no-such does not exist.*'text:no-such' is a data spec.*as bytes"):
        model.score("text:no-such")
    assert model.score(b"text:no-such").bytes == 12
    with pytest.raises(ConfigError, match="does not know what it was trained on"):
        parbank.Model(model.module, model.tokenizer, context=64).score()
    with pytest.raises(DataError, match="it is empty"):
        model.score("")
    with pytest.raises(DataError, match="not UTF-8"):
        model.score(b"\xff\xfe")
    comma = tmp_path / "a,b.txt"
    comma.write_text(TEXT, encoding="utf-8")
    with pytest.raises(ConfigError, match="has a comma"):
        model.score(comma)


def test_the_ways_to_score(model: parbank.Model) -> None:
    text = TEXT * 12
    ways: list[dict] = [
        {},
        {"method": "sliding", "stride": 8},
        {"method": "sliding", "stride": 32},
        {"method": "streaming"},
    ]
    assert len({model.score(text, **way).bpb for way in ways}) == 4
    assert model.score(text, context=16) != model.score(text)
    learnt = model.score(text, method="ttt", chunk=64, lr=0.01, epochs=1)
    assert learnt.tokens == model.score(text).tokens
    with pytest.warns(UserWarning, match="nothing was learnt"):
        model.score(text, method="ttt")
    with pytest.raises(ConfigError, match="stride"):
        model.score(text, stride=8)
    with pytest.raises(ConfigError, match="must be one of chunked"):
        model.score(text, method="nonsense")


def test_logits_are_those_of_the_network(model: parbank.Model) -> None:
    ids = model.tokenizer.encode(TEXT).astype("int64")
    model.module.train()
    try:
        found = model.logits(ids)
        assert model.module.training, "the mode is put back"
    finally:
        model.module.eval()
    with torch.no_grad():
        expected = model.module(torch.from_numpy(ids)[None])[0]
    assert found.shape == (len(ids), 320)
    assert torch.equal(found, expected)
    assert not found.requires_grad
    assert torch.equal(model.logits(ids.tolist()), found)
    assert torch.equal(model.logits(torch.from_numpy(ids)[None]), found[None])
    for bad in ([], [320], [-1], torch.zeros(1, 1, 1)):
        with pytest.raises(ConfigError, match="ids"):
            model.logits(bad)
    with pytest.raises(ConfigError, match=r"token ids, got text; model\.tokenizer\.encode"):
        model.logits("text")


def test_numbers_of_numpy_are_numbers(model: parbank.Model) -> None:
    options = {"tokens": 5, "top_k": 3, "seed": 2, "context": 16}
    assert model.sample("The", **{k: np.int64(v) for k, v in options.items()}) == model.sample("The", **options)


def test_samples_are_pieces_put_together(model: parbank.Model) -> None:
    options = {"tokens": 30, "seed": 3, "top_p": 0.95, "temperature": 1.0}
    text = model.sample("def ", **options)  # type: ignore[arg-type]
    pieces = list(model.stream("def ", **options))  # type: ignore[arg-type]
    assert "".join(pieces) == text
    assert len(pieces) > 5
    stop = text[5:8]
    assert model.sample("def ", stop=[stop], **options) == text[: text.index(stop)]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="come as a list"):
        model.sample(stop="end")
    with pytest.raises(ConfigError, match="above 0"):
        model.sample(top_p=0)


def test_save_writes_the_artifact_and_nothing_else(model: parbank.Model, home: Path, tmp_path: Path) -> None:
    written = model.save(tmp_path / "copy.pbk")
    assert written.read_bytes() == (home / "runs/first/model.pbk").read_bytes()
    source = tmp_path / "mine.pbk"
    shutil.copy(written, source)
    changed = parbank.load(source, device="cpu")
    with torch.no_grad():
        next(changed.module.parameters()).add_(1e-3)
    for other in (changed, parbank.load(find_checkpoint(home / "runs/first"), device="cpu")):
        with pytest.raises(ArtifactError, match=r"parbank.pack\(model, max_bytes=\.\.\., out='.*x.pbk'\)"):
            other.save(tmp_path / "x.pbk")
    assert not (tmp_path / "x.pbk").exists()


def test_export_and_import_lose_nothing(model: parbank.Model, tmp_path: Path) -> None:
    from parbank.artifact.safetensors import import_model

    path = model.export(tmp_path / "model.safetensors")
    assert path.with_suffix(".model").read_bytes() == model.tokenizer.model_bytes
    import_model(path, tmp_path / "again.pbk")
    assert parbank.load(tmp_path / "again.pbk", device="cpu").score(TEXT) == model.score(TEXT)
    half = model.export(tmp_path / "half.safetensors", dtype="bfloat16")
    assert half.stat().st_size < 0.6 * path.stat().st_size
    with pytest.raises(ConfigError, match="float64"):
        model.export(tmp_path / "x.safetensors", dtype="float64")


def test_a_checkpoint_is_packed_by_the_door(home: Path, tmp_path: Path, model: parbank.Model) -> None:
    trained = parbank.load(find_checkpoint(home / "runs/first"), device="cpu")
    few = {"quant.calibration_tokens": 2048, "quant.max_builds": 2}
    packed = parbank.pack(trained, max_bytes=60_000, out=tmp_path / "small.pbk", settings=few)
    assert packed.size == (tmp_path / "small.pbk").stat().st_size <= 60_000
    assert packed.uncalibrated == (), "every weight of parbank's own model is read by a linear layer or an embedding"
    again = parbank.load(tmp_path / "small.pbk", device="cpu")
    assert again.tokenizer.fingerprint == model.tokenizer.fingerprint
    assert again.score(TEXT).bpb == pytest.approx(trained.score(TEXT).bpb, rel=0.05)
    trained.data = None
    with pytest.warns(UserWarning, match="packing by the weights alone"):
        parbank.pack(trained, max_bytes=60_000, settings=few)
    with pytest.raises(DataError, match="does not exist"):
        parbank.pack(trained, max_bytes=60_000, calibration="text:no-such")
    rows = parbank.pack(trained, max_bytes=90_000, settings=["quant.method=rows"])
    assert rows.size <= 90_000


def test_what_no_model_is(model: parbank.Model) -> None:
    with pytest.raises(ConfigError, match=r"around a torch\.nn\.Module, got int"):
        parbank.Model(3, model.tokenizer, context=8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a whole number of tokens, at least 1; got 0"):
        parbank.Model(nn.Linear(1, 1), model.tokenizer, context=0)


def test_a_network_of_parbank_s_own_that_was_built_by_hand(model: parbank.Model, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = GPT(replace(get_recipe("nano").model, layers=1, value_layers=(), unet_skips=False, xsa_layers=1))
    mine = parbank.Model(module, model.tokenizer, context=32)
    batches = [torch.randint(320, (2, 32))]
    parbank.pack(mine, max_bytes=40_000, calibration=batches, out=tmp_path / "mine.pbk")
    again = parbank.load(tmp_path / "mine.pbk", device="cpu")
    assert again.context == 32
    assert again.score(TEXT, method="streaming").bpb == pytest.approx(
        mine.score(TEXT, method="streaming").bpb, rel=0.01
    )
