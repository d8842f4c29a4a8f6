"""The share of validation bytes in long runs that training has too, against a definition that looks at every byte."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbank.data import overlap
from parbank.data.overlap import RUN, measure_overlap


def share(train: list[bytes], val: list[bytes], **options: int) -> float:
    return measure_overlap([train], val, sum(map(len, val)), **options).share


def define(train: list[bytes], val: list[bytes]) -> float:
    """Byte by byte: is it in any window of RUN bytes that some training document holds?"""
    covered = 0
    for document in val:
        marks = [False] * len(document)
        for start in range(len(document) - RUN + 1):
            if any(document[start : start + RUN] in other for other in train):
                marks[start : start + RUN] = [True] * RUN
        covered += sum(marks)
    return covered / max(1, sum(map(len, val)))


def noise(seed: int, size: int) -> bytes:
    return bytes(random.Random(seed).choices(b"abcdefghij \n", k=size))


def test_no_run_is_shared_by_texts_that_have_nothing_in_common() -> None:
    assert share([noise(1, 5000)], [noise(2, 3000)]) == 0
    assert share([b"short"], [b"short"]) == 0, "a run has 64 bytes"
    assert share([], [noise(1, 100)]) == 0


def test_runs_count_with_every_byte_of_theirs() -> None:
    new, old = noise(3, 1000), noise(4, 4000)
    for size in (RUN - 1, RUN, RUN + 1, 700):
        val = new[:500] + b"#" + old[1000 : 1000 + size] + b"%" + new[500:]
        expected = size / len(val) if size >= RUN else 0
        assert share([old], [val]) == pytest.approx(expected, abs=1e-12)
    assert share([old[:100], old], [old]) == 1


def test_no_run_goes_across_documents() -> None:
    text = noise(5, 80)
    assert share([text], [text[:40], text[40:]]) == 0
    assert share([text[:40], text[40:]], [text]) == 0
    halves = [text[:40], text[40:]]
    assert share(halves, halves) == 0


@settings(max_examples=60, deadline=None)
@given(
    data=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200), st.integers(1, 200)), min_size=2, max_size=8),
    cut=st.integers(1, 7),
    block=st.sampled_from([1, 7, 64, 1 << 17]),
)
def test_it_is_what_its_definition_says(data: list[tuple[int, int, int]], cut: int, block: int) -> None:
    documents = [noise(seed, 400)[start : start + size] + noise(seed + 9, 9) for seed, start, size in data]
    train, val = documents[:cut], documents[cut:]
    if val:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(overlap, "_BLOCK", block)
            assert share(train, val, threads=2) == pytest.approx(define(train, val), abs=1e-12)


def test_a_long_validation_text_is_sampled_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "SAMPLE_BYTES", 20_000)
    monkeypatch.setattr(overlap, "_STRETCH", 1000)
    val = [noise(seed, 2500) for seed in range(40)]
    found = measure_overlap([val[:20]], val, 100_000)
    assert found.compared_bytes == pytest.approx(20_000, rel=0.2)
    assert found.share == pytest.approx(0.5, abs=0.15)
    assert found.to_dict() == {"share": found.share, "run_bytes": 64, "compared_bytes": found.compared_bytes}


def test_batches_are_all_looked_at() -> None:
    parts = [noise(seed, 300) for seed in range(6)]
    seen: list[int] = []
    found = measure_overlap([[part] for part in parts[:3]], parts, 1800, advance=seen.append)
    assert found.share == 0.5
    assert sum(seen) == 900
