"""Whole streams are counted and decoded a block at a time: where blocks end shows nowhere.

Seen with a tokenizer that writes a space before every document: there a token's bytes depend on the token before it, which
may lie in the block before.
"""

from pathlib import Path

import numpy as np
import pytest

from parbank.data import dataset, validation
from parbank.data.dataset import Dataset
from parbank.data.shards import TokenSet
from parbank.data.tokenizer import Tokenizer
from parbank.eval import score
from parbank.eval.score import Scored
from tests.data.test_tokenizer import train_foreign, with_bos

DOCUMENTS = [" two spaces or one", "import re", "", " ", "a b c d", "  x"]
BLOCKS = [1, 2, 3, 7]


@pytest.fixture(scope="module", name="tokenizer")
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_bytes(train_foreign(add_dummy_prefix=True, remove_extra_whitespaces=False))


@pytest.fixture(scope="module", name="tokens")
def _tokens(tokenizer: Tokenizer) -> np.ndarray:
    return with_bos(tokenizer, DOCUMENTS)


@pytest.mark.parametrize("block", BLOCKS)
def test_of_a_dataset(tokenizer: Tokenizer, tokens: np.ndarray, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "_BLOCK", block)
    stream = TokenSet([tokens])
    data = Dataset(train=stream, val=stream, tokenizer=tokenizer, name="made here", folder=Path(), fingerprint="")
    assert data.val_text() == "".join(DOCUMENTS).encode()
    assert data.val_bytes == len("".join(DOCUMENTS).encode())


@pytest.mark.parametrize("block", BLOCKS)
def test_of_a_score(tokenizer: Tokenizer, tokens: np.ndarray, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score, "_BLOCK", block)
    scored = Scored(tokens, np.zeros(len(tokens) - 1, dtype=np.float32))
    assert np.array_equal(scored.byte_counts(tokenizer), tokenizer.count_bytes(tokens[1:], tokens[:-1]))


@pytest.mark.parametrize("block", BLOCKS)
def test_of_documents(tokenizer: Tokenizer, tokens: np.ndarray, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = validation._describe(TokenSet([tokens]), "", tokenizer, validation.PROVED)
    monkeypatch.setattr(validation, "_BLOCK", block)
    found = validation._describe(TokenSet([tokens]), "", tokenizer, validation.PROVED)
    assert (found.documents, found.documents_sha256) == (whole.documents, whole.documents_sha256)
    assert whole.documents == len(DOCUMENTS)
