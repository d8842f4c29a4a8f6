"""The validation text of a data spec, encoded by a given model's tokenizer."""

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parbank.cores import count_cores
from parbank.data.dataset import open_shards
from parbank.data.prepare import gather
from parbank.data.progress import Meter, Say, say_on_stderr
from parbank.data.proof import NOT_PROVED, PROVED, check_tokens, describe_prefix
from parbank.data.shards import TokenSet
from parbank.data.sources import parse_spec
from parbank.data.sources.source import Corpus, Skipped
from parbank.data.spool import Document, Spool, split
from parbank.data.tokenizer import Tokenizer
from parbank.errors import DataError
from parbank.files import default_cache

_BLOCK = 1 << 22  # tokens whose bytes are counted together
_TOGETHER = 1 << 22  # bytes of documents that are encoded together


@dataclass(frozen=True)
class Validation:
    """Tokens to score, and hashes that identify their text: scores compare when the hashes are equal."""

    tokens: TokenSet
    sha256: str
    """The sha256 of the text's bytes, whatever documents they are cut into."""
    documents: int
    documents_sha256: str
    """The sha256 of the places, in bytes, where all documents but the first begin. The same bytes cut into other documents
    have another score."""
    text: str
    """`proved`: every document's tokens stand for exactly its bytes. `not proved`: the source has tokens and no text."""
    text_note: str | None
    """The space that a published tokenizer adds, where there is one."""

    def describe(self) -> dict[str, Any]:
        """The description of a text in a result."""
        about = {
            "text": self.text,
            "text_sha256": self.sha256,
            "documents": self.documents,
            "documents_sha256": self.documents_sha256,
        }
        return about if self.text_note is None else about | {"text_note": self.text_note}


def open_validation(
    spec: str, tokenizer: Tokenizer, *, cache: Path | None = None, say: Say = say_on_stderr
) -> Validation:
    """The validation part of any spec; `text:val=PATH[,PATH...]` gives all of that text.

    The text alone decides which documents validate. Text is read and encoded again with the model's own tokenizer, so
    that a text far too short to train a tokenizer can be scored; each document's tokens are proved to be its bytes.
    Of shards there are tokens only: their own tokenizer counts the bytes, and a model with another one is refused.
    """
    opened = parse_spec(spec).open(cache if cache is not None else default_cache(), say)
    if not isinstance(opened, Path):
        return _read_text(opened, tokenizer, say)
    dataset = open_shards(opened, name=spec)
    ours, theirs = tokenizer.fingerprint, dataset.tokenizer.fingerprint
    if ours != theirs:
        raise DataError(
            f"{spec} holds tokens of another tokenizer ({theirs[:12]}) than the model's ({ours[:12]}), and no text; only its own "
            "tokenizer can count its bytes: score the model on text (--data text:val=PATH), or on shards made with its tokenizer"
        )
    return _describe(dataset.val, dataset.val_text_sha256, tokenizer, NOT_PROVED)


def _read_text(corpus: Corpus, tokenizer: Tokenizer, say: Say) -> Validation:
    """The same documents in the same order as preparation: equal documents once, in the order of their hashes."""
    if corpus.holdout:
        return _read_held_out(corpus, tokenizer, say)
    found: dict[bytes, Document] = {}
    skipped = Skipped()
    with tempfile.TemporaryDirectory(prefix="parbank-") as folder, Spool(Path(folder) / "spool") as spool:
        with Meter("reading", say) as meter:
            for document in corpus.documents(corpus.val or corpus.train, skipped):
                entry = spool.add(document)
                found.setdefault(entry.digest, entry)
                meter.advance(len(document))
        spool.seal()
        skipped.report(say)
        entries = list(found.values())
        chosen = sorted(entries if corpus.val else split(entries, spool)[1])
        if not chosen:
            names = ", ".join(map(str, corpus.files[:3]))
            raise DataError(
                f"{names}: too short to set validation text aside; score all of it with --data text:val=PATH"
            )
        return _encode((spool.read(entry) for entry in chosen), sum(entry.size for entry in chosen), tokenizer, say)


def _read_held_out(corpus: Corpus, tokenizer: Tokenizer, say: Say) -> Validation:
    """The part of the training documents that holdout=dev sets aside."""
    with tempfile.TemporaryDirectory(prefix="parbank-") as folder, Spool(Path(folder) / "spool") as spool:
        _, chosen, _ = gather(corpus, spool, say)
        return _encode(map(spool.read, chosen), sum(entry.size for entry in chosen), tokenizer, say)


def _encode(documents: Iterable[bytes], size: int, tokenizer: Tokenizer, say: Say) -> Validation:
    bos = np.array([tokenizer.bos_id], dtype=np.uint16)
    pieces: list[np.ndarray] = []
    digest = hashlib.sha256()
    number = 0
    with Meter("tokenising", say, total=size) as meter:
        for group in _group(documents):
            texts = [document.decode("utf-8") for document in group]
            for document, tokens in zip(group, tokenizer.encode_batch(texts, threads=count_cores()), strict=True):
                number += 1
                check_tokens(tokenizer, tokens, document, f"validation document {number}")
                pieces += [bos, tokens]
                digest.update(document)
                meter.advance(len(document))
    return _describe(TokenSet([np.concatenate(pieces)]), digest.hexdigest(), tokenizer, PROVED)


def _group(documents: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Documents that are encoded together, on all cores."""
    group: list[bytes] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document)
        if size >= _TOGETHER:
            yield group
            group, size = [], 0
    if group:
        yield group


def _describe(tokens: TokenSet, sha256: str, tokenizer: Tokenizer, text: str) -> Validation:
    """Counts documents in the scored tokens, so that every way to obtain a text agrees."""
    digest, documents, size, previous = hashlib.sha256(), 1, 0, tokenizer.bos_id
    for start in range(0, len(tokens), _BLOCK):
        piece = tokens.read(start, min(_BLOCK, len(tokens) - start))
        counts = tokenizer.count_bytes(piece, np.concatenate([[previous], piece[:-1]]))
        ends = size + np.cumsum(counts, dtype="<i8")
        cuts = ends[(piece == tokenizer.bos_id) & (start + np.arange(len(piece)) > 0)]
        digest.update(cuts.tobytes())
        documents, size, previous = documents + len(cuts), int(ends[-1]), int(piece[-1])
    if size == 0:
        raise DataError("there is no validation text: the shards hold nothing but document boundaries")
    note = describe_prefix(tokenizer)
    return Validation(tokens, sha256, documents, digest.hexdigest(), text=text, text_note=note)
