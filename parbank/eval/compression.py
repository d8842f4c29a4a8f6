"""Bits per byte of general-purpose compressors on the same text, for comparison with a model."""

import lzma
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def compressor_bpb(text: bytes) -> dict[str, float]:
    """Bits per byte of zlib -9, xz -9 and zstd -19 over the whole text at once. zstd is left out where it is missing."""
    compressors: dict[str, Callable[[bytes], bytes]] = {
        "zlib -9": lambda data: zlib.compress(data, 9),
        "xz -9": lambda data: lzma.compress(data, preset=9),
    }
    try:
        import zstandard
    except ImportError:
        pass
    else:
        compressors["zstd -19"] = zstandard.ZstdCompressor(level=19).compress
    # They release Python's lock, so in parallel they take as long as the slowest.
    with ThreadPoolExecutor() as pool:
        sizes = pool.map(lambda compress: len(compress(text)), compressors.values())
        return {name: 8 * size / max(1, len(text)) for name, size in zip(compressors, sizes)}
