"""What general-purpose compressors make of the same text: the yardstick beside a model's bits per byte."""

import lzma
import zlib


def compressor_bpb(text: bytes) -> dict[str, float]:
    """Bits per byte of zlib -9, xz -9 and zstd -19 over the whole text at once. zstd is left out where it is missing."""
    sizes = {"zlib -9": len(zlib.compress(text, 9)), "xz -9": len(lzma.compress(text, preset=9))}
    try:
        import zstandard
    except ImportError:
        pass
    else:
        sizes["zstd -19"] = len(zstandard.ZstdCompressor(level=19).compress(text))
    return {name: 8 * size / max(1, len(text)) for name, size in sizes.items()}
