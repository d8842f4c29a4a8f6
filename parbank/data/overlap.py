"""How much of a validation text a model could have learnt by heart: bytes in long runs that the training text has too.

Equal documents are dropped when text is prepared. Copies that differ in a line (versions of a page, licence headers,
quotations) stay, and a score on them rewards memory. So the share of the validation bytes that lie in a run of RUN bytes
or more, shared with any training document, is measured and shown beside the score.

Every window of RUN bytes of the validation text is hashed, and every window of the training text is looked up. Memory is
bounded: of a validation text above SAMPLE_BYTES, every k-th stretch is compared.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

RUN = 64  # bytes, a power of two: about a line of prose or code, which two authors seldom write alike by chance
SAMPLE_BYTES = 4 << 20  # of validation text at most: 280 MB (measured) for its hashes and tables
_STRETCH = 1 << 16
_BLOCK = 1 << 17  # training bytes hashed together: 1 MB for their hashes
_SLOTS = 8  # for each hash, in two tables by its high and its low bits: one other hash in some 100 passes both
# Between documents. Neither byte occurs in UTF-8, so no window across two documents is ever found.
_VAL_BORDER, _TRAIN_BORDER = b"\xff", b"\xfe"
_FACTOR = 0x9E3779B97F4A7C15  # odd, and its bits look random: 2^64 over the golden ratio
_BYTES = np.random.default_rng(0).integers(0, 2**64, 256, dtype=np.uint64)


@dataclass(frozen=True)
class Overlap:
    """The overlap as the manifest stores it."""

    share: float
    """The share of the compared validation bytes in a run of at least `run_bytes` that the training text has too."""
    run_bytes: int
    compared_bytes: int
    """Bytes of the validation text that were compared: all, or a sample of a long text."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_overlap(
    train: Iterable[list[bytes]],
    val: Iterable[bytes],
    val_bytes: int,
    *,
    threads: int = 1,
    advance: Callable[[int], None] = lambda size: None,
) -> Overlap:
    """The overlap of validation documents, `val_bytes` in all, with training documents that come in batches."""
    text = np.frombuffer(_VAL_BORDER.join(_sample(val, val_bytes)), dtype=np.uint8)
    compared = len(text) - int(np.count_nonzero(text == _VAL_BORDER[0]))
    hashes = _hash_windows(text)
    index = _Index(hashes)
    with ThreadPoolExecutor(threads) as pool:
        for batch in train:
            joined = np.frombuffer(_TRAIN_BORDER.join(batch), dtype=np.uint8)
            for size in pool.map(index.look_up, _overlapping_blocks(joined)):
                advance(size)
        blocks = [hashes[start : start + _BLOCK] for start in range(0, len(hashes), _BLOCK)]
        matched = [np.empty(0, dtype=bool), *pool.map(index.were_found, blocks)]
    covered = _count_covered(np.concatenate(matched))
    return Overlap(share=covered / max(1, compared), run_bytes=RUN, compared_bytes=compared)


class _Index:
    """The hashes of the validation windows, and which of them were seen in the training text."""

    def __init__(self, hashes: np.ndarray) -> None:
        self.hashes = _sort_distinct(hashes)
        self.found = np.zeros(len(self.hashes), dtype=bool)
        bits = max(8, (_SLOTS * len(self.hashes)).bit_length())
        self._shift, self._mask = np.uint64(64 - bits), np.uint64((1 << bits) - 1)
        self._high, self._low = (np.zeros(1 << bits, dtype=bool) for _ in range(2))
        self._high[self.hashes >> self._shift] = True
        self._low[self.hashes & self._mask] = True

    def look_up(self, block: np.ndarray) -> int:
        """Marks the windows that the block has, and returns its length. Threads only write True, so they need no lock."""
        hashes = _hash_windows(block)
        likely = hashes[self._high[hashes >> self._shift]]
        likely = _sort_distinct(likely[self._low[likely & self._mask]])  # sorted: the search stays in the cache
        if len(likely):
            place = np.minimum(np.searchsorted(self.hashes, likely), len(self.hashes) - 1)
            self.found[place[self.hashes[place] == likely]] = True
        return len(block)

    def were_found(self, hashes: np.ndarray) -> np.ndarray:
        """Whether each of these windows of the validation text was seen."""
        found: np.ndarray = self.found[np.searchsorted(self.hashes, hashes)]
        return found


def _sort_distinct(hashes: np.ndarray) -> np.ndarray:
    """np.unique by sorting. NumPy's own hash table takes ten times as long for millions of hashes."""
    ordered = np.sort(hashes)
    keep = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=keep[1:])
    return ordered[keep]


def _hash_windows(text: np.ndarray) -> np.ndarray:
    """uint64, one for every window of RUN bytes: a polynomial of the bytes modulo 2^64, by doubling the window."""
    if len(text) < RUN:
        return np.empty(0, dtype=np.uint64)
    hashes, width = _BYTES[text], 1
    while width < RUN:
        wider = hashes[:-width] * np.uint64(pow(_FACTOR, width, 1 << 64))
        wider += hashes[width:]
        hashes, width = wider, 2 * width
    return hashes


def _overlapping_blocks(text: np.ndarray) -> Iterator[np.ndarray]:
    """Blocks that together hold every window once."""
    for start in range(0, max(1, len(text) - RUN + 1), _BLOCK):
        yield text[start : start + _BLOCK + RUN - 1]


def _sample(documents: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The documents, or every k-th stretch of them, so that about SAMPLE_BYTES are left."""
    step, number = -(-size // SAMPLE_BYTES), 0
    for document in documents:
        if step == 1:
            yield document
            continue
        for start in range(0, len(document), _STRETCH):
            if number % step == 0:
                yield document[start : start + _STRETCH]
            number += 1


def _count_covered(matched: np.ndarray) -> int:
    """The bytes that lie in any matched window; `matched` has one entry for each window's first byte."""
    change = np.zeros(len(matched) + RUN, dtype=np.int8)
    change[: len(matched)] += matched
    change[RUN:] -= matched
    return int(np.count_nonzero(np.cumsum(change, dtype=np.int16)))
