"""Every version of the format stays readable: a tiny file of each, made by the writer of its time, never written again."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from parbank.artifact.container import FORMAT_VERSION, READABLE_VERSIONS, encode_artifact, read_artifact
from parbank.artifact.contents import pack_contents, read_contents
from parbank.artifact.load import load_artifact
from parbank.artifact.pack import describe_tensors, unpack_tensors
from parbank.quant.integers import Quantised

DATA = Path(__file__).parent / "data"


def test_there_is_a_file_of_every_version():
    assert {path.name for path in DATA.glob("*.pbk")} == {f"v{version}.pbk" for version in READABLE_VERSIONS}
    assert max(READABLE_VERSIONS) == FORMAT_VERSION


@pytest.mark.parametrize("version", READABLE_VERSIONS)
def test_a_version_reads_to_the_same_numbers(version: int):
    path = DATA / f"v{version}.pbk"
    recorded = json.loads(path.with_suffix(".json").read_text())
    artifact = read_artifact(path)
    assert artifact.version == version
    tensors = unpack_tensors(artifact)
    hashes = {name: hashlib.sha256(t.numpy().astype("<f4").tobytes()).hexdigest() for name, t in tensors.items()}
    assert hashes == recorded["tensors"]
    assert [row.name for row in describe_tensors(artifact)] == list(tensors)
    loaded = load_artifact(path, torch.device("cpu"))
    assert loaded.tokenizer.fingerprint == recorded["tokenizer"]
    ids = torch.arange(64).reshape(2, 32) * 37 % 288
    with torch.no_grad():
        nats = float(loaded.model(ids[:, :-1], ids[:, 1:]))
    assert nats == pytest.approx(recorded["nats"], rel=1e-4)  # sums in another order on another machine


def test_the_writer_still_makes_the_file_of_its_version():
    """The bytes of version 2 follow from its integers and scales: a change of the coder that alters them shows here."""
    path = DATA / f"v{FORMAT_VERSION}.pbk"
    artifact = read_artifact(path)
    stored = read_contents(artifact)
    contents = {
        s.spec.name: s.content if isinstance(s.content, Quantised) else s.content.reshape(s.spec.shape) for s in stored
    }
    roles = {s.spec.name: s.spec.role for s in stored}
    extra = {"tokenizer": artifact.sections["tokenizer"]}
    assert pack_contents(contents, roles, artifact.meta, extra) == path.read_bytes()
    assert encode_artifact(artifact.meta, artifact.sections) == path.read_bytes()
