"""The yardsticks are the compressors themselves."""

import lzma
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from parbank.eval import compression
from parbank.eval.compression import compressor_bpb

TEXT = "".join(f"line {i}: {i * i}\n" for i in range(2000)).encode()


def test_bits_per_byte_of_each_compressor() -> None:
    found = compressor_bpb(TEXT)
    assert list(found) == ["zlib -9", "xz -9", "zstd -19"]
    assert found["zlib -9"] == 8 * len(zlib.compress(TEXT, 9)) / len(TEXT)
    assert found["xz -9"] == 8 * len(lzma.compress(TEXT, preset=9)) / len(TEXT)
    assert 0.5 < found["zstd -19"] < 8


@pytest.mark.parametrize("ending", ["sys.exit(3)", "raise KeyboardInterrupt"])
def test_a_process_does_not_wait_for_compressors_at_its_end(ending: str) -> None:
    """xz takes a minute for 64 MB, in which nobody could end `parbank eval` by Ctrl-C."""
    code = f"""
import sys, time
from parbank.eval import compression
from parbank.threads import run_in_background
def compress(data):
    print("begun", flush=True)
    time.sleep(600)
compression._find_compressors = lambda: ({{"slow": compress}}, [])
run_in_background(lambda: compression.compressor_bpb(b"text"), "aside")
time.sleep(1)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "begun\n"
    assert done.returncode in (3, -2, 130)


def test_zstd_is_left_out_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert list(compressor_bpb(TEXT)) == ["zlib -9", "xz -9"]


def test_no_text_is_no_crash() -> None:
    assert set(compressor_bpb(b"")) == {"zlib -9", "xz -9", "zstd -19"}


def test_a_result_is_kept_for_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARBANK_CACHE", str(tmp_path))
    monkeypatch.setattr(compression, "LEAST_KEPT", 100)
    calls: list[int] = []
    real = compression._compress
    monkeypatch.setattr(compression, "_compress", lambda text, *more: calls.append(len(text)) or real(text, *more))
    found = compressor_bpb(TEXT)
    assert [compressor_bpb(TEXT), compressor_bpb(TEXT[:50]), compressor_bpb(TEXT[:-1])][0] == found
    assert calls == [len(TEXT), 50, len(TEXT) - 1], "one short text, which is not kept, and one other"
    assert len(list((tmp_path / "compressors").iterdir())) == 2
    for path in (tmp_path / "compressors").iterdir():
        path.write_text('{"zlib -9": 1}')
    assert compressor_bpb(TEXT) == found, "a damaged file is measured anew"


def test_one_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: bytes, preset: int) -> bytes:
        raise MemoryError("no room")

    monkeypatch.setenv("PARBANK_CACHE", str(tmp_path))
    monkeypatch.setattr(compression, "LEAST_KEPT", 100)
    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(lzma, "compress", fail)
        assert list(compressor_bpb(TEXT, said.append)) == ["zlib -9", "zstd -19"]
    assert said == ["note: xz -9 could not compress the text for comparison (MemoryError: no room)"]
    assert list(compressor_bpb(TEXT)) == ["zlib -9", "xz -9", "zstd -19"], "a part of the result is not kept"
