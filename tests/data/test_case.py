"""Capitals as operators: against plain definitions, one character at a time, and in parts of any size."""

import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parbank.data.case import ALL, CAPITAL, ONE, STOP, WORD, Restorer, lower

LETTERS = st.text(st.sampled_from("aAbBzZ @[`{1é\u00c9\n\udc80"), max_size=14)
PARTS = st.lists(st.one_of(st.sampled_from([ONE, ALL, STOP]), st.sampled_from([b"a", b"zb", b" ", b" a", b"1", b"Q"])))


def define_lower(text: str) -> str:
    """What `lower` means, by a regular expression."""
    found = re.compile(" ?(?:([A-Z]{2,})(?![a-z])|[A-Z])", re.ASCII)
    return found.sub(lambda part: (WORD if part[1] else CAPITAL) + part[0].lower(), text)


def define_restore(parts: list[int | bytes]) -> bytes:
    """What operators mean, byte by byte."""
    kind, spaced, text = 0, False, b""
    for part in parts:
        if isinstance(part, int):
            kind, spaced = (0 if part == STOP else part), False
            continue
        for byte in part:
            sign = bytes([byte])
            if kind and sign == b" " and not spaced:
                spaced = True
            elif kind and b"a" <= sign <= b"z":
                sign, spaced = sign.upper(), True
                kind = 0 if kind == ONE else kind
            else:
                kind = 0
            text += sign
    return text


def restore(parts: list[int | bytes], cuts: list[int]) -> bytes:
    """`Restorer` on groups of parts."""
    restorer, found = Restorer(), b""
    for begin, end in zip([0, *cuts], [*cuts, len(parts)]):
        group = parts[begin:end]
        data = np.frombuffer(b"".join(part for part in group if isinstance(part, bytes)), np.uint8).copy()
        sizes = np.cumsum([len(part) if isinstance(part, bytes) else 0 for part in group] or [0])
        places = [(int(size), part) for size, part in zip(sizes, group) if isinstance(part, int)]
        where, kinds = np.array([p for p, _ in places], np.int64), np.array([k for _, k in places], np.uint8)
        restorer.apply(data, where, kinds)
        found += data.tobytes()
    return found


def split(text: str) -> list[int | bytes]:
    """A lowered text as operators and bytes."""
    kinds = {CAPITAL: ONE, WORD: ALL}
    pieces = re.split(f"([{CAPITAL}{WORD}])", text)
    return [kinds.get(piece) or piece.encode("utf-8", "surrogatepass") for piece in pieces if piece]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The sea", f"{CAPITAL}the sea"),
        (" The", f"{CAPITAL} the"),
        ("the HTTP of", f"the{WORD} http of"),
        ("HTTPServer", f"{WORD}http{CAPITAL}server"),
        ("OfIt", f"{CAPITAL}of{CAPITAL}it"),
        ("ABc", f"{CAPITAL}a{CAPITAL}bc"),
        ("A B", f"{CAPITAL}a{CAPITAL} b"),
        ("\u00c9A\u00c9", f"\u00c9{CAPITAL}a\u00c9"),
        ("nothing here", "nothing here"),
        ("", ""),
    ],
)
def test_examples(text: str, expected: str) -> None:
    assert lower(text) == expected


@settings(max_examples=500, deadline=None)
@given(text=LETTERS)
def test_lowering_is_as_defined(text: str) -> None:
    assert lower(text) == define_lower(text)


@settings(max_examples=500, deadline=None)
@given(parts=PARTS, data=st.data())
@example(parts=[ALL, b" ", b"a", b"a", b"1", b"a", ONE, ONE, b" a", ONE], data=None)
def test_operators_mean_the_same_in_parts_of_any_size(parts: list[int | bytes], data: st.DataObject | None) -> None:
    some = st.lists(st.integers(0, len(parts)), max_size=4).map(sorted)
    expected = define_restore(parts)
    assert restore(parts, data.draw(some) if data else []) == expected
    assert restore(parts, list(range(len(parts)))) == expected, "one by one"
    assert len(expected) == sum(len(part) for part in parts if isinstance(part, bytes)), "an operator is no byte"


@settings(max_examples=500, deadline=None)
@given(text=LETTERS, more=LETTERS)
@example(text="AB", more="cd")
@example(text="A", more=" b")
def test_nothing_is_lost_and_a_continued_text_leaves_the_next_alone(text: str, more: str) -> None:
    both = (text + more).encode("utf-8", "surrogatepass")
    assert restore(split(lower(text + more)), []) == both
    assert restore([*split(lower(text, continued=True)), *split(lower(more))], []) == both
    assert not re.search("[A-Z]", lower(text))


def test_without_being_continued_a_word_of_capitals_runs_on() -> None:
    """Why `continued` is there."""
    assert restore([*split(lower("AB")), *split(lower("cd"))], []) == b"ABCD"
    assert lower("AB", continued=True) == f"{CAPITAL}a{CAPITAL}b"
    assert lower("ABC", continued=True) == f"{WORD}ab{CAPITAL}c"
    assert lower("ABC.", continued=True) == lower("ABC.") == f"{WORD}abc."
