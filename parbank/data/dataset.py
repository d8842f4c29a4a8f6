"""A data spec opened: training and validation tokens, and the tokenizer that made them."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from parbank.config import to_dict
from parbank.data.apart import prepare_apart
from parbank.data.manifest import count_skipped, hash_shards, read_manifest, verify_fetched, verify_folder
from parbank.data.prepare import ensure_prepared
from parbank.data.progress import Say, say_on_stderr
from parbank.data.proof import NOT_PROVED, PROVED
from parbank.data.shards import TokenSet, read_shards
from parbank.data.sources import find_source, parse_spec
from parbank.data.sources.pins import Pins
from parbank.data.tokenizer import PLAIN, DecodeState, Tokenizer, TokenizerConfig
from parbank.errors import DataError
from parbank.files import default_cache

_BLOCK = 1 << 22  # tokens looked at together when a whole stream is counted or decoded


@dataclass(frozen=True)
class Dataset:
    """Tokens to train on and to score, read from the disk when they are needed.

    Byte counts take a pass over the tokens and are computed on first use, always from the tokens themselves, so that
    they hold for files from any program.
    """

    train: TokenSet
    val: TokenSet
    tokenizer: Tokenizer
    name: str
    """The spec it was opened with."""
    folder: Path
    fingerprint: str
    """sha256 over the tokenizer and every shard: datasets with equal fingerprints train and score the same."""
    text: str = NOT_PROVED
    """Whether the validation tokens are proved to be the text: `proved`, or `not proved` where there is no text, or where it
    was prepared by a parbank that did not prove it."""
    overlap: float | None = None
    """The share of the validation bytes that training has too, in long runs; none where it was not measured."""
    skipped_bad: int = 0
    """The bad files and lines that were left out when the text was prepared."""

    @cached_property
    def val_bytes(self) -> int:
        return self._count(self.val)

    @cached_property
    def train_bytes(self) -> int:
        return self._count(self.train)

    @cached_property
    def val_text_sha256(self) -> str:
        digest = hashlib.sha256()
        for text in self._decoded(self.val):
            digest.update(text)
        return digest.hexdigest()

    def val_text(self) -> bytes:
        """The validation text, documents joined without a separator: the input of zlib, xz and zstd."""
        return b"".join(self._decoded(self.val))

    def require_length(self, sequence_length: int) -> None:
        """Refuses data with less than one sequence, plus the next token as the last target, in either split."""
        for part, tokens in (("training", self.train), ("validation", self.val)):
            if len(tokens) <= sequence_length:
                raise DataError(
                    f"{self.name} is too short: its {part} part has {len(tokens)} tokens, one sequence of {sequence_length} "
                    f"needs {sequence_length + 1}; give more text, or --set batch.sequence_length={max(1, len(tokens) - 1)} or less"
                )

    def _count(self, stream: TokenSet) -> int:
        return sum(int(self.tokenizer.count_bytes(tokens, before).sum()) for tokens, before in self._blocks(stream))

    def _decoded(self, stream: TokenSet) -> Iterator[bytes]:
        state = DecodeState()
        for tokens, _ in self._blocks(stream):
            yield self.tokenizer.decode_bytes(tokens, state=state)

    def _blocks(self, stream: TokenSet) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(tokens, the token before each), block by block; the stream's first token counts as following a BOS."""
        previous = self.tokenizer.bos_id
        for start in range(0, len(stream), _BLOCK):
            tokens = stream.read(start, min(_BLOCK, len(stream) - start))
            yield tokens, np.concatenate([[previous], tokens[:-1]])
            previous = int(tokens[-1])


def open_dataset(
    spec: str,
    *,
    vocab_size: int,
    tokenizer: TokenizerConfig = PLAIN,
    sequence_length: int = 0,
    cache: Path | None = None,
    say: Say = say_on_stderr,
    apart: bool = False,
) -> Dataset:
    """Opens any spec of parbank.data.sources. Text is prepared in the cache unless it is there already. Refuses a split with
    less than one sequence of `sequence_length` tokens, and validation tokens of another text than was prepared.

    `apart`: prepare in another process, because this one is busy (parbank.data.apart)."""
    cache = default_cache() if cache is None else Path(cache)
    if apart and not find_source(spec).tokens:
        prepare_apart(spec, vocab_size=vocab_size, tokenizer=tokenizer, cache=cache, say=say)
    dataset = _open(spec, vocab_size, tokenizer, cache, say)
    dataset.require_length(sequence_length)
    return dataset


def ensure_ready(
    spec: str, vocab_size: int, cache: Path, say: Say, *, tokenizer: TokenizerConfig = PLAIN
) -> tuple[Path, dict[str, Any] | None]:
    """The folder of a spec's shards, prepared if they were not there, and its manifest if parbank prepared it."""
    opened = parse_spec(spec).open(cache, say)
    if isinstance(opened, Path):
        return opened, None
    kind = "-".join([str(vocab_size), *tokenizer.changes])
    key = hashlib.sha256(f"{opened.spec}\n{kind}".encode("utf-8", "surrogateescape")).hexdigest()[:12]
    folder = cache / f"{opened.name}-{kind}-{key}"
    return folder, ensure_prepared(opened, folder, vocab_size=vocab_size, tokenizer=tokenizer, say=say)


