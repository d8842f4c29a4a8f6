"""The tokenizer gives every byte back, counts every byte once, and says what is wrong with anything it cannot use."""

import inspect
import io
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

import parbank.data.shards
import parbank.data.sources.files
from parbank.data import tokenizer as module
from parbank.data.tokenizer import MAX_VOCAB, MIN_VOCAB, SPACE, Tokenizer
from parbank.errors import DataError

SOURCES = [inspect.getsource(m) for m in (module, parbank.data.shards, parbank.data.sources.files, re, inspect, st)]
NASTY = [
    "",
    "\0",
    "a\0b",
    SPACE,
    f"a{SPACE}b {SPACE}{SPACE} c",
    "\u2585",
    "\t\tx\t",
    "\r\n",
    "a\r\nb\rc\n\r",
    "  lead and trail  ",
    "\n\n\n    def f():\n\n",
    "<s></s><unk><pad> <0x41><0xE2><s>",
    "\ufeffbyte order mark",
    "zero\u200bwidth\u200d\u2060\u00ad",
    "e\u0301 \u00e9 \ufb01 \uff11",
    "\U0001f600\U0010ffff\U000e0001",
    "\ufffe\uffff\ufffd\u2028\u2029\u0085\x7f\x1b",
    "\u3000\xa0\u2003 ",
    "\u4e2d\u6587 \u0627\u0644 \u0939\u093f",
]
signs = st.sampled_from([*NASTY, " ", "\n", "    ", "the ", "def ", "self", SPACE])
texts = st.one_of(st.text(max_size=60), st.lists(st.one_of(signs, st.text(max_size=5)), max_size=12).map("".join))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(SOURCES, 512)


@pytest.fixture(scope="module")
def prefixed() -> Tokenizer:
    """A model like the published one: a space before every document."""
    return Tokenizer.from_bytes(train_foreign(add_dummy_prefix=True, remove_extra_whitespaces=False))


def train_foreign(**options: object) -> bytes:
    model = io.BytesIO()
    lines = (line for text in SOURCES for line in text.splitlines())
    defaults = {"vocab_size": 512, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, minloglevel=2, num_threads=1, **{**defaults, **options}
    )
    return model.getvalue()


def with_bos(tokenizer: Tokenizer, documents: list[str]) -> np.ndarray:
    return np.concatenate([np.append(np.uint16(tokenizer.bos_id), tokenizer.encode(text)) for text in documents])


def count(tokenizer: Tokenizer, stream: np.ndarray) -> int:
    return int(tokenizer.count_bytes(stream[1:], stream[:-1]).sum())


@settings(max_examples=400, deadline=None)
@given(text=texts)
@example(text="".join(NASTY))
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16
    assert not np.isin(tokens, [0, tokenizer.bos_id]).any()  # neither unknown nor BOS
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode_bytes(tokens) == text.encode()
    assert int(tokenizer.byte_lengths[tokens].sum()) == len(text.encode())


@settings(max_examples=100, deadline=None)
@given(documents=st.lists(texts, min_size=1, max_size=5))
def test_bos_separates_documents_and_counts_no_bytes(tokenizer: Tokenizer, documents: list[str]) -> None:
    stream = with_bos(tokenizer, documents)
    assert np.count_nonzero(stream == tokenizer.bos_id) == len(documents)
    assert count(tokenizer, stream) == sum(len(text.encode()) for text in documents)
    assert tokenizer.decode(stream) == "".join(documents)


