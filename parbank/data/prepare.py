"""Prepares documents as token shards in a folder, once.

manifest.json describes the inputs; while they are unchanged, nothing is prepared again. The folder appears whole or not
at all (folder.py), and an interrupted preparation continues (journal.py).
"""

import dataclasses
import hashlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, cast

from parbank.config import to_dict
from parbank.cores import count_cores
from parbank.data.encode import count_workers, encode_ahead, train
from parbank.data.folder import build_folder, check_folder, clear_up, hold_folder
from parbank.data.journal import Journal
from parbank.data.manifest import (
    FORMAT,
    MANIFEST,
    TOKENIZER,
    describe_input,
    read_manifest,
    report_skipped,
    same_inputs,
    verify_folder,
)
from parbank.data.overlap import RUN, Overlap, measure_overlap
from parbank.data.progress import Meter, Say, say_on_stderr
from parbank.data.shards import ShardInfo, ShardWriter
from parbank.data.sources import add_options, find_source, is_spec, parse_spec
from parbank.data.sources.source import Corpus, Skipped
from parbank.data.sources.text import parse_paths
from parbank.data.sources.unpack import plain_name
from parbank.data.spool import VAL_SHARE, Document, Spool, batches, hold_out, is_dev, sample, split
from parbank.data.tokenizer import PLAIN, Tokenizer, TokenizerConfig, check_vocab
from parbank.data.workers import Workers
from parbank.errors import ConfigError, DataError
from parbank.files import default_cache, write_file, write_json

# Enough for a good vocabulary, and trained in seconds.
SAMPLE_BYTES = 16_000_000
_BATCH_BYTES = 16 << 20  # compared together: enough for all cores, few enough for memory
_FAR = 2.5  # times the intended share of validation, or less than it by as much, are worth a warning
_MUCH = 0.2  # of the validation bytes in training too. Source code shares licences, imports and tables


def prepare_text(
    inputs: Sequence[str],
    out: Path,
    *,
    options: Sequence[str] = (),
    vocab_size: int = 1024,
    tokenizer: TokenizerConfig = PLAIN,
    say: Say = say_on_stderr,
) -> dict[str, Any]:
    """`data prepare INPUT... --out DIR`: the inputs (a data spec, or items of a `text:` spec) as shards and tokenizer in
    `out`.

    Returns the manifest; does nothing when the existing one matches.
    """
    if is_spec(inputs[0]):
        if find_source(inputs[0]).tokens:
            raise ConfigError(f"{inputs[0]} is tokens already; train on it with --data {inputs[0]}")
        if len(inputs) > 1:
            raise ConfigError(f"{inputs[0]} is a whole data spec: give it alone, or give paths only")
        request = parse_spec(add_options(inputs[0], options))
    else:
        request = parse_paths([*inputs, *options])
    corpus = cast(Corpus, request.open(default_cache(), say))
    return ensure_prepared(corpus, Path(out), vocab_size=vocab_size, tokenizer=tokenizer, say=say, shared=False)


def ensure_prepared(
    corpus: Corpus,
    folder: Path,
    *,
    vocab_size: int,
    tokenizer: TokenizerConfig = PLAIN,
    say: Say = say_on_stderr,
    shared: bool = True,
) -> dict[str, Any]:
    """The manifest of the prepared corpus in `folder`. Prepares it unless a matching one exists.

    Where another process prepares the same folder, this one waits for it if the folder is `shared`, as the cache is,
    and is refused otherwise: its result would be replaced by ours.
    """
    check_vocab(vocab_size)
    if not corpus.train:
        raise DataError("no training text: only val= was given; add train=PATH before it")
    manifest = matching_manifest(corpus, folder, vocab_size=vocab_size, tokenizer=tokenizer)
    if manifest is not None:
        clear_up(folder)
        report_skipped(manifest, say)
        return manifest
    check_folder(folder)
    with hold_folder(folder, say if shared else None):
        manifest = matching_manifest(corpus, folder, vocab_size=vocab_size, tokenizer=tokenizer)
        if manifest is not None:  # the process that we waited for has prepared it
            report_skipped(manifest, say)
            return manifest
        check_folder(folder)
        say(f"preparing {corpus.name} with {vocab_size} tokens in {folder}")
        inputs = [describe_input(path) for path in corpus.files]
        key = _describe_request(corpus, vocab_size, tokenizer) | {"inputs": inputs}
        with build_folder(folder, key, say) as building:
            return _prepare(corpus, building, Journal(building, key), say)