def _open(spec: str, vocab_size: int, tokenizer: TokenizerConfig, cache: Path, say: Say) -> Dataset:
    folder, manifest = ensure_ready(spec, vocab_size, cache, say, tokenizer=tokenizer)
    dataset = open_shards(folder, vocab_size=vocab_size, name=spec)
    for name, asked in to_dict(tokenizer).items():
        if (there := getattr(dataset.tokenizer.config, name)) != asked:
            setting = f"tokenizer.{name}"
            raise DataError(
                f"the tokenizer in {folder} has {setting}={json.dumps(there)}, and the run asks for {json.dumps(asked)}; add "
                f"--set {setting}={json.dumps(there)}"
            )
    expected = manifest["val"].get("text_sha256") if manifest is not None else None
    if expected is None:
        return dataset
    if expected != dataset.val_text_sha256:
        raise DataError(
            f"the validation tokens in {folder} are not those of the text that was prepared there; delete that folder, and the "
            "text is prepared again"
        )
    return replace(dataset, text=PROVED)


def open_shards(folder: Path, *, vocab_size: int | None = None, name: str | None = None) -> Dataset:
    """Opens a folder of `*_train_*.bin`, `*_val_*.bin` and one SentencePiece `.model`, checking every token.

    If parbank prepared or fetched the folder, every file must be the one that the manifest, or the record of the fetch,
    lists.
    """
    manifest = read_manifest(folder) or {}
    tokenizer = Tokenizer.load(_find_model(folder))
    if vocab_size is not None and tokenizer.vocab_size != vocab_size:
        raise DataError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, but the model was asked to have {vocab_size}; "
            f"add --set model.vocab_size={tokenizer.vocab_size}"
        )
    paths = [_find_shards(folder, split) for split in ("train", "val")]
    train, val = (read_shards(own, vocab_size=tokenizer.vocab_size) for own in paths)
    if manifest:
        verify_folder(folder, manifest)
    elif (pins := Pins.read(folder)).source:
        verify_fetched(folder, pins)
    measured = manifest.get("overlap")
    return Dataset(
        train=train,
        val=val,
        tokenizer=tokenizer,
        name=name or f"shards:{folder}",
        folder=folder,
        fingerprint=_hash_all(tokenizer, *paths),
        overlap=measured.get("share") if isinstance(measured, dict) else None,
        skipped_bad=count_skipped(manifest),
    )


def _hash_all(tokenizer: Tokenizer, train: list[Path], val: list[Path]) -> str:
    digests = hash_shards([*train, *val])
    parts = [tokenizer.fingerprint, "train", *digests[: len(train)], "val", *digests[len(train) :]]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def describe(folder: Path) -> dict[str, Any]:
    """`data info DIR`: the contents of a folder of shards, with every token counted. A shard that differs from its
    manifest is refused."""
    folder = Path(folder)
    data = open_shards(folder)
    manifest = read_manifest(folder)
    found: dict[str, Any] = {
        "folder": str(folder),
        "spec": manifest["spec"] if manifest else None,
        "vocab_size": data.tokenizer.vocab_size,
        "tokenizer": data.tokenizer.fingerprint,
        "fingerprint": data.fingerprint,
        "overlap": data.overlap,
    }
    for split, stream, size in (("train", data.train, data.train_bytes), ("val", data.val, data.val_bytes)):
        documents = sum(int(np.count_nonzero(tokens == data.tokenizer.bos_id)) for tokens, _ in data._blocks(stream))
        found[split] = {
            "shards": len(stream.shards),
            "documents": documents,
            "tokens": len(stream),
            "bytes": size,
            "bytes_per_token": size / max(1, len(stream) - documents),
        }
    return found


def _find_model(folder: Path) -> Path:
    if not folder.is_dir():
        raise DataError(
            f"{folder} is not a folder; shards:DIR needs one with *_train_*.bin, *_val_*.bin and a .model file"
        )
    models = sorted(folder.glob("*.model"))
    if len(models) != 1:
        found = ", ".join(path.name for path in models) or "none"
        raise DataError(
            f"{folder} must hold exactly one SentencePiece .model, the tokenizer of its shards; found {found}: "
            "copy it there, or remove the others"
        )
    return models[0]


def _find_shards(folder: Path, split: str) -> list[Path]:
    paths = sorted(folder.glob(f"*_{split}_*.bin"))
    if not paths:
        raise DataError(f"{folder} holds no *_{split}_*.bin; a dataset needs shards to train on and to validate with")
    return paths
