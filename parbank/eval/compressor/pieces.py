"""Any bytes as tokens that give back exactly these bytes. Also decides which bytes are not text.

Valid UTF-8 goes through the tokenizer. Other bytes, and text that the tokenizer would change, go through its 256 byte
tokens. Data with few bytes of text is stored by xz instead: a model of text would make it larger.
"""

import re
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from parbank.data.tokenizer import Tokenizer

PIECE = 1 << 20  # bytes that are read, judged and tokenised together
_SHORT = 64  # bytes: a shorter text that the tokenizer changes is coded byte by byte
_STRANGE = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")  # control characters that no text file needs
_ESCAPED = re.compile("[\udc80-\udcff]+")  # Python's stand-ins for bytes that are not UTF-8
_MOST_STRANGE = 0.25  # of the bytes of a text: Latin-1 has few, a program or a picture has far more


class NotTokens(Exception):
    """The tokenizer has no tokens for some bytes."""


def read_pieces(file: BinaryIO) -> Iterator[bytes]:
    """A file in pieces of at most PIECE bytes. A piece ends after a line, or at least not inside a character."""
    held = b""
    while more := file.read(PIECE - len(held)):
        held += more
        if len(held) == PIECE:
            end = _find_end(held)
            yield held[:end]
            held = held[end:]
    if held:
        yield held


def _find_end(data: bytes) -> int:
    line = data.rfind(b"\n", len(data) // 2) + 1
    if line:
        return line
    for back in range(1, 4):  # the first byte of an unfinished character
        if data[-back] >= 0xC0:
            return len(data) - back
        if data[-back] < 0x80:
            break
    return len(data)


def is_text(data: bytes) -> bool:
    """Whether most of the bytes are text in UTF-8."""
    escaped = sum(map(len, _ESCAPED.findall(data.decode("utf-8", errors="surrogateescape"))))
    return escaped + len(_STRANGE.findall(data)) <= _MOST_STRANGE * len(data)


def to_tokens(data: bytes, tokenizer: Tokenizer) -> np.ndarray:
    """uint16 tokens that give back exactly `data` at the start of a document. Raises NotTokens."""
    pieces, place = [], 0
    text = data.decode("utf-8", errors="surrogateescape")
    for found in _ESCAPED.finditer(text):
        pieces.append(_encode(text[place : found.start()], tokenizer))
        pieces.append(_encode_bytes(found.group().encode("utf-8", errors="surrogateescape"), tokenizer))
        place = found.end()
    pieces.append(_encode(text[place:], tokenizer))
    tokens = np.concatenate(pieces)
    if tokenizer.decode_bytes(tokens) != data:
        raise NotTokens
    return tokens


def _encode(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """The tokenizer's tokens if they are exact, else those of both halves. So a character that the tokenizer changes costs
    byte tokens for its surroundings only. A tokenizer that puts a space before a text gets a BOS, which removes it."""
    if not text:
        return np.empty(0, np.uint16)
    tokens, data = tokenizer.encode(text, continued=True), text.encode("utf-8")
    if tokenizer.adds_prefix:
        tokens = np.concatenate([np.array([tokenizer.bos_id], np.uint16), tokens])
    if tokenizer.decode_bytes(tokens) == data:
        return tokens
    if len(data) <= _SHORT:
        return _encode_bytes(data, tokenizer)
    middle = len(text) // 2
    return np.concatenate([_encode(text[:middle], tokenizer), _encode(text[middle:], tokenizer)])


def _encode_bytes(data: bytes, tokenizer: Tokenizer) -> np.ndarray:
    if tokenizer.byte_tokens is None:
        raise NotTokens
    return tokenizer.byte_tokens[np.frombuffer(data, np.uint8)]
