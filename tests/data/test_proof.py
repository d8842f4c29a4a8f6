"""Tokens are a text's only when they stand for exactly its bytes: every way we know to cheat on that is refused by name."""

import argparse
import calendar
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2 as proto

from parbank.data.proof import check_tokens, describe_prefix
from parbank.data.tokenizer import SPACE, Tokenizer
from parbank.data.validation import open_validation
from parbank.errors import DataError
from tests.data.attacks import edit, find_piece, letters_to_a, train_rewriting

LINES = Path(argparse.__file__).read_text(encoding="utf-8").splitlines()
TEXT = Path(calendar.__file__).read_text(encoding="utf-8")[:5000]


def silent(line: str) -> None: ...


@pytest.fixture(scope="module")
def honest() -> Tokenizer:
    return Tokenizer.train(["\n".join(LINES)], 320)


@pytest.fixture(scope="module")
def foreign() -> bytes:
    return train_rewriting(LINES, {"\u00e9": "e"})


def prove(model: bytes, text: str = TEXT) -> None:
    tokenizer = Tokenizer.from_bytes(model)
    check_tokens(tokenizer, tokenizer.encode(text), text.encode(), "the page")


def test_a_normaliser_that_makes_every_letter_an_a() -> None:
    """The attack that faked a score: as many bytes are counted as the text has, and they are not those of the text."""
    tokenizer = Tokenizer.from_bytes(letters_to_a(LINES))
    tokens = tokenizer.encode("Hello, World")
    assert int(tokenizer.byte_lengths[tokens].sum()) == len("Hello, World")
    with pytest.raises(
        DataError, match=r"the page \(it begins 'Hello, World'\).*byte 0 .* 'Hello, World' .*'aaaaa, aaaaa'"
    ):
        check_tokens(tokenizer, tokens, b"Hello, World", "the page")


def test_a_piece_that_counts_more_bytes_than_it_stands_for() -> None:
    """A normaliser that writes one character as eight would divide the bits by eight times the bytes."""
    model = train_rewriting(LINES, {"e": "eeeeeeee"})
    tokenizer = Tokenizer.from_bytes(model)
    assert int(tokenizer.byte_lengths[tokenizer.encode(TEXT)].sum()) > 1.3 * len(TEXT)
    with pytest.raises(DataError, match="its tokens are not its text"):
        prove(model)


def test_a_normaliser_that_drops_text(foreign: bytes) -> None:
    with pytest.raises(DataError, match="stand for nothing"):
        prove(train_rewriting(LINES, {"z": ""}), "abc z")
    squeezing = edit(foreign, lambda model: setattr(model.normalizer_spec, "remove_extra_whitespaces", True))
    with pytest.raises(DataError, match="its tokens are not its text"):
        prove(squeezing, "two  spaces")


def test_characters_that_become_unknown(foreign: bytes) -> None:
    without = train_rewriting(LINES, {"\u00e9": "e"}, byte_fallback=False)
    prove(without, "self.value")
    with pytest.raises(DataError, match=r"from byte 4 on the text has '\\u4e2d' and the tokens stand for nothing"):
        prove(without, "self\u4e2d")
    prove(foreign, "self\u4e2d")


def test_a_letter_that_is_the_sign_of_a_new_document(foreign: bytes) -> None:
    """BOS counts no bytes and is its own document boundary: a letter of that name would vanish from the text. SentencePiece
    reads the letter as BOS before 0.2.3, and by its byte since; so the tokens are also made by hand."""

    def rename(model: "proto.ModelProto") -> None:
        find_piece(model, "q").piece = "unlikely"
        find_piece(model, "<s>").piece = "q"
        model.trainer_spec.bos_piece = "q"

    tokenizer = Tokenizer.from_bytes(edit(foreign, rename))
    read, by_hand = tokenizer.encode("a qu"), [*tokenizer.encode("a "), tokenizer.bos_id, *tokenizer.encode("u")]
    for tokens in (read, np.array(by_hand, dtype=np.uint16)):
        if tokenizer.bos_id in tokens:
            with pytest.raises(DataError, match=r"token \d of \d is BOS, which ends a document"):
                check_tokens(tokenizer, tokens, b"a qu", "the page")
        else:
            check_tokens(tokenizer, tokens, b"a qu", "the page")
            assert tokenizer.decode_bytes(tokens) == b"a qu"
    assert tokenizer.bos_id in by_hand


def test_two_pieces_of_the_same_bytes_are_no_way_to_cheat(foreign: bytes) -> None:
    """Which of them the tokenizer takes is for the model to predict, so a text only costs more."""
    tokenizer = Tokenizer.from_bytes(foreign)
    by_name = {tokenizer.decode_bytes([token]): token for token in range(258, 400)}
    letter = next(name for name in by_name if len(name) == 1)
    byte = next(token for token in range(258) if tokenizer.decode_bytes([token]) == letter)
    for token in (by_name[letter], byte):
        check_tokens(tokenizer, np.array([token], dtype=np.uint16), letter, "the page")
        assert tokenizer.byte_lengths[token] == 1


def test_the_space_before_a_document_is_allowed_and_named(honest: Tokenizer) -> None:
    model = train_rewriting(LINES, {"\u00e9": "e"}, add_dummy_prefix=True)
    for text in ("self", " self", "  self", "\nself"):
        prove(model, text)
    assert "puts a space before each document" in str(describe_prefix(Tokenizer.from_bytes(model)))
    assert describe_prefix(honest) is None
    with pytest.raises(DataError, match="its tokens are not its text"):
        prove(model, f"a{SPACE}b")  # a foreign model takes that sign for a space


def test_a_byte_piece_that_names_no_byte(foreign: bytes) -> None:
    with pytest.raises(DataError, match="byte"):
        Tokenizer.from_bytes(edit(foreign, lambda model: setattr(find_piece(model, "<0x41>"), "piece", "<0xZZ>")))


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=80), place=st.integers(0, 79), token=st.integers(2, 319))
def test_own_tokens_are_proved_and_any_changed_one_is_refused(
    honest: Tokenizer, text: str, place: int, token: int
) -> None:
    tokens, document = honest.encode(text), text.encode()
    check_tokens(honest, tokens, document, "the page")
    if len(tokens):
        changed = tokens.copy()
        changed[place % len(tokens)] = token
        if honest.decode_bytes(changed[place % len(tokens) :][:1]) != honest.decode_bytes(
            tokens[place % len(tokens) :][:1]
        ):
            with pytest.raises(DataError, match="its tokens are not its text"):
                check_tokens(honest, changed, document, "the page")
        with pytest.raises(DataError, match="its tokens are not its text"):
            check_tokens(honest, tokens[:-1], document, "the page")
    with pytest.raises(DataError, match="BOS"):
        check_tokens(honest, np.append(tokens, np.uint16(honest.bos_id)), document, "the page")


def test_the_document_that_is_not_its_tokens_is_named(tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_text('{"text": "123"}\n{"text": "4 abc"}\n')
    with pytest.raises(DataError, match=r"validation document \d \(it begins '4 abc'\).*from byte 3 on"):
        open_validation(f"text:val={tmp_path}/all.jsonl", Tokenizer.from_bytes(letters_to_a(LINES)), say=silent)
    with pytest.raises(DataError, match="its tokens are not its text"):
        open_validation("stdlib", Tokenizer.from_bytes(letters_to_a(LINES)), say=silent)
