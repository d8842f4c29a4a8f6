"""Preparing needs memory for a batch, for the longest document and for a list of documents, not for the text."""

import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parbank.data.overlap import measure_overlap
from parbank.data.prepare import prepare_text

SIZE = 10_000  # bytes of a document
FEW, MANY = 60, 360
TEXT = (MANY - FEW) * SIZE
ALLOWED = 250_000  # 500 bytes for each document's hash, place and size, and buffers that differ from run to run
# Two batches are encoded at a time, or one, as the machine is busy: 36 bytes for each of a batch's tokens. All tokens and their
# text would take 7 MB.
ALLOWED_TOKENS = 1_000_000
WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "runs",
    "home",
    "to",
    "its",
    "friends",
)


def _make_documents(count: int) -> Iterator[str]:
    rng = np.random.default_rng(0)
    for number in range(count):
        yield f"{number} {' '.join(rng.choice(WORDS, SIZE // 3))}"[:SIZE]


def _trace(run: Callable[[], Any]) -> int:
    """The most memory that Python and NumPy held since the call began, or since `tracemalloc.reset_peak`."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _find_peaks(folder: Path, count: int) -> dict[str, int]:
    """The most memory of the two parts that touch the whole text one after another."""
    source = folder / f"{count}.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in _make_documents(count)))
    found: dict[str, int] = {}

    def end_part(line: str) -> None:
        found[line.partition(":")[0]] = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()

    _trace(
        lambda: prepare_text([str(source)], folder / f"out-{len(list(folder.iterdir()))}", say=end_part, vocab_size=300)
    )
    return {part: found[part] for part in ("reading", "tokenising")}


def test_reading_and_tokenising_hold_batches_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parbank.data.prepare._BATCH_BYTES", 5 * SIZE)
    monkeypatch.setattr("parbank.data.encode._BATCH_BYTES", 5 * SIZE)
    monkeypatch.setattr("parbank.data.encode._LONG", 5 * SIZE)
    monkeypatch.setattr("parbank.data.prepare.SAMPLE_BYTES", 10 * SIZE)
    monkeypatch.setattr("parbank.data.journal.LEAST_BYTES", 0)
    _find_peaks(tmp_path, FEW)  # imports and caches
    before, after = _find_peaks(tmp_path, FEW), _find_peaks(tmp_path, MANY)
    for part, allowed in (("reading", ALLOWED), ("tokenising", ALLOWED_TOKENS)):
        assert after[part] - before[part] < allowed, f"{part} took this much more for {TEXT:,} more bytes of text"


def test_the_overlap_holds_a_sample_of_the_validation_text_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parbank.data.overlap.SAMPLE_BYTES", 2 * SIZE)
    monkeypatch.setattr("parbank.data.overlap._STRETCH", SIZE)

    def make(count: int) -> Iterator[bytes]:
        rng = np.random.default_rng(0)
        return (rng.integers(97, 123, SIZE, dtype=np.uint8).tobytes() for _ in range(count))

    def compare(train: int, val: int) -> int:
        return _trace(lambda: measure_overlap(([text] for text in make(train)), make(val), val * SIZE))

    compare(FEW, 2)
    least = compare(FEW, 2)
    assert compare(MANY, 2) - least < ALLOWED, "of training text"
    assert compare(FEW, MANY) - least < ALLOWED, "of validation text"
