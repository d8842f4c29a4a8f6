"""What preparing says of the validation text: its share, what training has of it too, and the proof of its tokens."""

import hashlib
import json
from pathlib import Path

import pytest

from parbank.data.dataset import describe, open_dataset
from parbank.data.prepare import MANIFEST, prepare_text
from parbank.data.shards import write_shard
from parbank.errors import DataError
from tests.data.test_text_overlap import noise


def words(seed: int, size: int) -> str:
    return noise(seed, size).decode()


def write_documents(folder: Path, sizes: list[int]) -> list[str]:
    folder.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        (folder / f"{number}.txt").write_text(words(number, size), encoding="utf-8")
    return [str(folder)]


def test_a_validation_far_from_its_share_is_told_with_a_remedy(tmp_path: Path) -> None:
    """Two documents gave validation half of the bytes without a word."""
    said: list[str] = []
    manifest = prepare_text(
        write_documents(tmp_path / "two", [9000, 9000]), tmp_path / "a", vocab_size=300, say=said.append
    )
    assert manifest["val"]["bytes"] == 9000
    (note,) = (line for line in said if line.startswith("note:"))
    assert "validation got 50.0% of the text (9,000 bytes in 1 of 2 documents), where about 2% is meant" in note
    assert "val=PATH" in note
    said.clear()
    many = write_documents(tmp_path / "many", [300] * 400)
    prepare_text(many, tmp_path / "b", vocab_size=300, say=said.append)
    prepare_text([f"train={many[0]}", f"val={tmp_path / 'two'}"], tmp_path / "c", vocab_size=300, say=said.append)
    prepare_text(write_documents(tmp_path / "one", [20_000]), tmp_path / "d", vocab_size=300, say=said.append)
    assert not [line for line in said if line.startswith("note:")]


def test_what_training_has_too_is_measured_shown_and_kept(tmp_path: Path) -> None:
    old, new, said = words(1, 8000), words(2, 1000), list[str]()
    (tmp_path / "train.txt").write_text(old, encoding="utf-8")
    (tmp_path / "val.txt").write_text(f"{new}#{old[2000:2500]}", encoding="utf-8")
    spec = f"text:train={tmp_path / 'train.txt'},val={tmp_path / 'val.txt'}"
    manifest = prepare_text([spec], tmp_path / "out", vocab_size=300, say=said.append)
    share = 500 / 1501
    assert manifest["overlap"] == {"share": pytest.approx(share), "run_bytes": 64, "compared_bytes": 1501}
    assert f"{share:.1%} of the validation bytes are in training too, in runs of 64 or more; a model can" in "\n".join(
        said
    )
    assert describe(tmp_path / "out")["overlap"] == pytest.approx(share)
    assert open_dataset(spec, vocab_size=300, cache=tmp_path, say=said.append).overlap == pytest.approx(share)


def test_validation_tokens_are_those_of_the_text_or_refused(tmp_path: Path) -> None:
    document = write_documents(tmp_path / "text", [9000, 9000])
    opened = open_dataset(f"text:{document[0]}", vocab_size=300, cache=tmp_path, say=lambda line: None)
    manifest = json.loads((opened.folder / MANIFEST).read_text())
    assert opened.text == "proved"
    assert manifest["val"]["text_sha256"] == hashlib.sha256(opened.val_text()).hexdigest()
    shards = open_dataset(f"shards:{opened.folder}", vocab_size=300, say=lambda line: None)
    assert shards.text == "not proved"

    tokens = opened.val.read(0, len(opened.val))
    tokens[5] = tokens[5] + 1 if tokens[5] < 299 else tokens[5] - 1
    shard = manifest["val"]["shards"][0]
    write_shard(opened.folder / shard["name"], tokens)
    shard["sha256"] = hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest()  # else it would be prepared again
    (opened.folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="are not those of the text that was prepared there"):
        open_dataset(f"text:{document[0]}", vocab_size=300, cache=tmp_path, say=lambda line: None)


def test_data_from_before_it_was_proved_is_opened_and_says_so(tmp_path: Path) -> None:
    spec = f"text:{write_documents(tmp_path / 'text', [9000, 9000])[0]}"
    opened = open_dataset(spec, vocab_size=300, cache=tmp_path, say=lambda line: None)
    manifest = json.loads((opened.folder / MANIFEST).read_text())
    del manifest["overlap"], manifest["val"]["text_sha256"], manifest["train"]["text_sha256"]
    (opened.folder / MANIFEST).write_text(json.dumps(manifest))
    said: list[str] = []
    older = open_dataset(spec, vocab_size=300, cache=tmp_path, say=said.append)
    assert said == [], "it is not prepared again"
    assert (older.text, older.overlap) == ("not proved", None)
    assert older.fingerprint == opened.fingerprint
