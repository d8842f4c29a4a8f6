"""holdout=dev: choices are made on a part of the training documents, and the validation text is left alone."""

import hashlib
import json
from pathlib import Path

import pytest

from parbank.data.dataset import open_dataset
from parbank.data.sources import absolute_spec, add_options, parse_spec
from parbank.data.validation import open_validation
from parbank.errors import ConfigError
from tests.data.test_text_overlap import noise


def quiet(line: str) -> None:
    pass


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def row(number: int) -> dict[str, object]:
    return {"id": f"book-{number}", "text": f"<{number}> " + noise(number, 80).decode()}


def test_dev_is_one_in_64_of_the_training_documents_by_the_hash_of_their_id(tmp_path: Path) -> None:
    rows, held = [row(n) for n in range(400)], [row(n) for n in range(400, 420)]
    write_rows(tmp_path / "train.jsonl", rows + held[:3])  # three validation documents are in training too
    write_rows(tmp_path / "val.jsonl", held)
    spec = f"text:train={tmp_path / 'train.jsonl'},val={tmp_path / 'val.jsonl'},holdout=dev"
    data = open_dataset(spec, vocab_size=300, cache=tmp_path, say=quiet)
    digests = {r["id"]: int(hashlib.sha256(str(r["id"]).encode()).hexdigest(), 16) for r in rows}
    dev = {str(r["text"]) for r in rows if digests[r["id"]] % 64 == 0}
    assert 1 < len(dev) < 20
    assert texts_of(data.val_text()) == dev
    train = b"".join(data._decoded(data.train))
    assert texts_of(train) == {str(r["text"]) for r in rows} - dev
    validation = open_validation(spec, data.tokenizer, cache=tmp_path, say=quiet)
    assert validation.sha256 == data.val_text_sha256
    usual = open_dataset(spec.removesuffix(",holdout=dev"), vocab_size=300, cache=tmp_path, say=quiet)
    assert texts_of(usual.val_text()) == {str(r["text"]) for r in held}


def texts_of(text: bytes) -> set[str]:
    return {f"<{part}" for part in text.decode().split("<")[1:]}


def test_documents_without_an_id_go_by_their_text_and_there_is_always_one(tmp_path: Path) -> None:
    folder = tmp_path / "few"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(str(row(number)["text"]) * 9, encoding="utf-8")
    usual = open_dataset(f"text:{folder}", vocab_size=300, cache=tmp_path, say=quiet)
    data = open_dataset(f"text:{folder},holdout=dev", vocab_size=300, cache=tmp_path, say=quiet)
    assert data.val_text() not in usual.val_text()
    assert data.val_text() in b"".join(usual._decoded(usual.train))
    assert usual.val_text() not in b"".join(data._decoded(data.train))


def test_the_spec_keeps_it_and_refuses_another_part(tmp_path: Path) -> None:
    spec = add_options(f"text:{tmp_path}", ["holdout=dev"])
    assert absolute_spec(spec).endswith("glob=*,holdout=dev")
    assert "holdout" not in absolute_spec(f"text:{tmp_path}")
    with pytest.raises(ConfigError, match="holdout is dev, got 'test'"):
        parse_spec(f"text:{tmp_path},holdout=test")
