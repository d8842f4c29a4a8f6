"""A score as a fact: the text is compressed, decompressed and compared, and the size of the file is the score."""

import hashlib
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from parbank.artifact.load import LoadedModel
from parbank.data.shards import TokenSet
from parbank.errors import ParbankError
from parbank.eval.compressor.archive import make_header, read_content, share_of
from parbank.eval.compressor.blocks import BlockWriter, Tally
from parbank.eval.compressor.container import read_header, write_end, write_header
from parbank.eval.score import Progress, silent

NAME = "text"


def prove(
    loaded: LoadedModel,
    tokens: TokenSet,
    *,
    segments: int | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """The score and the size of the file, once the file was read back. A text that comes back different is an error."""
    everything = tokens.read(0, len(tokens))
    before = np.concatenate([[loaded.tokenizer.bos_id], everything[:-1]])
    size = int(loaded.tokenizer.count_bytes(everything, before).sum())
    with tempfile.TemporaryDirectory(prefix="parbank-") as folder:
        path, began = Path(folder) / "proof.pbz", time.perf_counter()
        digest, tally = _write(path, loaded, everything, size, segments, lambda share: progress(share / 2))
        written, again = path.stat().st_size, time.perf_counter()
        found = _read(path, loaded, lambda share: progress((1 + share) / 2))
        ended = time.perf_counter()
    if found != digest:
        raise ParbankError("the compressed text came back different; the score is not proved: report it")
    return {
        "identical": True,
        "file_bytes": written,
        "file_bpb": 8 * written / size,
        "score_bpb": tally.bits / size,
        "coded_bytes": tally.coded,
        "above_score": 8 * tally.coded / tally.bits - 1,
        "segments": max(tally.lanes),
        "compress_seconds": again - began,
        "decompress_seconds": ended - again,
    }


def _write(
    path: Path,
    loaded: LoadedModel,
    tokens: np.ndarray,
    size: int,
    segments: int | None,
    progress: Progress,
) -> tuple[str, Tally]:
    """Writes the file; returns the hash of the text and what was written."""
    starts = np.flatnonzero(tokens == loaded.tokenizer.bos_id)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        write_header(file, make_header(loaded, [(NAME, size)]))
        writer = BlockWriter(file, loaded, segments, share_of(size, progress), always_model=True)
        for document in np.split(tokens, starts[starts > 0]):
            data = loaded.tokenizer.decode_bytes(document)
            digest.update(data)
            writer.add_tokens(document, data)
        writer.flush()
        write_end(file)
    return digest.hexdigest(), writer.tally


def _read(path: Path, loaded: LoadedModel, progress: Progress) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        header = read_header(file, str(path))
        for data in read_content(file, header, loaded, str(path), progress=progress):
            digest.update(data)
    return digest.hexdigest()
