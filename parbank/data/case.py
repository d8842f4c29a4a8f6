"""Capitals as operators, so that a word has the same tokens with and without them (published as parameter-golf #1729).

ASCII text only is changed. "The HTTP" is written as

    CAPITAL "the" WORD " http"

CAPITAL makes the next letter a capital, WORD all letters up to the next byte that is none. A space may come between the
operator and the letters, so that " the" stays one token. A further operator or the end of a document ends a WORD, too:
"HTTPServer" is WORD "http" CAPITAL "server". An operator before anything else than a small letter changes nothing.

Operators stand for no byte, and a letter is one byte in either case. So the bytes of a token do not depend on operators,
only their case does. A tokenizer keeps its operators apart from the same characters in a text, which it encodes as bytes.
"""

from dataclasses import dataclass

import numpy as np

CAPITAL, WORD = "\ue000", "\ue001"  # of the private use area
OPERATORS = (CAPITAL, WORD)
NAMES = ("<capital>", "<capitals>")
_SIGNS = np.array([list(sign.encode()) for sign in OPERATORS], dtype=np.uint8)

# The kinds of tokens for `Restorer`: any other token is 0.
ONE, ALL, STOP = 1, 2, 3
_LETTERS, _GAP = 26, ord("a") - ord("A")


def lower(text: str, *, continued: bool = False) -> str:
    """The text with operators in place of ASCII capitals.

    `continued`: any text may follow. A word of capitals at the end is then closed, as if small letters came next.
    """
    data = np.frombuffer(text.encode("utf-8", errors="surrogatepass"), np.uint8)
    capital = data - np.uint8(ord("A")) < _LETTERS
    if not capital.any():
        return text
    small_next = np.append(_find_small(data[1:]), continued)
    first = capital.copy()
    first[1:] &= ~capital[:-1]
    # A word has two capitals or more. The last one belongs to the next word if a small letter follows.
    word = first.copy()
    word[:-1] &= capital[1:] & ~small_next[1:]
    word[-1] = False
    places = np.flatnonzero(first | (capital & small_next))
    before = places - ((places > 0) & (data[places - 1] == ord(" ")))
    signs = _SIGNS[np.where(word[places], 1, 0)]
    found = np.insert(data + capital * np.uint8(_GAP), np.repeat(before, signs.shape[1]), signs.ravel())
    return found.tobytes().decode("utf-8", errors="surrogatepass")


@dataclass
class Restorer:
    """Applies operators to bytes that come in any number at a time. An operator may lie in one part and its letter in a
    later one."""

    kind: int = 0
    """The operator that is still at work: ONE, ALL or none."""
    spaced: bool = False
    """Whether no space may come any more between it and its letters."""

    def apply(self, data: np.ndarray, places: np.ndarray, kinds: np.ndarray) -> None:
        """Changes the bytes (uint8) in place. `places` says before which byte each operator or STOP lies, in order."""
        spaced = np.zeros(len(places), dtype=bool)
        if self.kind:
            places, kinds = np.append(0, places), np.append(self.kind, kinds)
            spaced = np.append(self.spaced, spaced)
        if not len(places):
            return
        size = len(data)
        limits = np.append(places[1:], size)
        begins = places.copy()
        if size:
            is_space = data[np.minimum(places, size - 1)] == ord(" ")
            begins += is_space & (places < limits) & ~spaced
        others = np.append(np.flatnonzero(~_find_small(data)), size)
        ends = np.minimum(others[np.searchsorted(others, begins)], limits)
        ends = np.where(kinds == ONE, np.minimum(ends, begins + 1), ends)
        reaches = (ends > begins) & (kinds != STOP)  # such ranges do not overlap: each ends before the next operator
        steps = np.zeros(size + 1, dtype=np.uint8)
        steps[begins[reaches]] += 1
        steps[ends[reaches]] -= 1
        data -= np.cumsum(steps[:-1], dtype=np.uint8) * np.uint8(_GAP)
        self._remember(int(kinds[-1]), bool(spaced[-1]), int(places[-1]), int(begins[-1]), int(ends[-1]), size)

    def _remember(self, kind: int, spaced: bool, place: int, begin: int, end: int, size: int) -> None:
        waits, runs = begin == size, kind == ALL and end == size
        self.kind = kind if kind != STOP and (waits or runs) else 0
        self.spaced = spaced or begin > place or not waits


def _find_small(data: np.ndarray) -> np.ndarray:
    found: np.ndarray = data - np.uint8(ord("a")) < _LETTERS
    return found
