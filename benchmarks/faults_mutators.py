"""Mutations of bytes and of JSON values, drawn from a random generator, and the judgement of a mutated file. For faults.py."""

import random
from typing import Any

from faults_cases import Outcome
from faults_processes import Measured

MAX_SECONDS = 1.0
MAX_MEGABYTES = 64.0
MAX_FILE = 1_000_000  # bytes; the two limits above are promised for files of up to this size

NUMBERS = (
    0, 1, -1, 2, 3, 4, 7, 8, 16, 31, 32, 63, 64, 100, 127, 128, 255, 256, 1000, 1 << 12, 1 << 15, 1 << 16, 1 << 18, 1 << 20,
    1 << 23, 1 << 24, 2**31 - 1, 2**31, 2**32, 2**39, 2**40, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**31), -(2**63),
)  # fmt: skip
TEXTS = ("", "x", "\0", "../../x", "weights/table", "é", "\ud800", "[red]", "\x1b[31m", "nan", "9" * 5000, "a" * 300)


def mutate_bytes(draw: random.Random, data: bytes) -> bytes:
    """One to four changes of any kind: bits, bytes, blocks, length."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        data = draw.choice((_flip, _set, _cut, _grow, _zero, _copy_block, _drop_block, _number))(draw, data)
    return data


def _place(draw: random.Random, data: bytes) -> int:
    """Anywhere, but often near an end: that is where headers and tables are."""
    size = len(data)
    return draw.choice(
        (draw.randrange(size), min(draw.randrange(64), size - 1), max(size - 1 - draw.randrange(128), 0))
    )


def _flip(draw: random.Random, data: bytes) -> bytes:
    return _replace(data, place := _place(draw, data), bytes([data[place] ^ 1 << draw.randrange(8)])) if data else data


def _set(draw: random.Random, data: bytes) -> bytes:
    return (
        _replace(data, _place(draw, data), bytes([draw.choice((0, 255, 127, 128, draw.randrange(256)))]))
        if data
        else data
    )


def _cut(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.choice((draw.randrange(len(data) + 1), max(len(data) - draw.randrange(1, 9), 0)))]


def _grow(draw: random.Random, data: bytes) -> bytes:
    return data + draw.choice((draw.randbytes(draw.randrange(1, 40)), bytes(draw.randrange(1, 5000)), data[-100:]))


def _zero(draw: random.Random, data: bytes) -> bytes:
    return _replace(data, _place(draw, data), bytes(draw.choice((1, 4, 8, 64, 1000)))) if data else data


def _copy_block(draw: random.Random, data: bytes) -> bytes:
    """A block written over another place, or put in there."""
    if not data:
        return data
    start, place = _place(draw, data), _place(draw, data)
    block = data[start : start + draw.choice((4, 16, 100, 1000))]
    return _replace(data, place, block) if draw.random() < 0.5 else data[:place] + block + data[place:]


def _drop_block(draw: random.Random, data: bytes) -> bytes:
    if not data:
        return data
    place = _place(draw, data)
    return data[:place] + data[place + draw.choice((1, 2, 4, 32, 512)) :]


def _number(draw: random.Random, data: bytes) -> bytes:
    """A number in the place of another, little-endian, of 2, 4 or 8 bytes."""
    if not data:
        return data
    width = draw.choice((2, 4, 8))
    value = draw.choice(NUMBERS) % (1 << 8 * width)
    return _replace(data, _place(draw, data), value.to_bytes(width, "little"))


def _replace(data: bytes, place: int, block: bytes) -> bytes:
    """The block written over the bytes at a place. The length stays."""
    return (data[:place] + block + data[place + len(block) :])[: len(data)]


def odd_value(draw: random.Random, depth: int = 0) -> Any:
    """A JSON value that a field does not expect."""
    kind = draw.randrange(9 if depth < 3 else 5)
    if kind < 3:
        return draw.choice(NUMBERS)
    if kind == 3:
        return draw.choice((None, True, False, 0.5, -0.0, 1e308, 1e-308, draw.random()))
    if kind == 4:
        return draw.choice(TEXTS)
    if kind == 5:
        return {draw.choice(TEXTS): odd_value(draw, depth + 1) for _ in range(draw.randrange(3))}
    if kind == 6:
        return [odd_value(draw, depth + 1)] * draw.choice((0, 1, 3, 2000))
    return [odd_value(draw, depth + 1) for _ in range(draw.randrange(4))]


def mutate_json(draw: random.Random, value: Any) -> Any:
    """The value with one to three of its parts replaced, dropped, added or exchanged."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        value = _mutate_value(draw, value)
    return value


def _mutate_value(draw: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and draw.random() < 0.95:
        key = draw.choice(sorted(value, key=str))
        action = draw.randrange(12)
        if action == 0:
            return {k: v for k, v in value.items() if k != key}
        if action == 1:
            return {**value, draw.choice(TEXTS): odd_value(draw)}
        if action == 2:
            return {**value, key: value[draw.choice(sorted(value, key=str))]}
        return {**value, key: _mutate_value(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.9:
        place = draw.randrange(len(value))
        action = draw.randrange(8)
        if action == 0:
            return value[:place] + value[place + 1 :]
        if action == 1:
            return [*value, value[place]]
        return [*value[:place], _mutate_value(draw, value[place]), *value[place + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.4:
        return draw.choice((value + 1, value - 1, 2 * value, value // 2, -value, value * 1000))
    return odd_value(draw)


def judge(index: int, kind: str, size: int, found: Measured) -> Outcome:
    """The outcome of a call on a mutated file: whole, or an error of our own, soon and small."""
    fault = ""
    if found.ending.startswith("fault"):
        fault = f"{found.ending}\n{found.said}"
    elif size <= MAX_FILE and found.seconds > MAX_SECONDS:
        fault = f"{size:,} bytes took {found.seconds:.2f} s; {found.said[:300]}"
    elif size <= MAX_FILE and found.megabytes > MAX_MEGABYTES:
        fault = f"{size:,} bytes took {found.megabytes:.0f} MB; {found.said[:300]}"
    ending = "broken" if fault else found.ending
    if size > MAX_FILE:  # what it took is no part of the claim
        return Outcome(index, kind, ending, fault)
    return Outcome(index, kind, ending, fault, seconds=found.seconds, megabytes=found.megabytes)