def matching_manifest(
    corpus: Corpus, folder: Path, *, vocab_size: int, tokenizer: TokenizerConfig = PLAIN
) -> dict[str, Any] | None:
    """The manifest in `folder`, if it was made from exactly this corpus in its current state and its files are complete."""
    try:
        manifest = read_manifest(folder)
    except DataError:  # damaged: prepared again
        return None
    if manifest is None:
        return None
    asked = _describe_request(corpus, vocab_size, tokenizer)
    if any(manifest.get(key) != asked.get(key) for key in {*asked, *to_dict(tokenizer)}):
        return None
    try:
        same = same_inputs(manifest["inputs"], corpus.files)
        verify_folder(folder, manifest)
        return manifest if same else None
    except (OSError, DataError):
        return None


def _describe_request(corpus: Corpus, vocab_size: int, tokenizer: TokenizerConfig) -> dict[str, Any]:
    """The part of the manifest that does not depend on files."""
    return {"format": FORMAT, "spec": corpus.spec, "vocab_size": vocab_size, **tokenizer.changes}


def _prepare(corpus: Corpus, building: Path, journal: Journal, say: Say) -> dict[str, Any]:
    with Spool(building / "spool", reopen=journal.continues) as spool:
        if journal.continues:
            say("continuing a preparation of this text that was interrupted")
            train, val, left_out = journal.load_documents()
        else:
            train, val, left_out = gather(corpus, spool, say)
            journal.save_documents(spool, train, val, left_out)
        size = sum(entry.size for entry in train + val)
        with Workers(count_workers(size), say) as workers:
            tokenizer, overlap = _study(corpus, train, val, spool, building, journal, workers, say)
            with Meter("tokenising", say, total=size) as meter:
                parts = {
                    name: _write_split(
                        name, entries, spool, tokenizer, building, f"{corpus.name}_{name}", journal, workers, meter
                    )
                    for name, entries in (("train", train), ("val", val))
                }
    (building / "spool").unlink()
    journal.remove()
    manifest = {
        "made_by": "parbank",
        "format": FORMAT,
        "name": corpus.name,
        "spec": corpus.spec,
        "vocab_size": tokenizer.vocab_size,
        **tokenizer.config.changes,
        "tokenizer": tokenizer.fingerprint,
        **left_out,
        "overlap": overlap.to_dict(),
        **parts,
        "inputs": journal.key["inputs"],
    }
    write_json(building / MANIFEST, manifest)
    for name, part in parts.items():
        rate = part["bytes"] / max(1, part["tokens"] - part["documents"])
        say(f"{name}: {part['documents']} documents, {part['tokens']} tokens, {rate:.3f} bytes a token")
    return manifest


def _study(
    corpus: Corpus,
    train: list[Document],
    val: list[Document],
    spool: Spool,
    building: Path,
    journal: Journal,
    workers: Workers,
    say: Say,
) -> tuple[Tokenizer, Overlap]:
    """The tokenizer of the training text, written to its file, and how much of the validation text is in it.

    The tokenizer's training takes one core; the comparison uses the others meanwhile.
    """
    known = journal.load_overlap()
    if known is not None:
        return Tokenizer.load(building / TOKENIZER), known
    stopped = Event()
    with ThreadPoolExecutor(1) as aside:
        comparing = aside.submit(_compare, train, val, spool, say, stopped)
        try:
            tokenizer = _train_tokenizer(corpus, train, spool, journal, workers, say)
            overlap = comparing.result()
        finally:
            stopped.set()  # after Ctrl-C, the pool would wait until all the text is compared
    write_file(building / TOKENIZER, tokenizer.model_bytes)
    journal.save_overlap(overlap)
    return tokenizer, overlap


def _train_tokenizer(
    corpus: Corpus, documents: list[Document], spool: Spool, journal: Journal, workers: Workers, say: Say
) -> Tokenizer:
    began, vocab_size = time.monotonic(), journal.key["vocab_size"]
    config = TokenizerConfig(**{name: value for name, value in journal.key.items() if name in to_dict(PLAIN)})
    texts = list(sample(documents, spool, SAMPLE_BYTES))
    try:
        tokenizer = Tokenizer.from_bytes(workers.submit(train, texts, vocab_size, config).result())
    except DataError as error:
        raise DataError(f"{corpus.spec}: {error}") from error
    say(f"trained a tokenizer of {vocab_size} tokens in {time.monotonic() - began:.1f} s")
    return tokenizer


