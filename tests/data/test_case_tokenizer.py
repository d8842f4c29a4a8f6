"""A tokenizer with case operators: lossless, proved as strictly as any other, and unknown to readers of before."""

import argparse
import calendar
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2 as proto

from parbank.data import dataset as module
from parbank.data.case import CAPITAL, WORD
from parbank.data.dataset import open_dataset
from parbank.data.prepare import prepare_text
from parbank.data.proof import check_tokens
from parbank.data.shards import TokenSet
from parbank.data.tokenizer import MARK, SPACE, DecodeState, Tokenizer, TokenizerConfig
from parbank.data.validation import open_validation
from parbank.errors import DataError
from tests.data.attacks import Change, edit, find_piece, train_rewriting
from tests.data.test_tokenizer import NASTY, SOURCES, train_foreign, with_bos

OPERATORS = TokenizerConfig(case_operators=True)
signs = st.sampled_from([*NASTY, CAPITAL, WORD, SPACE, "A", "b", " ", "HTTP", "The ", "self", "\n", f"{WORD} ab"])
texts = st.one_of(st.text(max_size=60), st.lists(st.one_of(signs, st.text(max_size=5)), max_size=12).map("".join))


def silent(line: str) -> None: ...


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(SOURCES, 512, OPERATORS)


@pytest.fixture(scope="module")
def operators(tokenizer: Tokenizer) -> tuple[int, int]:
    """The tokens of CAPITAL and WORD."""
    found = {tokenizer.name_operator(token): token for token in range(512)}
    return found["<capital>"], found["<capitals>"]


@settings(max_examples=400, deadline=None)
@given(text=texts)
@example(text="".join(NASTY) + f"{CAPITAL}a{WORD}AB{CAPITAL}")
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.uint16
    assert not np.isin(tokens, [0, tokenizer.bos_id]).any()
    assert tokenizer.decode_bytes(tokens) == text.encode()
    assert int(tokenizer.byte_lengths[tokens].sum()) == len(text.encode())
    check_tokens(tokenizer, tokens, text.encode(), "the page")
    state = DecodeState()
    assert b"".join(tokenizer.decode_bytes([int(token)], state=state) for token in tokens) == text.encode()


