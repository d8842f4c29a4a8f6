"""Every kind of spec opens; what is said about a dataset comes from its tokens; what does not fit is refused."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from parbank.data.dataset import Dataset, describe, open_dataset, open_shards
from parbank.data.shards import read_shard, write_shard
from parbank.data.tokenizer import Tokenizer
from parbank.errors import ConfigError, DataError

SENTENCE = "each of these documents says something about nothing in particular and then it stops"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    rng = np.random.default_rng(0)
    words = SENTENCE.split()
    for index in range(30):
        (folder / f"{index}.txt").write_text(" ".join(rng.choice(words, 80)) + f"\n{index}\n")
    return folder


@pytest.fixture(scope="module")
def data(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return open_dataset(f"text:{source}", vocab_size=320, cache=tmp_path_factory.mktemp("cache"), say=lambda line: None)


@pytest.fixture
def copy(data: Dataset, tmp_path: Path) -> Path:
    return Path(shutil.copytree(data.folder, tmp_path / "copy"))


def test_text_is_prepared_into_the_cache_once(source: Path, data: Dataset) -> None:
    said: list[str] = []
    again = open_dataset(f"text:{source}", vocab_size=320, cache=data.folder.parent, say=said.append)
    assert said == []
    assert again.fingerprint == data.fingerprint
    assert again.name == f"text:{source}"
    other = open_dataset(f"text:{source}", vocab_size=330, cache=data.folder.parent, say=said.append)
    assert other.folder != data.folder
    assert other.fingerprint != data.fingerprint
    assert other.val_text_sha256 == data.val_text_sha256  # the same text, however it is tokenised


def test_skipped_files_are_said_at_every_use(source: Path, tmp_path: Path) -> None:
    text = Path(shutil.copytree(source, tmp_path / "text"))
    (text / "latin.txt").write_bytes(b"caf\xe9")
    for ending in (f"; the first: {text}/latin.txt", ", when the text was prepared"):
        said: list[str] = []
        found = open_dataset(f"text:{text},skip-bad=yes", vocab_size=320, cache=tmp_path / "cache", say=said.append)
        assert [line for line in said if line.startswith(f"skipped bad files and lines: 1{ending}")], said
        assert found.skipped_bad == 1
    assert open_shards(found.folder).skipped_bad == 1


def test_counts_and_hashes_describe_the_text(source: Path, data: Dataset) -> None:
    assert data.train_bytes + data.val_bytes == sum(path.stat().st_size for path in source.iterdir())
    assert len(data.val_text()) == data.val_bytes
    assert hashlib.sha256(data.val_text()).hexdigest() == data.val_text_sha256


def test_blocks_do_not_change_what_is_counted(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (data.val_text(), data.train_bytes)
    monkeypatch.setattr("parbank.data.dataset._BLOCK", 7)
    again = open_shards(data.folder)
    assert (again.val_text(), again.train_bytes) == whole


def test_prepared_folder_is_a_shards_folder(data: Dataset) -> None:
    opened = open_dataset(f"shards:{data.folder}", vocab_size=320)
    assert opened.fingerprint == data.fingerprint
    assert opened.val_text() == data.val_text()


def test_fingerprint_sees_every_token(data: Dataset, copy: Path) -> None:
    tokens = np.array(read_shard(copy / "text_train_000000.bin", vocab_size=320))
    tokens[len(tokens) // 2] ^= 1
    write_shard(copy / "text_train_000000.bin", tokens)
    for look in (describe, open_shards):
        with pytest.raises(DataError, match=r"text_train_000000\.bin differs from its manifest"):
            look(copy)
    (copy / "manifest.json").unlink()
    assert open_shards(copy).fingerprint != data.fingerprint


def test_describe_counts_everything(data: Dataset, copy: Path) -> None:
    found = describe(copy)
    assert found["vocab_size"] == 320
    assert found["fingerprint"] == data.fingerprint
    assert found["train"]["documents"] + found["val"]["documents"] == 30
    assert found["train"]["tokens"] == len(data.train)
    assert found["val"]["bytes"] == data.val_bytes
    (copy / "manifest.json").unlink()  # foreign folders have none
    assert {**describe(copy), "spec": found["spec"], "overlap": found["overlap"]} == found
    assert describe(copy)["spec"] is None


def test_too_short_for_one_sequence_names_the_data(data: Dataset) -> None:
    shortest = min(len(data.train), len(data.val))
    data.require_length(shortest - 1)
    with pytest.raises(
        DataError, match=rf"text:.*too short: its validation part has {shortest} tokens.*{shortest - 1} or less"
    ):
        data.require_length(shortest)


def test_vocabulary_must_be_that_of_the_tokenizer(data: Dataset) -> None:
    with pytest.raises(
        DataError, match=r"has 320 tokens, but the model was asked to have 1024; add --set model\.vocab_size=320"
    ):
        open_dataset(f"shards:{data.folder}", vocab_size=1024)


def test_incomplete_folders_are_refused(copy: Path, tmp_path: Path) -> None:
    model = copy / "tokenizer.model"
    shutil.copy(model, copy / "second.model")
    with pytest.raises(DataError, match=r"exactly one SentencePiece \.model.*second\.model, tokenizer\.model"):
        open_shards(copy)
    model.unlink()
    (copy / "second.model").rename(tmp_path / "away.model")
    with pytest.raises(DataError, match="found none"):
        open_shards(copy)
    shutil.copy(tmp_path / "away.model", model)
    (copy / "text_val_000000.bin").unlink()
    with pytest.raises(DataError, match=r"holds no \*_val_\*\.bin"):
        open_shards(copy)
    with pytest.raises(DataError, match="is not a folder"):
        open_dataset(f"shards:{tmp_path / 'none'}", vocab_size=320)
    with pytest.raises(ConfigError, match="write shards:DIR"):
        open_dataset("shards:", vocab_size=320)
    with pytest.raises(ConfigError, match="unknown data 'nonsense'"):
        open_dataset("nonsense", vocab_size=320)


def test_several_shards_are_one_stream(data: Dataset, copy: Path) -> None:
    tokens = np.array(read_shard(copy / "text_train_000000.bin", vocab_size=320))
    half = len(tokens) // 2
    (copy / "manifest.json").unlink()
    write_shard(copy / "text_train_000000.bin", tokens[:half])
    write_shard(copy / "text_train_000001.bin", tokens[half:])
    split = open_shards(copy)
    assert split.train.read(0, len(tokens)).tolist() == tokens.tolist()
    assert split.train_bytes == data.train_bytes


def test_shards_of_another_tokenizer_are_refused_by_name(copy: Path) -> None:
    small = Tokenizer.train([" ".join(f"{i} {i * i} item" for i in range(3000))], 300)
    (copy / "tokenizer.model").write_bytes(small.model_bytes)
    with pytest.raises(DataError, match=r"text_train_000000\.bin holds token \d+, but the tokenizer has 300"):
        open_shards(copy)


def test_prepared_text_is_found_where_it_was_before_there_were_options(tmp_path: Path) -> None:
    """The name of its folder is a hash of the spec as it was spelled then; each option makes another name."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(
            f"Document {i} is about the number {i}, its square {i * i} and its cube {i**3}.\n" * 9
        )
    (text / "one.jsonl").write_text('{"text": "a line", "body": "another line"}\n')
    folders = []
    for option in ("", ",glob=*", ",glob=*.txt", ",field=body", ",skip-bad=yes"):
        found = open_dataset(f"text:{text}{option}", vocab_size=300, cache=tmp_path / "cache", say=lambda line: None)
        folders.append(found.folder.name)
    key = hashlib.sha256(f"text:train={text}\n300".encode()).hexdigest()[:12]
    assert folders[0] == folders[1] == f"text-300-{key}"
    assert len(set(folders)) == 4
