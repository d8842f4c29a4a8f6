"""How much text there is, and how hard it is: from the sizes of files and a sample of two megabytes.

Hard means bits per byte of zlib on each document by itself. A compressor of the whole sample would make too much of what
documents share: by xz, manual pages are easier than Python, and models find them harder.
"""

import hashlib
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from parbank.data.dataset import open_shards
from parbank.data.sources import parse_spec
from parbank.data.sources.source import Corpus, Skipped
from parbank.errors import DataError
from parbank.files import default_cache

SAMPLE_BYTES = 2_000_000
_FILES = 256  # among which the sample is divided: one file may be unlike the others
_DOCUMENT = 16_000  # bytes of a document that are taken: a long one may be unlike the others, too
_STRIDE = 8  # of many documents in one file, one in so many at most
_SPLIT = 0.98  # about 2% of the documents are held out for validation
# Unpacked bytes are 8 / x times those of xz, where x is the text's own bits per byte under xz. Other formats pack less:
# gzip 1.25 times as many bytes, zstd 1.1 (benchmarks/results/sprint); Parquet's pages are usually Snappy's, about 1.6.
_PACKED = {".xz": 1.0, ".gz": 1.25, ".zst": 1.1, ".parquet": 1.6}

KNOWN = {"78e0d4caa852c2c976566e41de123d3eabf6da345f49d2037ea09f92e61a8538": "corpus"}
"""Texts of runs on a GPU behind the laws, by `PlanText.digest`: the laws have a factor for each name. It says nothing to a CPU,
because the fit cannot tell a difference of machines from one of texts."""


@dataclass(frozen=True, kw_only=True)
class PlanText:
    """The training text of a plan."""

    name: str
    bytes: float
    """The approximate bytes of training text, each byte once."""
    hardness: float
    """Bits per byte of zlib on each document of a sample."""
    vocab: int | None = None
    """The vocabulary of text that is tokens already."""
    bytes_per_token: float | None = None
    """Measured, for text that is tokens already."""
    digest: str = ""
    """Tells one text from another, wherever it lies, by the sample, the sizes of the files, and what is scored."""

    def fitted_name(self, *, cuda: bool) -> str:
        """The name by which the laws know the text, if they do."""
        return KNOWN.get(self.digest, self.name) if cuda else self.name


def read_text(spec: str, say: Callable[[str], None] = lambda line: None) -> PlanText:
    """Describes the text of a data spec. Reads a sample, and prepares nothing."""
    opened = parse_spec(spec).open(default_cache(), say)
    return _describe_shards(opened, spec) if isinstance(opened, Path) else _describe_files(opened)


def measure_hardness(documents: Sequence[bytes]) -> float:
    """Bits per byte of a sample under zlib, document by document."""
    total = sum(map(len, documents))
    if not total:
        raise DataError("the text is empty; give text to train on")
    return 8 * sum(len(zlib.compress(document, 9)) for document in documents) / total


def _describe_files(corpus: Corpus) -> PlanText:
    files = corpus.train
    documents = _read_sample(corpus, files)
    hardness = measure_hardness(documents)
    packed = 8 * len(lzma.compress(b"".join(documents), preset=6)) / sum(map(len, documents))
    total = sum(_text_bytes(path, packed) for path in files)
    share = 1.0 if corpus.val else _SPLIT
    digest = _digest(corpus, documents)
    return PlanText(name=corpus.name, bytes=max(1.0, share * total), hardness=hardness, digest=digest)


def _digest(corpus: Corpus, documents: Sequence[bytes]) -> str:
    """sha256 of a sample of the training text, and of the text that is scored where it lies in files of its own. With
    `holdout=dev` another part of the training text is scored, which may be harder or easier."""
    scored = () if corpus.holdout else corpus.val
    digest = hashlib.sha256(corpus.holdout.encode())
    for files, sample in ((corpus.train, documents), (scored, _read_sample(corpus, scored))):
        digest.update(f"{sum(path.stat().st_size for path in files)} {len(sample)}\n".encode())
        for document in sample:
            digest.update(f"{len(document)}\n".encode() + document)
    return digest.hexdigest()


def _read_sample(corpus: Corpus, files: Sequence[Path]) -> list[bytes]:
    """Beginnings of documents from all over the files."""
    chosen = files[:: max(1, len(files) // _FILES)]
    each = SAMPLE_BYTES // max(len(chosen), 1) + 1
    stride = min(_STRIDE, max(1, sum(path.stat().st_size for path in files) // (2 * SAMPLE_BYTES)))
    return [piece for path in chosen for piece in _read_some(corpus, path, each, stride)]


def _read_some(corpus: Corpus, path: Path, most: int, stride: int) -> Iterator[bytes]:
    """Beginnings of a file's documents, one in `stride`, until there are `most` bytes."""
    kept = read = 0
    for index, document in enumerate(corpus.documents([path], Skipped())):
        read += len(document)
        if index % stride == 0:
            yield document[:_DOCUMENT]
            kept += min(len(document), _DOCUMENT)
        if kept >= most or read >= 2 * stride * max(most, _DOCUMENT):
            return


def _text_bytes(path: Path, xz_bits: float) -> float:
    size = path.stat().st_size
    packed = _PACKED.get(path.suffix.lower())
    if packed is None:
        return size
    known = read_xz_size(path) if path.suffix.lower() == ".xz" else None
    return known if known is not None else size * 8 / (packed * xz_bits)


def read_xz_size(path: Path) -> int | None:
    """The unpacked bytes of an .xz file, from the index at its end. None for several streams, or where there is no index: a
    sample then has to do. A long file packs better than a sample of it, by a fifth."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        footer = _read_at(file, size - 12, 12)
        if len(footer) < 12 or footer[10:] != b"YZ":
            return None
        index_size = 4 * (int.from_bytes(footer[4:8], "little") + 1)
        index = _read_at(file, size - 12 - index_size, index_size)
    numbers = _read_numbers(index[1:])
    count = next(numbers, 0)
    records = [(next(numbers, 0), next(numbers, 0)) for _ in range(min(count, index_size))]
    blocks = sum((packed + 3) // 4 * 4 for packed, _ in records)
    whole = index[:1] == b"\0" and 12 + blocks + index_size + 12 == size
    return sum(unpacked for _, unpacked in records) if whole else None


def _read_at(file: BinaryIO, place: int, count: int) -> bytes:
    if place < 0:
        return b""
    file.seek(place)
    return file.read(count)


def _read_numbers(data: bytes) -> Iterator[int]:
    """Numbers of 7 bits a byte, the lowest first."""
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield value
            value = shift = 0


def _describe_shards(folder: Path, spec: str) -> PlanText:
    dataset = open_shards(folder)
    tokens = dataset.train
    count = min(len(tokens), SAMPLE_BYTES // 4)
    sample = dataset.tokenizer.decode_bytes(tokens.read(0, count), previous=dataset.tokenizer.bos_id)
    size = len(sample) / max(count, 1)
    return PlanText(
        name=spec,
        bytes=max(1.0, size * len(tokens)),
        hardness=measure_hardness([sample[at : at + _DOCUMENT] for at in range(0, len(sample), _DOCUMENT)]),
        vocab=dataset.tokenizer.vocab_size,
        bytes_per_token=max(size, 0.1),
        digest=dataset.fingerprint,
    )
