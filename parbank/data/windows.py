"""The windows of an epoch: which tokens each holds. A window has L + 1 tokens: L inputs, and the last target.

`CircleWindows` cuts the text wherever a window ends. The N tokens form a circle that repeats. Window j covers the virtual
positions j*L .. (j+1)*L, both included (mod N). Windows tile the targets, so every token is a target exactly once in N
consecutive virtual positions, even if L does not divide N: the window at the end of the circle takes the first tokens of
the next round, and that round begins after them. Epoch e owns the windows that start in [e*N, (e+1)*N).

`PackedWindows` keeps documents whole, by best fit, longest first (best fit decreasing: Johnson; for language models: Ding
et al.). A document longer than a window is cut: it fills windows of its own, each beginning with the last token of the
window before, which was only a target there. Its last piece begins a window, because it has no BOS, which is how the model
sees that a document begins. A gap at the end of a window is filled with the beginning of another document. So every target
is text and nothing is padding, but those tokens are seen twice in an epoch.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

_BLOCK = 1 << 22  # tokens searched together


class Tokens(Protocol):
    """The interface that windows need from their tokens; `TokenSet` has it."""

    def __len__(self) -> int: ...

    def read(self, start: int, count: int, out: np.ndarray | None = None) -> np.ndarray: ...


class Windows(Protocol):
    """Windows are numbered from the beginning of the first epoch on, without end."""

    def first_of(self, epoch: int) -> int:
        """The number of an epoch's first window."""

    def epoch_of(self, window: int) -> int:
        """The epoch that owns a window."""

    def read(self, window: int, out: np.ndarray) -> None:
        """Writes a window, (L + 1,)."""


class CircleWindows:
    """Windows wherever they end: see above."""

    def __init__(self, tokens: Tokens, length: int) -> None:
        self._tokens, self._length, self._count = tokens, length, len(tokens)

    def first_of(self, epoch: int) -> int:
        return -(-epoch * self._count // self._length)

    def epoch_of(self, window: int) -> int:
        return window * self._length // self._count

    def read(self, window: int, out: np.ndarray) -> None:
        start = window * self._length % self._count
        head = min(len(out), self._count - start)
        self._tokens.read(start, head, out=out[:head])
        if head < len(out):  # one wrap is enough: a window is never longer than the circle
            self._tokens.read(0, len(out) - head, out=out[head:])


class PackedWindows:
    """Windows of whole documents: see above. They are the same in every epoch."""

    def __init__(self, tokens: Tokens, length: int, bos_id: int) -> None:
        self._tokens, width = tokens, length + 1
        self._heads = _find(tokens, bos_id)
        starts = np.union1d([0], self._heads)
        sizes = np.diff(np.append(starts, len(tokens)))
        filled = np.maximum(0, -(-(sizes - width) // length))  # the windows that a document fills alone
        last, rest = starts + filled * length, sizes - filled * length
        tails = filled > 0
        tails[0] |= not len(self._heads) or self._heads[0] > 0  # the set begins inside a document
        order = np.flatnonzero(~tails)[np.argsort(-rest[~tails], kind="stable")]
        rows = best_fit(rest[order].tolist(), (width - rest[tails]).tolist(), width)
        alone = np.repeat(starts, filled) + length * _count_up(filled)
        self._place = np.concatenate([alone, last[tails], last[order]])
        self._size = np.concatenate([np.full(len(alone), width), rest[tails], rest[order]])
        window = np.concatenate([np.arange(len(alone)), len(alone) + np.arange(tails.sum()), len(alone) + rows])
        by_window = np.argsort(window, kind="stable")  # stable: the piece without a BOS stays first
        self._place, self._size = self._place[by_window], self._size[by_window]
        self.count = int(window.max()) + 1
        """The windows of an epoch."""
        self._first = np.searchsorted(window[by_window], np.arange(self.count + 1))
        self.repeated = 1 - self._size.sum() / (self.count * width)
        """The share of positions that repeat the beginning of a document."""
        self.cut = float(np.mean(filled > 0))
        """The share of documents that do not fit into a window."""

    def first_of(self, epoch: int) -> int:
        return epoch * self.count

    def epoch_of(self, window: int) -> int:
        return window // self.count

    def read(self, window: int, out: np.ndarray) -> None:
        row, done = window % self.count, 0
        for piece in range(self._first[row], self._first[row + 1]):
            size = int(self._size[piece])
            self._tokens.read(int(self._place[piece]), size, out=out[done : done + size])
            done += size
        again = int(self._heads[row % len(self._heads)]) if len(self._heads) else 0
        while done < len(out):
            size = min(len(out) - done, len(self._tokens) - again)
            self._tokens.read(again, size, out=out[done : done + size])
            done, again = done + size, int(self._heads[0]) if len(self._heads) else 0


def best_fit(sizes: Iterable[int], room: Sequence[int], width: int) -> np.ndarray:
    """The window of each piece, which come longest first: that with the least room of those where it fits, else a new one of
    `width`. `room` is left in the windows that are begun, which have the first numbers."""
    windows: list[list[int]] = [[] for _ in range(width + 1)]  # by the room that is left
    rooms = 0  # a bit for each room that some window has
    for window, left in enumerate(room):
        windows[left].append(window)
        rooms |= 1 << left
    count, found = len(room), []
    for size in sizes:
        fitting = rooms >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            window = windows[left].pop()
            if not windows[left]:
                rooms ^= 1 << left
        else:
            window, left, count = count, width, count + 1
        found.append(window)
        windows[left - size].append(window)
        rooms |= 1 << (left - size)
    return np.array(found, dtype=np.int64)


def _find(tokens: Tokens, bos_id: int) -> np.ndarray:
    """Where documents begin."""
    starts = range(0, len(tokens), _BLOCK)
    blocks = ((start, tokens.read(start, min(_BLOCK, len(tokens) - start))) for start in starts)
    return np.concatenate([start + np.flatnonzero(block == bos_id) for start, block in blocks])


def _count_up(counts: np.ndarray) -> np.ndarray:
    """0 .. count - 1 for each of the counts, one after another."""
    ends = counts.cumsum()
    return np.arange(counts.sum()) - np.repeat(ends - counts, counts)
