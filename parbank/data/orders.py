"""Orders of training windows, chosen by `batch.order`: which tokens a window holds, and in which order an epoch visits them.

A new order is a function like those below, and a line in ORDERS.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from parbank.data.difficulty import rank_parts
from parbank.data.windows import CircleWindows, PackedWindows, Tokens, Windows

Permute = Callable[[int, int, int], np.ndarray]
"""(number of windows, seed, epoch) -> a permutation of the numbers 0 to windows - 1. The same arguments must always give the
same permutation: a resumed run asks again."""


class Visits(NamedTuple):
    """The windows of a text, and the permutation in which an epoch visits them."""

    windows: Windows
    permute: Permute


Order = Callable[[Tokens, int, int], Visits]
"""(tokens, inputs of a window, BOS, which opens every document) -> the windows and their permutation."""


def shuffled(tokens: Tokens, length: int, bos_id: int) -> Visits:
    """Windows wherever they end, shuffled."""
    return Visits(CircleWindows(tokens, length), shuffle)


def contiguous(tokens: Tokens, length: int, bos_id: int) -> Visits:
    """In the order of the text. Neighbouring windows often come from one document, so this trains worse."""
    return Visits(CircleWindows(tokens, length), lambda windows, seed, epoch: np.arange(windows))


def packed(tokens: Tokens, length: int, bos_id: int) -> Visits:
    """Windows of whole documents, shuffled."""
    return Visits(PackedWindows(tokens, length, bos_id), shuffle)


def hard_first(tokens: Tokens, length: int, bos_id: int) -> Visits:
    """Part by part of the text, the hardest first (parbank.data.difficulty); shuffled inside a part."""
    parts = rank_parts(tokens)
    return Visits(
        CircleWindows(tokens, length), lambda windows, seed, epoch: shuffle_parts(windows, seed, epoch, parts)
    )


ORDERS: dict[str, Order] = {
    "shuffled": shuffled,
    "contiguous": contiguous,
    "packed": packed,
    "hard_first": hard_first,
}


def shuffle(windows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation drawn from (seed, epoch).

    numpy guarantees that a bit generator's raw output never changes, but not that of `Generator.permutation`. Sorting
    raw words keeps a run resumable under another numpy. The epoch is the spawn key: as a second word of entropy,
    (seed 1, epoch 5) and (seed 1 + 5 * 2**32, epoch 0) would be the same.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    return np.argsort(bits.random_raw(windows), kind="stable")


def shuffle_parts(windows: int, seed: int, epoch: int, parts: np.ndarray) -> np.ndarray:
    """Shuffled inside each of the equal parts of the text, which come in the order of `parts`."""
    mixed = shuffle(windows, seed, epoch)
    turn = np.argsort(parts, kind="stable")  # when each part's turn comes
    return mixed[np.argsort(turn[mixed * len(parts) // windows], kind="stable")]
