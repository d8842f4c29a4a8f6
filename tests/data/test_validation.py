"""The text a model is scored on: the same documents whatever tokenizer, cache or layout they come through."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from parbank.data import validation
from parbank.data.dataset import Dataset, open_dataset
from parbank.data.prepare import prepare_text
from parbank.data.shards import write_shard
from parbank.data.tokenizer import Tokenizer
from parbank.data.validation import open_validation
from parbank.errors import DataError, ParbankError


def silent(line: str) -> None: ...


@pytest.fixture(scope="module")
def dataset(text_spec: str) -> Dataset:
    return open_dataset(text_spec, vocab_size=320, say=silent)


@pytest.fixture(scope="module")
def other(text_spec: str) -> Tokenizer:
    return open_dataset(text_spec, vocab_size=400, say=silent).tokenizer


def tokens_of(spec: str, tokenizer: Tokenizer) -> np.ndarray:
    stream = open_validation(spec, tokenizer, say=silent).tokens
    return stream.read(0, len(stream))


def test_text_gives_the_tokens_that_training_validated_with(dataset: Dataset, text_spec: str) -> None:
    found = open_validation(text_spec, dataset.tokenizer, say=silent)
    assert np.array_equal(found.tokens.read(0, len(found.tokens)), dataset.val.read(0, len(dataset.val)))
    assert found.sha256 == dataset.val_text_sha256 == hashlib.sha256(dataset.val_text()).hexdigest()


def test_documents_are_the_same_in_groups_of_any_size(
    dataset: Dataset, text_spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = open_validation(text_spec, dataset.tokenizer)
    monkeypatch.setattr(validation, "_TOGETHER", 1)
    each = open_validation(text_spec, dataset.tokenizer)
    assert each.describe() == whole.describe()
    assert np.array_equal(each.tokens.read(0, len(each.tokens)), whole.tokens.read(0, len(whole.tokens)))


def test_documents_held_out_by_their_hash_are_the_same_ones(text_spec: str, dataset: Dataset) -> None:
    spec = f"text:{text_spec.partition('train=')[2].partition(',')[0]}"
    prepared = open_dataset(spec, vocab_size=320, say=silent)
    found = open_validation(spec, prepared.tokenizer, say=silent)
    assert np.array_equal(found.tokens.read(0, len(found.tokens)), prepared.val.read(0, len(prepared.val)))
    assert open_validation(spec, dataset.tokenizer, say=silent).sha256 == prepared.val_text_sha256


def test_another_tokenizer_sees_the_same_text(dataset: Dataset, other: Tokenizer, text_spec: str) -> None:
    found = open_validation(text_spec, other, say=silent)
    tokens = found.tokens.read(0, len(found.tokens))
    assert found.sha256 == dataset.val_text_sha256
    assert found.text == "proved"
    assert other.decode_bytes(tokens) == dataset.val_text()
    assert tokens[0] == other.bos_id
    assert np.count_nonzero(tokens == other.bos_id) == 2  # one a document


def test_tokens_without_text_are_not_proved_and_need_their_own_tokenizer(
    dataset: Dataset, other: Tokenizer, text_spec: str, tmp_path: Path
) -> None:
    prepare_text([text_spec], tmp_path / "shards", vocab_size=320, say=silent)
    spec = f"shards:{tmp_path / 'shards'}"
    own, text = (open_validation(name, dataset.tokenizer, say=silent) for name in (spec, text_spec))
    assert np.array_equal(own.tokens.read(0, len(own.tokens)), dataset.val.read(0, len(dataset.val)))
    assert (own.text, text.text) == ("not proved", "proved")
    assert own.describe() == text.describe() | {"text": "not proved"}
    with pytest.raises(DataError, match=r"tokens of another tokenizer .*--data text:val=PATH"):
        open_validation(spec, other, say=silent)


def test_the_same_bytes_cut_into_other_documents_are_told_apart(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, found = "one two three four", {}
    for cuts in ((), (3,), (7,), (3, 7)):
        folder = tmp_path / str(cuts)
        folder.mkdir()
        (folder / "t.model").write_bytes(dataset.tokenizer.model_bytes)
        parts = [text[a:b] for a, b in zip((0, *cuts), (*cuts, None))]
        tokens = [t for part in parts for t in (dataset.tokenizer.bos_id, *dataset.tokenizer.encode(part))]
        for split in ("train", "val"):
            write_shard(folder / f"x_{split}_0.bin", np.array(tokens, dtype=np.uint16))
        own = open_validation(f"shards:{folder}", dataset.tokenizer, say=silent)
        monkeypatch.setattr("parbank.data.validation._BLOCK", 2)
        small = open_validation(f"shards:{folder}", dataset.tokenizer, say=silent)
        monkeypatch.undo()
        assert own.documents == small.documents == len(parts)
        assert own.documents_sha256 == small.documents_sha256
        assert own.sha256 == hashlib.sha256(text.encode()).hexdigest()
        found[cuts] = own.documents_sha256
    assert len(set(found.values())) == 4


def test_a_text_far_too_short_to_train_on_can_be_scored(dataset: Dataset, tmp_path: Path) -> None:
    poem = tmp_path / "a poem, ünicode.txt"
    poem.write_text("roses are rød\r\nviolets are blue\n", encoding="utf-8", newline="")
    whole = tokens_of(f"text:val={tmp_path / 'a poem? *.txt'}", dataset.tokenizer)
    assert dataset.tokenizer.decode_bytes(whole) == poem.read_bytes()
    assert list(whole[:1]) == [dataset.tokenizer.bos_id]
    assert np.count_nonzero(whole == dataset.tokenizer.bos_id) == 1, "one document stays one"
    held_out = tokens_of(f"text:{tmp_path}", dataset.tokenizer)  # the end of a single document
    assert poem.read_bytes().endswith(dataset.tokenizer.decode_bytes(held_out))


def test_val_takes_all_of_several_paths_and_equal_documents_once(dataset: Dataset, tmp_path: Path) -> None:
    for name, text in (("a.txt", "first"), ("b.txt", "second"), ("c.txt", "first")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    spec = f"text:val={tmp_path / 'a.txt'},{tmp_path / 'b.txt'},{tmp_path / 'c.txt'}"
    tokens = tokens_of(spec, dataset.tokenizer)
    text = dataset.tokenizer.decode_bytes(tokens)
    assert text in (b"firstsecond", b"secondfirst")


def test_a_character_too_short_to_split(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("é", encoding="utf-8")
    assert dataset.tokenizer.decode(tokens_of(f"text:val={tmp_path}", dataset.tokenizer)) == "é"
    assert dataset.tokenizer.decode(tokens_of(f"text:{tmp_path}", dataset.tokenizer)) == "é"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nonsense", "unknown data 'nonsense'"),
        ("", "unknown data ''"),
        ("shards:", "write shards:DIR"),
        ("shards:no/such", "no/such is not a folder"),
        ("text:no/such", "no/such does not exist"),
        ("text:val=no/such", "no/such does not exist"),
        ("text:val=", "val= without a value"),
        ("fineweb:x", "write fineweb, or fineweb:N"),
    ],
)
def test_specs_that_cannot_be_opened(dataset: Dataset, spec: str, message: str) -> None:
    with pytest.raises(ParbankError, match=message):
        open_validation(spec, dataset.tokenizer, say=silent)


def test_files_that_cannot_be_read_are_named(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name, message in (("empty", r"empty\.txt is empty"), ("latin", r"latin\.txt, byte 3: not UTF-8")):
        for spec in (f"text:val={tmp_path / name}.txt", f"text:{tmp_path / name}.txt"):
            with pytest.raises(DataError, match=message):
                open_validation(spec, dataset.tokenizer, say=silent)


def test_shards_that_hold_half_a_character_are_scored_as_they_are(dataset: Dataset, tmp_path: Path) -> None:
    """A published shard may end inside a character. Its own tokenizer counts its bytes."""
    (tmp_path / "t.model").write_bytes(dataset.tokenizer.model_bytes)
    bos = dataset.tokenizer.bos_id
    broken = next(t for t in range(320) if dataset.tokenizer.decode_bytes([t]) == b"\xc3")
    for split in ("train", "val"):
        write_shard(tmp_path / f"x_{split}_0.bin", np.array([bos, broken], dtype=np.uint16))
    spec = f"shards:{tmp_path}"
    assert tokens_of(spec, dataset.tokenizer).tolist() == [bos, broken]
    write_shard(tmp_path / "x_val_0.bin", np.array([bos, bos], dtype=np.uint16))
    with pytest.raises(DataError, match="nothing but document boundaries"):
        open_validation(spec, dataset.tokenizer, say=silent)
