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

    numpy promises that a bit generator's raw output never changes, but not that `Generator.permutation` doesn't.
    Sorting raw words keeps a run resumable under another numpy. The epoch goes in as the spawn key: as a second word of
    entropy, (seed 1, epoch 5) and (seed 1 + 5 * 2**32, epoch 0) would be one and the same.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    return np.argsort(bits.random_raw(windows), kind="stable")


def contiguous(windows: int, seed: int, epoch: int) -> np.ndarray:
    """As the windows lie in the text. Neighbours are often of one document, so that this trains worse."""
    return np.arange(windows)


ORDERS: dict[str, Order] = {
    "shuffled": shuffled,
    "contiguous": contiguous,
}