@pytest.mark.parametrize("text", NASTY)
def test_signs_sentencepiece_could_mangle(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_same_text_gives_the_same_model(tokenizer: Tokenizer) -> None:
    again = Tokenizer.train(iter(SOURCES), 512)
    assert again.model_bytes == tokenizer.model_bytes
    assert again.fingerprint == tokenizer.fingerprint
    assert Tokenizer.train(SOURCES[1:], 512).fingerprint != tokenizer.fingerprint


def test_model_has_the_size_asked_for_and_learns_newlines_and_indentation(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 512 == len(tokenizer.byte_lengths)
    pieces = [tokenizer.decode([token]) for token in range(258, 512)]
    assert any(len(piece) > 1 and "\n" in piece for piece in pieces)
    assert "    " in pieces
    source = inspect.getsource(parbank.data.shards)
    assert len(source.encode()) / len(tokenizer.encode(source)) > 1.6


def test_bytes_round_trip(tokenizer: Tokenizer) -> None:
    again = Tokenizer.from_bytes(tokenizer.model_bytes)
    assert np.array_equal(again.encode(SOURCES[0]), tokenizer.encode(SOURCES[0]))


def test_long_texts_are_encoded_in_parts_and_lose_nothing(tokenizer: Tokenizer) -> None:
    lines = "".join(SOURCES) * 3
    for text in (lines, "x" * 300_000, f"ab{SPACE}\n" * 50_000, "\U0001f600" * 70_000):
        assert len(text) > module._PART_CHARS
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_batches_on_threads_give_the_tokens_of_single_texts(tokenizer: Tokenizer) -> None:
    batch = [*NASTY, *SOURCES, "".join(SOURCES) * 2]
    for single, together in zip(map(tokenizer.encode, batch), tokenizer.encode_batch(batch, threads=3), strict=True):
        assert np.array_equal(single, together)
    assert tokenizer.encode_batch([]) == []


def test_bytes_that_are_no_utf8_become_replacement_signs(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("\U0001f600")[:2]
    assert tokenizer.decode(half) == "\ufffd"
    assert tokenizer.decode_bytes([tokenizer.bos_id, *half.tolist()]) == "\U0001f600".encode()[:2]


def test_tokens_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    for token in (-1, 512):
        with pytest.raises(DataError, match="tokens must be 0 to 511"):
            tokenizer.decode([token])


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="surrogate"):
        tokenizer.encode("a\ud800")
    with pytest.raises(DataError, match="the byte 0xe9, which is not UTF-8"):
        tokenizer.encode(b"caf\xe9".decode(errors="surrogateescape"))


@pytest.mark.parametrize("text", ["hello world " * 3, "one two three four five six seven eight nine ten eleven " * 9])
def test_vocabulary_too_large_for_the_text_names_the_largest(text: str) -> None:
    with pytest.raises(DataError, match="too short for a vocabulary of 5000 tokens") as caught:
        Tokenizer.train([text], 5000)
    largest = re.search(r"at most (\d+) tokens", str(caught.value))
    if largest is None:
        assert str(caught.value).endswith("give more text that does not repeat itself")
    else:
        assert Tokenizer.train([text], int(largest.group(1))).vocab_size == int(largest.group(1))


@pytest.mark.parametrize("size", [0, MIN_VOCAB - 1, MAX_VOCAB + 1])
def test_impossible_vocabulary_is_refused(size: int) -> None:
    with pytest.raises(DataError, match=f"choose {MIN_VOCAB} to {MAX_VOCAB}"):
        Tokenizer.train(SOURCES, size)


@pytest.mark.parametrize("text", ["", "\t\0\u2581"])
def test_no_text_to_train_on(text: str) -> None:
    with pytest.raises(DataError, match="no text to train"):
        Tokenizer.train([text], 512)


def test_a_script_with_more_characters_than_tokens_still_trains() -> None:
    rng = np.random.default_rng(0)
    text = "".join(chr(0x4E00 + int(3000 * share**3)) for share in rng.random(60_000))
    tokenizer = Tokenizer.train([text], MIN_VOCAB + 100)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) < 0.9 * len(text.encode())


def test_text_full_of_sentencepiece_names_trains_and_comes_back() -> None:
    text = SOURCES[0] + "<s> <unk> <0x41>x<0x41> </s>\u2585\u2581\t" * 5000
    tokenizer = Tokenizer.train([text], 400)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("model", [b"", b"not a model", bytes(1000)])
def test_bytes_that_are_no_model_are_refused(model: bytes, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a SentencePiece model"):
        Tokenizer.from_bytes(model)
    path = tmp_path / "broken.model"
    path.write_bytes(model)
    with pytest.raises(DataError, match=r"broken\.model.*not a SentencePiece model"):
        Tokenizer.load(path)


def test_a_number_without_an_end_is_refused_at_once() -> None:
    """A megabyte of it took a minute: each byte copied the number so far."""
    began = time.process_time()
    with pytest.raises(DataError, match="not a SentencePiece model"):
        Tokenizer.from_bytes(b"\xff" * 1_000_000)
    assert time.process_time() - began < 2


def test_a_kind_that_from_bytes_knows_is_read_from_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = object()
    monkeypatch.setattr(Tokenizer, "from_bytes", lambda model: kind if model == b"my kind" else None)
    (tmp_path / "my.model").write_bytes(b"my kind")
    assert Tokenizer.load(tmp_path / "my.model") is kind


def test_truncated_model_and_missing_file_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        Tokenizer.from_bytes(tokenizer.model_bytes[:1001])
    with pytest.raises(DataError, match=r"none\.model.*No such file"):
        Tokenizer.load(tmp_path / "none.model")


@settings(max_examples=200, deadline=None)
@given(documents=st.lists(texts, min_size=1, max_size=4))
@example(documents=["plain", " one space", "  two", "\n", ""])
def test_foreign_dummy_prefix_is_counted_out(prefixed: Tokenizer, documents: list[str]) -> None:
    documents = [text.replace(SPACE, "") for text in documents]  # the foreign model itself takes U+2581 for a space
    stream = with_bos(prefixed, documents)
    assert count(prefixed, stream) == sum(len(text.encode()) for text in documents)
    assert prefixed.decode(stream) == "".join(documents)


def test_foreign_prefix_differs_only_after_bos(prefixed: Tokenizer) -> None:
    stream = with_bos(prefixed, ["self self"])
    assert prefixed.decode(stream) == "self self"
    assert int(prefixed.byte_lengths[stream].sum()) == len("self self") + 1
    last = stream[-1:]
    assert prefixed.decode_bytes(last, previous=int(stream[-2])) == b" self"
    assert prefixed.decode_bytes(last) == b"self"
    shaped = prefixed.count_bytes(stream[1:].reshape(1, -1), stream[:-1].reshape(1, -1))
    assert shaped.shape == (1, len(stream) - 1)
    assert shaped.dtype == np.int64


def test_foreign_models_whose_bytes_cannot_be_counted_are_refused() -> None:
    with pytest.raises(DataError, match="no BOS"):
        Tokenizer.from_bytes(train_foreign(bos_id=-1))
    with pytest.raises(DataError, match="after every document"):
        Tokenizer.from_bytes(train_foreign(treat_whitespace_as_suffix=True))


def test_a_piece_that_is_no_text_is_named(tokenizer: Tokenizer) -> None:
    damaged = tokenizer.model_bytes.replace(b"\x0a\x01e\x15", b"\x0a\x01\xe5\x15")
    assert damaged != tokenizer.model_bytes
    with pytest.raises(DataError, match=r"piece \d+ of the tokenizer is not UTF-8"):
        Tokenizer.from_bytes(damaged)


def test_foreign_model_without_byte_pieces_still_encodes() -> None:
    foreign = Tokenizer.from_bytes(train_foreign(byte_fallback=False, add_dummy_prefix=False))
    assert foreign.decode(foreign.encode("self.value = 1")) == "self.value = 1"


def test_ctrl_c_while_the_text_is_read_is_no_bad_text() -> None:
    """SentencePiece wraps what its lines raise."""

    def lines() -> Iterator[str]:
        yield "It was the best of times."
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module._train(lines(), 300, (), size=25)
