"""The size and the hardness of a text, from the sizes of its files and a sample."""

import gzip
import lzma
import random
from dataclasses import replace
from pathlib import Path

import pytest

from parbank.errors import DataError
from parbank.plan.candidates import Request
from parbank.plan.choose import make_plan
from parbank.plan.laws import load_laws
from parbank.plan.machine import Machine
from parbank.plan.texts import KNOWN, PlanText, measure_hardness, read_text, read_xz_size
from tests.plan.machines import CPU, H200


def write_words(folder: Path, count: int) -> int:
    """Text files of random words; their size in bytes."""
    words = [f"word{number}" for number in range(300)]
    rng = random.Random(0)
    total = 0
    for number in range(count):
        text = " ".join(rng.choices(words, k=2000)).encode()
        (folder / f"{number}.txt").write_bytes(text)
        total += len(text)
    return total


def test_the_size_is_that_of_the_files_less_validation(tmp_path: Path) -> None:
    total = write_words(tmp_path, 40)
    text = read_text(f"text:{tmp_path}")
    assert text.bytes == pytest.approx(0.98 * total)
    assert 1 < text.hardness < 4, "one of 300 words of 8 bytes: about a bit a byte, and what zlib adds"
    assert text.vocab is None


@pytest.mark.parametrize(("suffix", "pack"), [(".xz", lzma.compress), (".gz", gzip.compress)])
def test_packed_files_count_about_as_much_as_unpacked(tmp_path: Path, suffix: str, pack: object) -> None:
    total = write_words(tmp_path, 10)
    whole = b"\n".join(path.read_bytes() for path in sorted(tmp_path.glob("*.txt")))
    folder = tmp_path / "packed"
    folder.mkdir()
    (folder / f"a.txt{suffix}").write_bytes(pack(whole))  # type: ignore[operator]
    assert read_text(f"text:{folder}").bytes == pytest.approx(0.98 * total, rel=0.35)


def test_an_xz_file_says_how_long_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.xz"
    for data in (b"", b"a" * 1_000_000, random.Random(0).randbytes(70_001)):
        path.write_bytes(lzma.compress(data))
        assert read_xz_size(path) == len(data)
    whole = lzma.compress(b"one") + lzma.compress(b"two")
    for wrong in (whole, lzma.compress(b"one")[:-3], b"short", b"", bytes(100) + b"YZ"):
        path.write_bytes(wrong)
        assert read_xz_size(path) is None, "two streams, or no xz file"


def test_hard_text_needs_more_bits() -> None:
    assert measure_hardness([bytes(100_000)]) < 0.1
    assert measure_hardness([random.Random(0).randbytes(100_000)]) > 7.9
    with pytest.raises(DataError, match="empty"):
        measure_hardness([b""])


def test_a_text_behind_the_laws_is_known_by_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its factor is that of the fit, and the interval is narrow; on the kind of machine that it was fitted on. One more character
    makes it a new text."""
    path = tmp_path / "text.txt"
    path.write_text("the same text again\n" * 3_000)
    text, laws = read_text(f"text:{path}"), load_laws()
    assert set(KNOWN.values()) <= set(laws.texts)

    def expect(text: PlanText, machine: Machine) -> tuple[float, float]:
        best = make_plan(
            Request(minutes=2, max_bytes=2_000_000, text=replace(text, bytes=1e8, hardness=3.2)), machine, laws
        ).best
        return best.score - best.packing, best.deviation

    before = {machine.name: expect(text, machine) for machine in (CPU, H200)}
    monkeypatch.setitem(KNOWN, text.digest, "corpus")
    assert expect(text, CPU) == before[CPU.name]
    (score, deviation), (new, uncertain) = expect(text, H200), before[H200.name]
    assert score / new == pytest.approx(laws.texts["corpus"], rel=0.02)
    assert deviation < uncertain / 4
    path.write_text("the same text again\n" * 3_000 + "!")
    assert expect(read_text(f"text:{path}"), H200) == pytest.approx(before[H200.name], rel=0.02)
