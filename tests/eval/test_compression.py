"""The yardsticks are the compressors themselves."""

import lzma
import sys
import zlib

import pytest

from parbank.eval.compression import compressor_bpb

TEXT = "".join(f"line {i}: {i * i}\n" for i in range(2000)).encode()


def test_bits_per_byte_of_each_compressor() -> None:
    found = compressor_bpb(TEXT)
    assert list(found) == ["zlib -9", "xz -9", "zstd -19"]
    assert found["zlib -9"] == 8 * len(zlib.compress(TEXT, 9)) / len(TEXT)
    assert found["xz -9"] == 8 * len(lzma.compress(TEXT, preset=9)) / len(TEXT)
    assert 0.5 < found["zstd -19"] < 8


def test_zstd_is_left_out_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert list(compressor_bpb(TEXT)) == ["zlib -9", "xz -9"]


def test_no_text_is_no_crash() -> None:
    assert set(compressor_bpb(b"")) == {"zlib -9", "xz -9", "zstd -19"}
