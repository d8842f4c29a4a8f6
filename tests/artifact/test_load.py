"""Artifacts read back: exactly the model that was packed, or an error that names the file."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parbank.artifact.about import KIND, TOKENIZER, About
from parbank.artifact.container import read_artifact, write_artifact
from parbank.artifact.contents import INTEGERS
from parbank.artifact.load import load_artifact
from parbank.artifact.pack import pack_tensors, unpack_tensors
from parbank.data.dataset import open_dataset
from parbank.data.tokenizer import Tokenizer
from parbank.errors import ArtifactError
from parbank.model import GPT
from parbank.quant.config import QuantConfig
from parbank.recipes import get_recipe

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer(text_spec: str) -> Tokenizer:
    return open_dataset(text_spec, vocab_size=320, say=lambda line: None).tokenizer


@pytest.fixture(scope="module")
def packed(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = get_recipe("nano").model
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    path = tmp_path_factory.mktemp("artifact") / "mödel one.pbk"
    pack_tensors(
        model.state_dict(),
        QuantConfig(),
        max_bytes=200_000,
        meta=About(model=config, context=64, data="stdlib", recipe="nano", seed=1).to_meta(),
        extra_sections={TOKENIZER: tokenizer.model_bytes},
    ).write(path)
    return path


def test_a_model_comes_back_with_exactly_the_packed_weights(packed: Path, tokenizer: Tokenizer) -> None:
    loaded = load_artifact(packed, CPU)
    stored = unpack_tensors(read_artifact(packed))
    state = loaded.model.state_dict()
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[name], stored[name]) for name in stored)
    assert (loaded.context, loaded.data) == (64, "stdlib")
    assert loaded.tokenizer.fingerprint == tokenizer.fingerprint
    # what is not a parameter (rotation tables) is there too: the same logits as a model built the usual way
    usual = GPT(loaded.model.config)
    usual.load_state_dict(stored)
    ids = torch.randint(0, 320, (2, 64))
    assert torch.equal(loaded.model(ids), usual(ids))


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ("stdlib", "stdlib"),
        ("fineweb", "fineweb"),
        ("fineweb:3", "fineweb:3"),
        ("text:/home/me/x", None),
        ("shards:x", None),
    ],
)
def test_an_artifact_names_only_data_anybody_can_have(data: str, named: str | None) -> None:
    meta = About(model=get_recipe("nano").model, context=8, data=data, recipe="nano", seed=0).to_meta()
    assert meta["data"] == named
    assert "/home" not in str(meta)


def test_every_flipped_bit_and_every_cut_is_refused_by_name(packed: Path, tmp_path: Path) -> None:
    whole = packed.read_bytes()
    draw = random.Random(0)
    path = tmp_path / "damaged.pbk"
    for _ in range(60):
        position, bit = draw.randrange(len(whole)), draw.randrange(8)
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :])
        with pytest.raises(ArtifactError, match=r"damaged\.pbk"):
            load_artifact(path, CPU)
    for length in [0, 1, 7, 8, 31, 40, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(20))]:
        path.write_bytes(whole[:length])
        with pytest.raises(ArtifactError, match=r"damaged\.pbk"):
            load_artifact(path, CPU)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ArtifactError, match=r"damaged\.pbk"):
        load_artifact(path, CPU)


@pytest.mark.parametrize(
    "content", [b"hello\n", b"PK\x03\x04" + bytes(100), b"\x80\x04cos\nsystem\n(S'true'\ntR.", bytes(64)]
)
def test_foreign_files_are_refused_by_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "foreign.pbk"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"foreign\.pbk is not a parbank artifact"):
        load_artifact(path, CPU)


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta: meta.update(kind="a picture"), "holds 'a picture'"),
        (lambda meta: meta.pop("kind"), "holds None"),
        (lambda meta: meta.pop("model"), "'model' is missing"),
        (lambda meta: meta.pop("context"), "'context' is missing"),
        (lambda meta: meta.update(context=0), "context is 0"),
        (lambda meta: meta.update(context="64"), "context is '64'"),
        (lambda meta: meta.update(context=10**9), "context is 1000000000"),
        (lambda meta: meta.update(data=5), "data is 5"),
        (lambda meta: meta.update(model=[1]), "table of fields"),
        (lambda meta: meta["model"].update(layers=3), "model.value_layers must lie in"),
        (lambda meta: meta["model"].update(layers=5), "the shape of blocks.4"),
        (lambda meta: meta["model"].update(layers=999), "its config has 999 layers"),
        (lambda meta: meta["model"].update(layers=10**9), "model.layers must be at most 1000"),
        (lambda meta: meta["model"].update(layers="four"), "model.layers must be a whole number"),
        (lambda meta: meta["model"].update(width=64), "the shape of"),
        (lambda meta: meta["model"].update(width=4 * 10**30), "cannot be rebuilt"),
        (lambda meta: meta["model"].update(heads=5), "multiple of model.heads"),
        (lambda meta: meta["model"].update(heads=0), "model.heads must be at least 1"),
        (lambda meta: meta["model"].update(tied=False), "the shape of head.weight"),
        (lambda meta: meta["model"].update(bigram_buckets=0), "the shape of bigram"),
        (lambda meta: meta["model"].update(vocab_size=321), "differ in .vocabulary, BOS.: .321, 1. and .320, 1."),
        (lambda meta: meta["model"].update(bos_id=2), "differ in .vocabulary, BOS.: .320, 2. and .320, 1."),
        (lambda meta: meta["model"].update(colour="red"), "model.colour is not a setting"),
    ],
)
def test_a_config_that_disagrees_with_the_content_is_refused_by_name(
    packed: Path, tmp_path: Path, change: Change, message: str
) -> None:
    artifact = read_artifact(packed)
    change(artifact.meta)
    path = tmp_path / "liar.pbk"
    write_artifact(path, artifact.meta, artifact.sections)
    with pytest.raises(ArtifactError, match=rf"liar\.pbk .*{message}"):
        load_artifact(path, CPU)


def test_shapes_are_compared_before_any_weight_is_decoded(packed: Path, tmp_path: Path) -> None:
    artifact = read_artifact(packed)
    artifact.meta["model"].update(width=64)
    path = tmp_path / "liar.pbk"
    write_artifact(path, artifact.meta, artifact.sections | {INTEGERS: b"nonsense" * 10_000})
    with pytest.raises(ArtifactError, match=r"liar\.pbk .*the shape of"):
        load_artifact(path, CPU)


def test_missing_and_broken_sections_are_refused_by_name(packed: Path, tmp_path: Path) -> None:
    artifact = read_artifact(packed)
    path = tmp_path / "partial.pbk"
    for name in artifact.sections:
        write_artifact(path, artifact.meta, {k: v for k, v in artifact.sections.items() if k != name})
        with pytest.raises(ArtifactError, match=r"partial\.pbk"):
            load_artifact(path, CPU)
        write_artifact(path, artifact.meta, artifact.sections | {name: b"nonsense"})
        with pytest.raises(ArtifactError, match=r"partial\.pbk"):
            load_artifact(path, CPU)
    write_artifact(path, {"kind": KIND}, {})
    with pytest.raises(ArtifactError, match=r"partial\.pbk"):
        load_artifact(path, CPU)


def test_a_tokenizer_of_another_size_is_refused(packed: Path, tmp_path: Path, text_spec: str) -> None:
    other = open_dataset(text_spec, vocab_size=300, say=lambda line: None).tokenizer
    artifact = read_artifact(packed)
    path = tmp_path / "swapped.pbk"
    write_artifact(path, artifact.meta, artifact.sections | {TOKENIZER: other.model_bytes})
    with pytest.raises(ArtifactError, match=r"swapped\.pbk .*differ in .vocabulary, BOS.: .320, 1. and .300, 1."):
        load_artifact(path, CPU)