@settings(max_examples=200, deadline=None)
@given(documents=st.lists(texts, min_size=1, max_size=5), block=st.sampled_from([1, 2, 5, 1000]))
@example(documents=["ends in CAPITALS", "small", "A", "b", "AB", " cd"], block=1)
def test_documents_do_not_reach_into_each_other(tokenizer: Tokenizer, documents: list[str], block: int) -> None:
    stream, whole = with_bos(tokenizer, documents), "".join(documents).encode()
    assert int(tokenizer.count_bytes(stream[1:], stream[:-1]).sum()) == len(whole)
    assert tokenizer.decode_bytes(stream) == whole
    tokens = TokenSet([stream])
    data = module.Dataset(train=tokens, val=tokens, tokenizer=tokenizer, name="", folder=Path(), fingerprint="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        assert data.val_text() == whole


@settings(max_examples=200, deadline=None)
@given(first=texts, second=texts)
@example(first="AB", second="cd")
def test_texts_that_are_continued_can_be_joined(tokenizer: Tokenizer, first: str, second: str) -> None:
    tokens = np.concatenate([tokenizer.encode(first, continued=True), tokenizer.encode(second)])
    assert tokenizer.decode_bytes(tokens) == (first + second).encode()


def test_words_are_the_same_tokens_in_any_case(tokenizer: Tokenizer, operators: tuple[int, int]) -> None:
    capital, word = operators
    small = tokenizer.encode(" self.value").tolist()
    assert tokenizer.encode(" Self.value").tolist() == [capital, *small]
    assert tokenizer.encode(" SELF").tolist() == [word, *tokenizer.encode(" self").tolist()]
    assert tokenizer.encode("THE").tolist() == [word, *tokenizer.encode("the").tolist()]
    assert tokenizer.byte_lengths[[capital, word]].tolist() == [0, 0]
    assert not any(chr(letter).encode() in piece for letter in range(65, 91) for piece in pieces(tokenizer))


def pieces(tokenizer: Tokenizer) -> list[bytes]:
    single = set() if tokenizer.byte_tokens is None else set(tokenizer.byte_tokens.tolist())
    return [tokenizer.decode_bytes([token]) for token in range(512) if token not in single]


def test_a_text_that_holds_the_operators_characters_is_no_command(
    tokenizer: Tokenizer, operators: tuple[int, int]
) -> None:
    for sign in (CAPITAL, WORD):
        tokens = tokenizer.encode(f"a{sign}b")
        assert not np.isin(tokens, operators).any()
        assert tokenizer.decode(tokens) == f"a{sign}b"
    assert tokenizer.decode(tokenizer.encode(f"{WORD}AB{CAPITAL}C")) == f"{WORD}AB{CAPITAL}C"


def test_long_texts_are_encoded_in_parts_and_lose_nothing(tokenizer: Tokenizer) -> None:
    for text in ("AbC dEF " * 20_000, "A" * 200_000, "a" * 65_535 + "BC" * 40_000, f"Ab{SPACE}{WORD}C\n" * 30_000):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    batch = [*NASTY, *SOURCES, "ABC" * 50_000]
    for single, together in zip(map(tokenizer.encode, batch), tokenizer.encode_batch(batch, threads=3), strict=True):
        assert np.array_equal(single, together)
    with pytest.raises(DataError, match="surrogate"):
        tokenizer.encode("A\ud800")


def test_the_case_of_a_prompt_goes_on(tokenizer: Tokenizer, operators: tuple[int, int]) -> None:
    capital, word = operators
    letters = tokenizer.encode("ab").tolist()
    for prompt, expected in (
        ([word, *letters], b"AB"),
        ([capital], b"Ab"),
        ([capital, *letters], b"ab"),
        ([word, tokenizer.bos_id], b"ab"),
        ([], b"ab"),
    ):
        state = DecodeState()
        tokenizer.decode_bytes(prompt, state=state)
        assert tokenizer.decode_bytes(letters, state=state) == expected
    assert tokenizer.decode_bytes(letters, previous=capital) == b"Ab"
    assert tokenizer.name_operator(letters[0]) is None


def test_operators_that_change_nothing_are_no_way_to_cheat(tokenizer: Tokenizer, operators: tuple[int, int]) -> None:
    """An operator without a letter costs the model a token and stands for nothing. One that changes the text is refused."""
    capital, word = operators
    document = b"a Sea 1"
    tokens = tokenizer.encode(document.decode()).tolist()
    digit = tokens[:-1], tokens[-1:]
    for extra in ([capital], [word], [capital, word], [word] * 9):
        idle = np.array([*digit[0], *extra, *digit[1], *extra], np.uint16)
        check_tokens(tokenizer, idle, document, "the page")
        assert int(tokenizer.byte_lengths[idle].sum()) == len(document)
        with pytest.raises(
            DataError, match=r"from byte 0 on the text has 'a Sea 1' and the tokens stand for 'A Sea 1'"
        ):
            check_tokens(tokenizer, np.array([*extra, *tokens], np.uint16), document, "the page")
    without = np.array([token for token in tokens if token != capital], np.uint16)
    with pytest.raises(DataError, match="its tokens are not its text"):
        check_tokens(tokenizer, without, document, "the page")
    with pytest.raises(DataError, match="BOS"):
        check_tokens(tokenizer, np.array([capital, tokenizer.bos_id, *tokens], np.uint16), document, "the page")


def swallow(model: "proto.ModelProto") -> None:
    """A longer token that holds an operator."""
    piece = find_piece(model, "self")
    piece.piece, piece.type = f"{CAPITAL}self", proto.ModelProto.SentencePiece.USER_DEFINED


def unprotect(model: "proto.ModelProto") -> None:
    """The normaliser may change the operator, as any other character."""
    find_piece(model, CAPITAL).type = proto.ModelProto.SentencePiece.NORMAL


@pytest.mark.parametrize(
    ("rules", "change", "found"),
    [
        ({"\u00e9": "e"}, swallow, f"{CAPITAL}self"),
        ({letter: "a" for letter in "bcdefghijklmnopqrstuvwxyz"}, None, "Aaaa"),
        ({CAPITAL: ""}, unprotect, "self"),
        ({CAPITAL: WORD}, unprotect, "SELF"),
    ],
    ids=["part of a token", "one letter", "dropped", "another operator"],
)
def test_hostile_models_are_refused(rules: dict[str, str], change: Change | None, found: str) -> None:
    """Each would make "Self" cheaper than it is. The decoded bytes decide."""
    model = train_rewriting(SOURCES[0].lower().splitlines(), rules, user_defined_symbols=[CAPITAL, WORD])
    hostile = Tokenizer.from_bytes(MARK + (edit(model, change) if change else model))
    assert hostile.decode(hostile.encode("Self")) == found
    with pytest.raises(DataError, match="its tokens are not its text"):
        check_tokens(hostile, hostile.encode("Self"), b"Self", "the page")
    check_tokens(hostile, hostile.encode("a"), b"a", "the page")


def test_a_file_without_what_operators_need_is_refused(tokenizer: Tokenizer) -> None:
    plain, model = Tokenizer.train(SOURCES, 512).model_bytes, tokenizer.model_bytes.removeprefix(MARK)

    def control(found: "proto.ModelProto") -> None:
        find_piece(found, WORD).type = proto.ModelProto.SentencePiece.CONTROL

    for file in (MARK + plain, MARK + edit(model, control)):
        with pytest.raises(DataError, match="lacks their tokens"):
            Tokenizer.from_bytes(file)
    symbols = {"user_defined_symbols": [CAPITAL, WORD]}
    for options in ({"add_dummy_prefix": True}, {"add_dummy_prefix": False, "byte_fallback": False}):
        with pytest.raises(DataError, match="adds a space before documents or lacks byte tokens"):
            Tokenizer.from_bytes(MARK + train_foreign(**options, **symbols))
    with pytest.raises(DataError, match="does not know tokenizers with 'wings 9'"):
        Tokenizer.from_bytes(MARK.replace(b"case operators 1", b"wings 9") + model)
    with pytest.raises(DataError, match="not a SentencePiece model"):
        Tokenizer.from_bytes(MARK)


def test_a_reader_that_knows_no_operators_refuses_the_file(tokenizer: Tokenizer) -> None:
    """A parbank of before gives the whole file to SentencePiece, as other programs do."""
    with pytest.raises(RuntimeError):
        sentencepiece.SentencePieceProcessor().LoadFromSerializedProto(tokenizer.model_bytes)
    again = Tokenizer.from_bytes(tokenizer.model_bytes)
    assert again.case_operators
    assert again.fingerprint == tokenizer.fingerprint
    assert np.array_equal(again.encode(SOURCES[0]), tokenizer.encode(SOURCES[0]))


def test_the_same_text_gives_the_same_model_and_plain_ones_have_no_operators(tokenizer: Tokenizer) -> None:
    assert Tokenizer.train(iter(SOURCES), 512, OPERATORS).model_bytes == tokenizer.model_bytes
    plain = Tokenizer.train(SOURCES, 512)
    assert not plain.case_operators
    assert plain.name_operator(2) is None
    with pytest.raises(DataError, match="no text to train"):
        Tokenizer.train([f"{CAPITAL}{WORD}"], 512, OPERATORS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("text")
    for name in (argparse.__file__, calendar.__file__):
        (made / Path(name).name).write_bytes(Path(name).read_bytes())
    return made


def test_data_with_and_without_operators_lie_side_by_side(folder: Path, tmp_path: Path) -> None:
    spec, said = f"text:train={folder}/argparse.py,val={folder}/calendar.py", list[str]()
    plain = open_dataset(spec, vocab_size=320, cache=tmp_path, say=said.append)
    with_case = open_dataset(spec, vocab_size=320, tokenizer=OPERATORS, cache=tmp_path, say=said.append)
    assert plain.folder != with_case.folder
    assert with_case.text == plain.text == "proved"
    assert with_case.val_text() == plain.val_text() == Path(calendar.__file__).read_bytes()
    assert with_case.val_bytes == plain.val_bytes
    assert with_case.fingerprint != plain.fingerprint
    manifests = [(data.folder / "manifest.json").read_text() for data in (plain, with_case)]
    assert ["case_operators" in text for text in manifests] == [False, True]
    said.clear()
    assert open_dataset(spec, vocab_size=320, tokenizer=OPERATORS, cache=tmp_path, say=said.append).text == "proved"
    assert said == []
    found = open_validation(spec, with_case.tokenizer, say=silent)
    assert found.sha256 == open_validation(spec, plain.tokenizer, say=silent).sha256
    shards = f"shards:{with_case.folder}"
    assert open_validation(shards, with_case.tokenizer, say=silent).sha256 == found.sha256
    assert open_dataset(shards, vocab_size=320, tokenizer=OPERATORS, say=silent).val_bytes == plain.val_bytes
    with pytest.raises(
        DataError, match=r"has tokenizer.case_operators=true, .* add --set tokenizer\.case_operators=true"
    ):
        open_dataset(shards, vocab_size=320, say=silent)
    with pytest.raises(DataError, match=r"asks for true; add --set tokenizer\.case_operators=false"):
        open_dataset(f"shards:{plain.folder}", vocab_size=320, tokenizer=OPERATORS, say=silent)


def test_a_folder_is_prepared_again_where_the_other_kind_is_asked_for(folder: Path, tmp_path: Path) -> None:
    def prepare(operators: bool) -> list[str]:
        said: list[str] = []
        out = tmp_path / "out"
        prepare_text(
            [str(folder)], out, vocab_size=320, tokenizer=TokenizerConfig(case_operators=operators), say=said.append
        )
        return said

    assert prepare(True)
    assert not prepare(True)
    assert prepare(False)
    assert not prepare(False)
    assert prepare(True)


def test_preparing_in_another_process_gives_the_same(folder: Path, tmp_path: Path) -> None:
    spec, there, here = f"text:{folder}", tmp_path / "there", tmp_path / "here"
    apart = open_dataset(spec, vocab_size=320, tokenizer=OPERATORS, cache=there, say=silent, apart=True)
    alone = open_dataset(spec, vocab_size=320, tokenizer=OPERATORS, cache=here, say=silent)
    assert apart.tokenizer.case_operators
    assert apart.fingerprint == alone.fingerprint
