"""Bits per byte of general-purpose compressors on the same text, for comparison with a model."""

import hashlib
import json
import lzma
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from parbank.config import parse_json
from parbank.data.progress import Say, say_on_stderr
from parbank.errors import FileError
from parbank.files import default_cache, write_json
from parbank.threads import run_in_background

LEAST_KEPT = 1 << 20
"""Bytes of a text from which the result is kept: a shorter one takes a moment, xz takes a second for two megabytes."""

Compress = Callable[[bytes], bytes]


def compressor_bpb(text: bytes, say: Say = say_on_stderr) -> dict[str, float]:
    """Bits per byte of zlib -9, xz -9 and zstd -19 over the whole text at once. zstd is left out where it is missing, and a
    compressor that fails, with a note. Kept in the cache for this text and these versions."""
    compressors, versions = _find_compressors()
    key = hashlib.sha256(json.dumps([hashlib.sha256(text).hexdigest(), *versions]).encode()).hexdigest()[:24]
    path = default_cache() / "compressors" / f"{key}.json" if len(text) >= LEAST_KEPT else None
    found = None if path is None else _read(path, set(compressors))
    if found is None:
        found = _compress(text, compressors, say)
        if path is not None and found.keys() == compressors.keys():
            with suppress(OSError, FileError):  # a cache that cannot be written costs seconds the next time
                write_json(path, found)
    return found


def _find_compressors() -> tuple[dict[str, Compress], list[str]]:
    """The compressors, and everything that their sizes depend on."""
    compressors: dict[str, Compress] = {
        "zlib -9": lambda data: zlib.compress(data, 9),
        "xz -9": lambda data: lzma.compress(data, preset=9),
    }
    versions = [sys.version, zlib.ZLIB_RUNTIME_VERSION]
    with suppress(ImportError):
        import zstandard

        compressors["zstd -19"] = lambda data: zstandard.ZstdCompressor(level=19).compress(data)
        versions.append(str(zstandard.ZSTD_VERSION))
    return compressors, versions


def _compress(text: bytes, compressors: dict[str, Compress], say: Say) -> dict[str, float]:
    def measure(name: str) -> float | None:
        try:
            return 8 * len(compressors[name](text)) / max(1, len(text))
        except Exception as error:  # a side matter; most often too little memory: xz -9 takes 700 MB
            say(f"note: {name} could not compress the text for comparison ({type(error).__name__}: {error})")
            return None

    # They release Python's lock, so in parallel they take as long as the slowest.
    results = {name: run_in_background(partial(measure, name), f"parbank-{name}") for name in compressors}
    return {name: bpb for name, result in results.items() if (bpb := result.result()) is not None}


def _read(path: Path, names: set[str]) -> dict[str, float] | None:
    """An earlier result; None if there is none, or if it makes no sense."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        return {name: float(found[name]) for name in found} if found.keys() == names else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None
