"""From pieces of text to blocks, and from blocks to bytes."""

import lzma
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from parbank.artifact.load import LoadedModel
from parbank.errors import ConfigError
from parbank.eval.compressor.coder import (
    MOST_LANES,
    STATE,
    WORD,
    CannotDecode,
    TokenCoder,
    check_lanes,
    choose_lanes,
    find_least_bits,
)
from parbank.eval.compressor.container import BY_MODEL, BY_XZ, MOST_BLOCK, ContentBlock, damaged, write_block
from parbank.eval.compressor.pieces import NotTokens, is_text, to_tokens

LANE_BYTES = 1 << 16  # a block has so many bytes a lane: memory stays bounded, and a lane's start costs little
_LEAST_BLOCK = 1 << 22

Advance = Callable[[float], None]
"""Called with the bytes of content that were just coded."""


@dataclass
class Tally:
    """Counts of the blocks written so far."""

    tokens: int = 0
    bits: float = 0.0
    """Bits of the tokens, by the model's own probabilities: the score of this segmentation."""
    by_model: int = 0
    """Bytes of content in blocks of the model."""
    coded: int = 0
    """Bytes of the range coder: compare with `bits`."""
    stored: int = 0
    """Bytes of content in blocks of xz."""
    refused: int = 0
    """Of these bytes, text that the model would have made larger than xz did."""
    lanes: set[int] = field(default_factory=set)


class BlockWriter:
    """Gathers pieces of one kind until a block is full, and writes it.

    The model codes text, or xz does where that is smaller: every model predicts some texts badly. To prove a score, the
    model codes everything (`always_model`).
    """

    def __init__(
        self,
        file: BinaryIO,
        loaded: LoadedModel,
        segments: int | None,
        advance: Advance,
        *,
        always_model: bool = False,
    ) -> None:
        check_lanes(segments)
        self._always_model = always_model
        self.tally = Tally()
        self._file, self._loaded, self._segments, self._advance = file, loaded, segments, advance
        self._coder = TokenCoder(loaded.model, loaded.context)
        self._most = max(_LEAST_BLOCK, (segments or 0) * LANE_BYTES)
        self._bos = np.array([loaded.tokenizer.bos_id], np.uint16)
        self._tokens: list[np.ndarray] = []
        self._data: list[bytes] = []
        self._held = 0  # bytes of them: adding up 10,000 small files again for each file takes seconds

    def add(self, data: bytes, *, new_file: bool) -> bool:
        """Takes the next piece of the content. Returns whether the model codes it."""
        try:
            tokens = to_tokens(data, self._loaded.tokenizer) if is_text(data) else None
        except NotTokens:
            tokens = None
        if tokens is None:
            self.flush()
            self._store(data)
            return False
        # A tokenizer that adds a space takes every piece as a document; a BOS stands for no byte.
        own_document = new_file or self._loaded.tokenizer.adds_prefix
        self.add_tokens(np.concatenate([self._bos, tokens]) if own_document else tokens, data)
        return True

    def add_tokens(self, tokens: np.ndarray, data: bytes) -> None:
        """Takes tokens that stand for `data`. A block never holds more than `self._most` bytes, unless `data` alone does: no
        reader takes more than `MOST_BLOCK`."""
        if len(data) > MOST_BLOCK:
            raise ConfigError(f"a document of {len(data):,} bytes cannot be coded: at most {MOST_BLOCK:,}; split it")
        if self._held + len(data) > self._most:
            self.flush()
        self._tokens.append(tokens)
        self._data.append(data)
        self._held += len(data)

    def flush(self) -> None:
        """Writes the gathered bytes as a block."""
        data, self._held = b"".join(self._data), 0
        if not data:  # empty files leave a BOS and no byte: their sizes in the header say all
            self._tokens, self._data = [], []
            return
        tokens = np.concatenate(self._tokens)
        self._tokens, self._data = [], []
        # Every lane starts from a BOS of its own, so the first BOS of a block need not be coded.
        tokens = tokens[1:] if tokens[0] == self._bos[0] else tokens
        lanes = choose_lanes(len(tokens), self._loaded.context, self._coder.device, self._segments)
        each = len(data) / len(tokens)
        with ThreadPoolExecutor(1) as aside:  # xz releases Python's lock: it costs no time beside the model
            packed = None if self._always_model else aside.submit(_pack, data)
            coded, bits = self._coder.encode(tokens, lanes, lambda done: self._advance(done * each))
            smaller = packed is not None and len(packed.result()) < len(coded)
        if packed is not None and smaller:
            self._write_packed(packed.result(), data)
            self.tally.refused += len(data)
            return
        write_block(self._file, ContentBlock(BY_MODEL, coded, len(data), len(tokens), lanes, zlib.crc32(data)))
        tally = self.tally
        tally.tokens, tally.bits, tally.coded = tally.tokens + len(tokens), tally.bits + bits, tally.coded + len(coded)
        tally.by_model += len(data)
        tally.lanes.add(lanes)

    def _store(self, data: bytes) -> None:
        self._write_packed(_pack(data), data)
        self._advance(len(data))

    def _write_packed(self, packed: bytes, data: bytes) -> None:
        write_block(self._file, ContentBlock(BY_XZ, packed, len(data), 0, 0, zlib.crc32(data)))
        self.tally.stored += len(data)


def _pack(data: bytes) -> bytes:
    return lzma.compress(data, preset=6)


class BlockReader:
    """The bytes of blocks."""

    def __init__(self, loaded: LoadedModel, context: int, source: str, advance: Advance) -> None:
        self._coder = TokenCoder(loaded.model, context)
        self._tokenizer, self._source, self._advance = loaded.tokenizer, source, advance
        self._vocab = loaded.model.config.vocab_size
        # The fewest bytes of each token: the space that a tokenizer puts before a document is no byte of the text.
        self._least = np.maximum(loaded.tokenizer.byte_lengths - int(loaded.tokenizer.adds_prefix), 0)

    def read(self, block: ContentBlock) -> bytes | None:
        """The bytes, or None if the model decodes other bytes than those that were written."""
        if block.kind == BY_XZ:
            self._advance(block.size)
            return self._expand(block)
        if block.lanes > MOST_LANES or len(block.payload) % WORD:
            raise damaged(self._source, f"a block of {block.lanes} segments and {len(block.payload):,} bytes")
        least = find_least_bits(block.tokens, self._vocab) - STATE
        if least > 8 * len(block.payload):  # before any work: decoding what a forged file claims would take hours
            claim = f"a block claims {block.tokens:,} tokens in {len(block.payload):,} bytes"
            raise damaged(self._source, f"{claim}, and they take at least {least / 8:,.0f}")
        each, left = block.size / block.tokens, block.size

        def seen(tokens: np.ndarray) -> None:
            nonlocal left
            left -= int(self._least[tokens].sum())
            if left < 0:  # more bytes than the block stands for: the rest need not be decoded
                raise CannotDecode
            self._advance(len(tokens) * each)

        try:
            tokens = self._coder.decode(block.payload, block.tokens, block.lanes, seen)
        except CannotDecode:
            return None
        data = self._tokenizer.decode_bytes(tokens)
        return data if len(data) == block.size and zlib.crc32(data) == block.crc else None

    def _expand(self, block: ContentBlock) -> bytes:
        decoder = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=1 << 28)
        try:
            data = decoder.decompress(block.payload, max_length=block.size + 1)
        except lzma.LZMAError:
            data = b""
        if not decoder.eof or len(data) != block.size or zlib.crc32(data) != block.crc:
            raise damaged(self._source, "a stored block is broken")
        return data
