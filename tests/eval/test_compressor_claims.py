"""What a compressed file claims is checked before, and while, it is decoded: no small file costs hours."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from constriction import stream
from torch import Tensor

from parbank.artifact.load import LoadedModel
from parbank.data.dataset import open_dataset
from parbank.errors import ArtifactError
from parbank.eval.compressor import blocks, coder
from parbank.eval.compressor.archive import compress, decompress
from parbank.eval.compressor.coder import PRECISION, STATE, find_least_bits, make_weights
from parbank.eval.compressor.container import read_blocks, read_header, write_block, write_end, write_header
from tests.eval.test_compressor import make_loaded

CONTENT = b"def main():\n    return 1\n" * 9


@pytest.fixture(scope="module")
def loaded(text_spec: str) -> LoadedModel:
    return make_loaded(open_dataset(text_spec, vocab_size=320, say=lambda line: None).tokenizer)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each step of the model."""
    taken: list[int] = []
    take = coder._Steps.take

    def count(self: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
        taken.append(len(ids))
        return take(self, ids)

    monkeypatch.setattr(coder._Steps, "take", count)
    return taken


@pytest.fixture
def certain(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is as certain as can be that an "a" follows, as a token of one byte."""
    assert loaded.tokenizer.byte_tokens is not None
    token = int(loaded.tokenizer.byte_tokens[ord("a")])

    def make_certain(logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.zeros_like(logits)
        logits[:, token] = 100.0
        return make_weights(logits)

    monkeypatch.setattr(coder, "make_weights", make_certain)
    monkeypatch.setattr(blocks, "to_tokens", lambda data, tokenizer: np.full(len(data), token, np.uint16))


def forge(loaded: LoadedModel, folder: Path, content: bytes = CONTENT, **claims: Any) -> Path:
    """A file of two segments with false claims and sound checksums."""
    (folder / "a.txt").write_bytes(content)
    compress([folder / "a.txt"], loaded, folder / "a.pbz", segments=2, always_model=True)
    with open(folder / "a.pbz", "rb") as file:
        header = read_header(file, "it")
        (block,) = read_blocks(file, header.files[0][1], "it")
    block = replace(block, **claims)
    with open(folder / "false.pbz", "wb") as file:
        write_header(file, replace(header, files=[("a.txt", block.size)]))
        write_block(file, block)
        write_end(file)
    return folder / "false.pbz"


@pytest.mark.parametrize("tokens", [1 << 29, 1 << 28, 100_000_000])
def test_a_claim_that_no_model_could_code_is_refused_before_any_work(
    loaded: LoadedModel, tmp_path: Path, tokens: int, steps: list[int]
) -> None:
    path = forge(loaded, tmp_path, tokens=tokens, size=1 << 28)
    del steps[:]
    with pytest.raises(ArtifactError, match=rf"damaged: a block claims {tokens:,} tokens in \d+ bytes, and they take"):
        decompress(path, loaded, tmp_path / "back")
    assert steps == []
    assert not list((tmp_path / "back").glob("*"))


def test_decoding_ends_with_the_coded_bytes(loaded: LoadedModel, tmp_path: Path, steps: list[int]) -> None:
    """A claim just below that bound: past its end, the range coder reads on without an error."""
    path = forge(loaded, tmp_path, tokens=2_000_000, size=1 << 28)
    honest = len(steps)
    del steps[:]
    with pytest.raises(ArtifactError, match="cannot be decoded here"):
        decompress(path, loaded, tmp_path / "back")
    # The file is read as two segments, as it was written. STATE bits more make a few tokens.
    assert honest <= len(steps) < honest + 40


@pytest.mark.usefixtures("certain")
def test_decoding_ends_with_the_claimed_bytes(loaded: LoadedModel, tmp_path: Path, steps: list[int]) -> None:
    """Tokens that cost next to nothing: the coded bytes do not end, and the text does."""
    path = forge(loaded, tmp_path, b"a" * 500, tokens=2_000_000, size=100)
    del steps[:]
    with pytest.raises(ArtifactError, match="cannot be decoded here"):
        decompress(path, loaded, tmp_path / "back")
    assert len(steps) == 51, "two bytes a step"


@pytest.mark.usefixtures("certain")
def test_the_most_compressible_text_comes_back(loaded: LoadedModel, tmp_path: Path) -> None:
    content = b"a" * 20_000
    (tmp_path / "a.txt").write_bytes(content)
    written = compress([tmp_path / "a.txt"], loaded, tmp_path / "a.pbz", segments=512, always_model=True)
    assert written.tally.coded <= 8
    (path,) = decompress(tmp_path / "a.pbz", loaded, tmp_path / "back")
    assert path.read_bytes() == content


def test_ten_megabytes_of_zeros_come_back(loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "zeros").write_bytes(bytes(10_000_000))
    written = compress([tmp_path / "zeros"], loaded, tmp_path / "a.pbz")
    assert written.size < 10_000
    (path,) = decompress(tmp_path / "a.pbz", loaded, tmp_path / "back")
    assert path.read_bytes() == bytes(10_000_000)


@pytest.mark.parametrize("vocab", [2, 320, 1024, 32_768])
def test_the_likeliest_tokens_take_the_least_bits(vocab: int) -> None:
    """The range coder's own output, for nothing but the likeliest token: never below the bound, and close to it."""
    logits = torch.zeros(1, vocab)
    logits[0, vocab // 2] = 200.0
    weights, _ = make_weights(logits)
    assert float(weights.max()) + 1 == (1 << PRECISION) - vocab + 1
    count, encoder = 1 << 20, stream.queue.RangeEncoder()
    model = stream.model.Categorical(weights[0].numpy(), perfect=False)
    encoder.encode(np.full(count, vocab // 2, np.int32), model)
    bits, least = 32 * len(encoder.get_compressed()), find_least_bits(count, vocab)
    assert least - STATE <= bits <= 1.05 * least + STATE, "the coder rounds its range down, which costs a few percent"
