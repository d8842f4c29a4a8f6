"""The documents of a spool as tokens: the work that all cores share.

A worker reads, encodes and proves a batch by itself. Documents go back as one text and one array, so that the process that
writes them does nothing for each document.
"""

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np

from parbank.cores import count_cores
from parbank.data.proof import check_tokens
from parbank.data.spool import Document, Spool, batches
from parbank.data.tokenizer import Tokenizer, TokenizerConfig
from parbank.data.workers import Workers

MOST_WORKERS = 32  # some 70 MB each
LEAST_BYTES = 8_000_000  # of text that is worth processes: threads of this one encode less as quickly
_BATCH_BYTES = 1 << 19  # a tenth of a second, so that all cores end at about the same time
_LONG = 1 << 22  # a batch with a longer document is encoded in parts, by threads of this process

Encoded = tuple[bytes, np.ndarray]
"""The text of a batch, and its tokens with a BOS before each document."""


def count_workers(size: int) -> int:
    """The processes for a text of so many bytes."""
    cores = count_cores()
    return min(cores, MOST_WORKERS) if cores > 1 and size >= LEAST_BYTES else 0


def train(texts: Sequence[str], vocab_size: int, config: TokenizerConfig) -> bytes:
    """The bytes of a trained tokenizer. In a process of its own it need not wait for Python's lock at each of its lines."""
    return Tokenizer.train(texts, vocab_size, config).model_bytes


def encode_ahead(
    entries: Sequence[Document], spool: Spool, tokenizer: Tokenizer, model: Path, name: str, workers: Workers
) -> Iterator[tuple[int, Encoded]]:
    """Batches in the order of the entries: the number of documents, their text and tokens. `model` is the tokenizer's file,
    and `name` says in errors what the documents belong to. Memory is bounded: a batch starts if there is room."""
    room, taken = 2 * (workers.count + 1) * _LONG, 0
    coming: deque[tuple[list[Document], int, Future[Encoded]]] = deque()
    for batch in batches(entries, _BATCH_BYTES):
        size = sum(entry.size for entry in batch)
        while coming and taken + size > room:
            done, freed, future = coming.popleft()
            yield len(done), future.result()
            taken -= freed
        taken += size
        if workers.count and max(entry.size for entry in batch) <= _LONG:
            future = workers.submit(_encode_apart, batch, spool.path.absolute(), model.absolute(), name)
        else:
            future = workers.submit_here(_encode, batch, spool, tokenizer, name, count_cores())
        coming.append((batch, size, future))
    for done, _, future in coming:
        yield len(done), future.result()


def _encode_apart(entries: list[Document], spool: Path, model: Path, name: str) -> Encoded:
    """Runs in a worker."""
    return _encode(entries, *_open(spool, model), name, threads=1)


@functools.lru_cache(maxsize=1)
def _open(spool: Path, model: Path) -> tuple[Spool, Tokenizer]:
    return Spool(spool, reopen=True), Tokenizer.load(model)


def _encode(entries: list[Document], spool: Spool, tokenizer: Tokenizer, name: str, threads: int) -> Encoded:
    documents = [spool.read(entry) for entry in entries]
    bos = np.array([tokenizer.bos_id], dtype=np.uint16)
    pieces: list[np.ndarray] = []
    texts = [document.decode("utf-8") for document in documents]
    for document, tokens in zip(documents, tokenizer.encode_batch(texts, threads=threads), strict=True):
        check_tokens(tokenizer, tokens, document, f"a document of {name}")
        pieces += [bos, tokens]
    return b"".join(documents), np.concatenate(pieces)
