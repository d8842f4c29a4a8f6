"""The order in which an epoch visits its windows, chosen by `batch.order`.

A new order is a function like these, and a line in ORDERS.
"""

from collections.abc import Callable

import numpy as np

Order = Callable[[int, int, int], np.ndarray]
"""(number of windows, seed, epoch) -> a permutation of the numbers 0 to windows - 1. The same arguments must always give the
same permutation: a resumed run asks again."""


def shuffled(windows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation drawn from (seed, epoch).

    numpy guarantees that a bit generator's raw output never changes, but not that of `Generator.permutation`. Sorting
    raw words keeps a run resumable under another numpy. The epoch is the spawn key: as a second word of entropy,
    (seed 1, epoch 5) and (seed 1 + 5 * 2**32, epoch 0) would be the same.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    return np.argsort(bits.random_raw(windows), kind="stable")


def contiguous(windows: int, seed: int, epoch: int) -> np.ndarray:
    """In the order of the text. Neighbouring windows often come from one document, so this trains worse."""
    return np.arange(windows)


def packed(windows: int, seed: int, epoch: int) -> np.ndarray:
    """Shuffled windows of whole documents: `parbank.data.windows.PackedWindows`."""
    return shuffled(windows, seed, epoch)


def hard_first(windows: int, seed: int, epoch: int, parts: np.ndarray | None = None) -> np.ndarray:
    """Part by part of the text, in the order of `parts` (parbank.data.difficulty); shuffled inside a part."""
    mixed = shuffled(windows, seed, epoch)
    if parts is None:
        return mixed
    turn = np.argsort(parts, kind="stable")  # when each part's turn comes
    return mixed[np.argsort(turn[mixed * len(parts) // windows], kind="stable")]


ORDERS: dict[str, Order] = {
    "shuffled": shuffled,
    "contiguous": contiguous,
    "packed": packed,
    "hard_first": hard_first,
}
