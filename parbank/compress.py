"""Compresses bytes by lzma, and expands them under a limit, so that a few hostile bytes cannot fill memory."""

import lzma

from parbank.errors import ArtifactError

# Weights are noise to lzma: a dictionary finds nothing, and a large one costs bits for false matches.
# These filters make smaller files than preset 9, in less time (docs/log/packing.md). lc = lp = pb = 0: neighbours do not
# help either.
FILTERS = [
    {
        "id": lzma.FILTER_LZMA2,
        "preset": 9 | lzma.PRESET_EXTREME,
        "dict_size": 1 << 12,
        "lc": 0,
        "lp": 0,
        "pb": 0,
        "mode": lzma.MODE_NORMAL,
        "mf": lzma.MF_BT4,
        "depth": 1,
    }
]
# The limit of expansion: 16 MiB, or 32 times the stream's size.
_FREE_EXPANSION = 1 << 24
_MAX_EXPANSION = 32


def compress(data: bytes) -> bytes | None:
    """The bytes compressed; None where `expand` would refuse the result."""
    packed = lzma.compress(data, format=lzma.FORMAT_RAW, filters=FILTERS)
    return packed if len(data) <= _limit(packed) else None


def expand(packed: bytes, size: int | None, *, most: int | None = None, source: str) -> bytes:
    """Undoes `compress`. Stops as soon as the output exceeds the announced size, `most`, or the limit. `source` names the
    place in errors."""
    limit = min(_limit(packed), most or _limit(packed)) if size is None else size
    if limit > _limit(packed):
        raise ArtifactError.damaged(source, f"it claims to hold {limit:,} bytes in {len(packed):,}")
    decoder = lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=FILTERS)
    try:
        data = decoder.decompress(packed, max_length=limit + 1)
    except lzma.LZMAError:
        raise ArtifactError.damaged(source, "its compressed data is broken") from None
    if not decoder.eof or decoder.unused_data or len(data) > limit or size not in (None, len(data)):
        raise ArtifactError.damaged(source, "its compressed data has the wrong length")
    return data


def _limit(packed: bytes) -> int:
    return max(_FREE_EXPANSION, _MAX_EXPANSION * len(packed))