def gather(corpus: Corpus, spool: Spool, say: Say) -> tuple[list[Document], list[Document], dict[str, int]]:
    """Reads every document once. Equal documents are kept once, and a validation document never trains."""
    seen: dict[bytes, Document] = {}
    dev: set[bytes] = set()
    dropped, skipped = 0, Skipped()
    by_split: dict[str, list[Document]] = {"val": [], "train": []}
    with Meter("reading", say, total=_text_bytes(corpus)) as meter:
        for name, paths in (("val", corpus.val), ("train", corpus.train)):
            for document in corpus.documents(paths, skipped):
                meter.advance(len(document))
                entry = spool.add(document)
                if entry.digest in seen:
                    dropped += 1
                else:
                    seen[entry.digest] = entry
                    by_split[name].append(entry)
                    dev |= {entry.digest} if corpus.holdout and is_dev(document) else set()
    spool.seal()
    skipped.report(say)
    if dropped:
        say(f"left out {dropped} documents that are equal to another one")
    train, val = (by_split["train"], by_split["val"]) if corpus.val else split(by_split["train"], spool)
    if corpus.holdout and train:
        train, val = hold_out(train, dev)
    for name, entries in (("training", train), ("validation", val)):
        if not entries:
            raise DataError(
                f"{_names(corpus)}: nothing is left for {name}; the text is too short, or all of it is in both: give more"
            )
    if not corpus.val and not corpus.holdout:
        _note_share(train, val, say)
    return sorted(train), sorted(val), {"dropped_duplicates": dropped, "skipped_bad": skipped.count}


def _text_bytes(corpus: Corpus) -> int | None:
    """About how much text the files hold: unknown if one of them is packed."""
    if any(plain_name(path.name) != path.name for path in corpus.files):
        return None
    return sum(path.stat().st_size for path in corpus.files)


def _note_share(train: list[Document], val: list[Document], say: Say) -> None:
    """Says so where the documents that a hash chose have far more, or far less, than the intended share of the bytes."""
    size = sum(entry.size for entry in val)
    share = size / (size + sum(entry.size for entry in train))
    if not VAL_SHARE / _FAR <= share <= VAL_SHARE * _FAR:
        say(
            f"note: validation got {share:.1%} of the text ({size:,} bytes in {len(val)} of {len(train) + len(val)} documents), "
            f"where about {VAL_SHARE:.0%} is meant: a few long documents decide it; name the validation text by val=PATH, or give "
            "more and shorter documents (a .jsonl file has one in each line)"
        )


def _compare(train: list[Document], val: list[Document], spool: Spool, say: Say, stopped: Event) -> Overlap:
    """The overlap of the validation text with the training text. Raises CancelledError once `stopped` is set."""

    def read_batches() -> Iterator[list[bytes]]:
        for batch in batches(train, _BATCH_BYTES):
            if stopped.is_set():
                raise CancelledError
            yield [spool.read(entry) for entry in batch]

    with Meter("comparing", say, total=sum(entry.size for entry in train)) as meter:
        overlap = measure_overlap(
            read_batches(),
            map(spool.read, val),
            sum(entry.size for entry in val),
            threads=count_cores(),
            advance=meter.advance,
        )
    much = "; a model can learn them by heart, and its score will flatter it" if overlap.share > _MUCH else ""
    say(f"{overlap.share:.1%} of the validation bytes are in training too, in runs of {RUN} or more{much}")
    return overlap


def _write_split(
    name: str,
    entries: list[Document],
    spool: Spool,
    tokenizer: Tokenizer,
    building: Path,
    prefix: str,
    journal: Journal,
    workers: Workers,
    meter: Meter,
) -> dict[str, Any]:
    """Writes BOS and the tokens of each document, in the order of the entries, and proves that they are its bytes."""
    digest = hashlib.sha256()
    done, written, tokens_there = journal.position(name)
    for entry in entries[:done]:
        digest.update(spool.read(entry))
        meter.advance(entry.size)
    encoded = encode_ahead(entries[done:], spool, tokenizer, building / TOKENIZER, prefix, workers)
    with ShardWriter(building, prefix, written=written, tokens=tokens_there) as writer:
        for count, (text, tokens) in encoded:
            digest.update(text)
            writer.append(tokens)
            done += count
            meter.advance(len(text))
            if journal.is_due():
                journal.note(name, done, *writer.sync())
        shards: list[ShardInfo] = writer.close()
    return {
        "documents": len(entries),
        "tokens": sum(shard.tokens for shard in shards),
        "bytes": sum(entry.size for entry in entries),
        "text_sha256": digest.hexdigest(),
        "shards": [dataclasses.asdict(shard) for shard in shards],
    }


def _names(corpus: Corpus) -> str:
    first = ", ".join(str(path) for path in corpus.files[:3])
    return first + (f" and {len(corpus.files) - 3} more" if len(corpus.files) > 3 else "")
