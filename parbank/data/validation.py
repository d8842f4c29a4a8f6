"""The validation text of a data spec, encoded by a given model's tokenizer."""

import hashlib
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parbank.data.dataset import Dataset, open_shards
from parbank.data.progress import Meter, Say, say_on_stderr
from parbank.data.shards import TokenSet
from parbank.data.sources import parse_spec
from parbank.data.sources.source import Corpus, Skipped
from parbank.data.spool import Document, Spool, split
from parbank.data.tokenizer import Tokenizer
from parbank.errors import DataError
from parbank.files import default_cache

_BLOCK = 1 << 22  # tokens whose bytes are counted together


@dataclass(frozen=True)
class Validation:
    """Tokens to score, and hashes that identify their text: scores compare when the hashes are equal."""

    tokens: TokenSet
    sha256: str
    """Of the text's bytes, whatever documents they are cut into."""
    documents: int
    documents_sha256: str
    """Of the places, in bytes, where documents but the first begin: other documents of the same bytes score otherwise."""


def open_validation(
    spec: str, tokenizer: Tokenizer, *, cache: Path | None = None, say: Say = say_on_stderr
) -> Validation:
    """The validation part of any spec; `text:val=PATH[,PATH...]` gives all of that text.

    The text alone decides which documents validate. Text is read and encoded anew with the model's own tokenizer, so
    that a text far too short to train a tokenizer can be scored. Shards made with another tokenizer are decoded
    first.
    """
    opened = parse_spec(spec).open(cache if cache is not None else default_cache(), say)
    if not isinstance(opened, Path):
        return _read_text(opened, tokenizer, say)
    dataset = open_shards(opened, name=spec)
    if dataset.tokenizer.fingerprint == tokenizer.fingerprint:
        return _describe(dataset.val, dataset.val_text_sha256, tokenizer)
    return _encode(_documents(dataset), dataset.val_bytes, tokenizer, say)


def _read_text(corpus: Corpus, tokenizer: Tokenizer, say: Say) -> Validation:
    """The same documents in the same order as preparation: equal documents once, in the order of their hashes."""
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


def _documents(dataset: Dataset) -> Iterable[bytes]:
    tokens = dataset.val.read(0, len(dataset.val))
    for document in np.split(tokens, np.flatnonzero(tokens == dataset.tokenizer.bos_id)):
        yield dataset.tokenizer.decode_bytes(document)


def _encode(documents: Iterable[bytes], size: int, tokenizer: Tokenizer, say: Say) -> Validation:
    bos = np.array([tokenizer.bos_id], dtype=np.uint16)
    pieces: list[np.ndarray] = []
    digest = hashlib.sha256()
    with Meter("tokenising", say, total=size) as meter:
        for document in filter(None, documents):
            try:
                pieces += [bos, tokenizer.encode(document.decode("utf-8"))]
            except UnicodeDecodeError as error:
                raise DataError(
                    f"validation document {len(pieces) // 2 + 1} is no UTF-8 once decoded from its shards ({error.reason}), so "
                    "another tokenizer cannot take it; score these shards with a model of their own tokenizer"
                ) from None
            digest.update(document)
            meter.advance(len(document))
    if not pieces:
        raise DataError("there is no validation text: the shards hold nothing but document boundaries")
    return _describe(TokenSet([np.concatenate(pieces)]), digest.hexdigest(), tokenizer)


def _describe(tokens: TokenSet, sha256: str, tokenizer: Tokenizer) -> Validation:
    """Counts documents in the scored tokens, so that every way to obtain a text agrees."""
    digest, documents, size, previous = hashlib.sha256(), 1, 0, tokenizer.bos_id
    for start in range(0, len(tokens), _BLOCK):
        piece = tokens.read(start, min(_BLOCK, len(tokens) - start))
        counts = tokenizer.count_bytes(piece, np.concatenate([[previous], piece[:-1]]))
        ends = size + np.cumsum(counts, dtype="<i8")
        cuts = ends[(piece == tokenizer.bos_id) & (start + np.arange(len(piece)) > 0)]
        digest.update(cuts.tobytes())
        documents, size, previous = documents + len(cuts), int(ends[-1]), int(piece[-1])
    return Validation(tokens, sha256, documents, digest.hexdigest())
