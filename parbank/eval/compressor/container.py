"""The container `.pbz`: a header, blocks, and an end. Every part has a checksum, and a reader holds one block at a time.

    prefix    magic, version, length and CRC-32 of the header
    header    zlib of JSON: hash of the model, context, what it was made with, names and sizes of the files
    block     kind, lengths, lanes, CRC-32 of the block, CRC-32 of the bytes that it stands for, payload
    end       a block of kind "E", without payload

All integers are little-endian. The files' bytes, one after another, are the bytes of the blocks, one after another.
"""

import json
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from parbank.errors import ArtifactError
from parbank.model.gpt import MAX_POSITIONS
from parbank.threads import MOST_THREADS

MAGIC = b"\x89PBZ\r\n\x1a\n"  # as in .pbk: a transfer in text mode visibly breaks it
VERSION = 1
BY_MODEL, BY_XZ, END = b"T", b"X", b"E"
MOST_BLOCK = 1 << 28  # bytes that a block may stand for
_MOST_HEADER = 1 << 26  # bytes of JSON: a million names
_PREFIX = struct.Struct("<8sIII")
_BLOCK = struct.Struct("<cIIIHII")


@dataclass(frozen=True, kw_only=True)
class Header:
    """The facts that a reader needs before the first block."""

    model: str
    """Hash of the model's weights, shape and tokenizer, in hex."""
    context: int
    """The window of the model, in tokens."""
    made_with: dict[str, Any]
    """The program and the machine, as far as they may change a last digit."""
    files: list[tuple[str, int]]
    """Names and sizes, in the order of the content."""


@dataclass(frozen=True)
class ContentBlock:
    """A run of the content."""

    kind: bytes
    payload: bytes
    size: int
    """Bytes that it stands for."""
    tokens: int
    lanes: int
    crc: int
    """CRC-32 of the bytes that it stands for."""


def write_header(file: BinaryIO, header: Header) -> int:
    packed = zlib.compress(json.dumps(asdict(header), separators=(",", ":")).encode("ascii"), 9)
    return file.write(_PREFIX.pack(MAGIC, VERSION, len(packed), zlib.crc32(packed))) + file.write(packed)


def write_block(file: BinaryIO, block: ContentBlock) -> int:
    head = (block.kind, len(block.payload), block.size, block.tokens, block.lanes, block.crc)
    crc = zlib.crc32(block.payload, zlib.crc32(_BLOCK.pack(*head, 0)))
    return file.write(_BLOCK.pack(*head, crc)) + file.write(block.payload)


def write_end(file: BinaryIO) -> int:
    return write_block(file, ContentBlock(END, b"", 0, 0, 0, 0))


def read_header(file: BinaryIO, source: str) -> Header:
    start = file.read(_PREFIX.size)
    if start[:8] != MAGIC:
        raise ArtifactError(f"{source} was not written by `parbank compress`; give a .pbz file")
    if len(start) < _PREFIX.size:
        raise damaged(source, "it ends inside the header")
    _, version, length, crc = _PREFIX.unpack(start)
    if version != VERSION:
        raise ArtifactError(
            f"{source} has format {version}, and this parbank reads format {VERSION}; use the parbank it was written by"
        )
    packed = _read(file, length, source) if length <= _MOST_HEADER else b""
    if zlib.crc32(packed) != crc or not packed:
        raise damaged(source, "its header has the wrong checksum")
    try:
        expand = zlib.decompressobj()
        text = expand.decompress(packed, _MOST_HEADER)
        found = json.loads(text)
        files = [(name, size) for name, size in found["files"]]
        header = Header(model=found["model"], context=found["context"], made_with=found["made_with"], files=files)
        sound = _is_sound(header)
    except (zlib.error, ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise damaged(source, "its header cannot be read")
    return header


def _is_sound(header: Header) -> bool:
    """Whether every value is one that a writer writes. Messages show the model's hash and the machine: no control
    character of a forged file may reach a terminal."""
    if not isinstance(header.made_with, dict) or not isinstance(header.model, str):
        return False
    shown = (text for pair in header.made_with.items() for text in pair if text is not None)
    return (
        type(header.context) is int
        and 1 <= header.context <= MAX_POSITIONS
        and re.fullmatch("[0-9a-f]{64}", header.model) is not None
        and all(type(value) in (str, int) and str(value).isprintable() for value in shown)
        and _in_range(header.made_with.get("threads"), 1, MOST_THREADS)
        and all(isinstance(name, str) and type(size) is int and size >= 0 for name, size in header.files)
    )


def _in_range(number: Any, low: int, high: int) -> bool:
    """Whether a field is missing (None) or a whole number of the range. True, which Python counts as 1, is no number."""
    return number is None or (type(number) is int and low <= number <= high)


def read_blocks(file: BinaryIO, total: int, source: str) -> Iterator[ContentBlock]:
    """Every block, checked against its CRC. They must stand for `total` bytes, and nothing may follow the end."""
    while True:
        kind, length, size, tokens, lanes, crc, own = _BLOCK.unpack(_read(file, _BLOCK.size, source))
        if max(size, length // 8) > MOST_BLOCK:
            raise damaged(source, "a block is longer than any that is written")
        payload = _read(file, length, source)
        head = _BLOCK.pack(kind, length, size, tokens, lanes, crc, 0)
        if zlib.crc32(payload, zlib.crc32(head)) != own or kind not in (BY_MODEL, BY_XZ, END):
            raise damaged(source, "a block has the wrong checksum")
        if kind == END:
            break
        if kind == BY_MODEL and not 1 <= lanes <= tokens <= 2 * MOST_BLOCK:
            raise damaged(source, f"a block claims {tokens:,} tokens in {lanes} segments")
        total -= size
        if total < 0 or not size:
            raise damaged(source, "its blocks hold more than its files")
        yield ContentBlock(kind, payload, size, tokens, lanes, crc)
    if total or file.read(1):
        raise damaged(source, "it does not end where it should")


def _read(file: BinaryIO, length: int, source: str) -> bytes:
    """Exactly so many bytes. Never more memory than the file has bytes."""
    parts = []
    while length and (part := file.read(min(length, 1 << 20))):
        parts.append(part)
        length -= len(part)
    if length:
        raise damaged(source, "it ends too early")
    return b"".join(parts)


def damaged(source: str, what: str) -> ArtifactError:
    return ArtifactError(f"{source} is damaged: {what}; copy it again, or compress the files again")
