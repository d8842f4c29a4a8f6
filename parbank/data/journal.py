"""The progress of a preparation, noted so that the next one continues after a kill or Ctrl-C.

A large text takes minutes to read and to tokenise. The journal lies in the folder that is being built. It holds the list
of documents once all are in the spool, and then, every few seconds, how far the shards have come. A preparation of the
same text with the same settings takes the folder over and goes on from there. The result is the same to the last byte:
hashes that cannot be stored half-way are computed again from the files.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from parbank.config import parse_json
from parbank.data.overlap import Overlap
from parbank.data.shards import ShardInfo
from parbank.data.spool import Document, Spool
from parbank.files import write_json, writing

JOURNAL, DOCUMENTS = "journal.json", "documents.npy"
# Less text than this is not worth continuing: it is read and tokenised again within seconds.
LEAST_BYTES = 256_000_000
_SECONDS = 5.0  # between two notes of the position
_ENTRY = np.dtype([("digest", "u1", 16), ("start", "<i8"), ("size", "<i8"), ("train", "?")])


class Journal:
    """The journal of a preparation. `key` identifies its text and settings."""

    def __init__(self, folder: Path, key: dict[str, Any]) -> None:
        self._folder, self.key = folder, key
        self._state = read_journal(folder) if has_journal(folder, key) else {"key": key}
        self._noted = time.monotonic()

    @property
    def continues(self) -> bool:
        """Whether an earlier preparation has read all documents."""
        return "left_out" in self._state

    def load_documents(self) -> tuple[list[Document], list[Document], dict[str, int]]:
        """Training and validation documents, and how many were left out."""
        table = np.load(self._folder / DOCUMENTS, allow_pickle=False)
        digests = table["digest"].tobytes()
        columns = zip(table["start"].tolist(), table["size"].tolist())
        found = [Document(digests[16 * i : 16 * i + 16], *place) for i, place in enumerate(columns)]
        count = int(np.count_nonzero(table["train"]))
        return found[:count], found[count:], self._state["left_out"]

    def save_documents(
        self, spool: Spool, train: list[Document], val: list[Document], left_out: dict[str, int]
    ) -> None:
        """From here on the preparation can be continued, if it has enough text."""
        if sum(entry.size for entry in train + val) < LEAST_BYTES:
            return
        spool.sync()
        table = np.empty(len(train) + len(val), dtype=_ENTRY)
        table["digest"] = np.frombuffer(b"".join(entry.digest for entry in train + val), np.uint8).reshape(-1, 16)
        table["start"] = [entry.start for entry in train + val]
        table["size"] = [entry.size for entry in train + val]
        table["train"] = np.arange(len(table)) < len(train)
        with writing(self._folder / DOCUMENTS) as file:  # on the disk before the journal, which relies on it
            np.save(file, table, allow_pickle=False)
        self._state |= {"left_out": left_out, "splits": {}}
        write_json(self._folder / JOURNAL, self._state)

    def load_overlap(self) -> Overlap | None:
        """The measured overlap, if the tokenizer is trained too."""
        overlap = self._state.get("overlap")
        return None if overlap is None else Overlap(**overlap)

    def save_overlap(self, overlap: Overlap) -> None:
        """Call it when the tokenizer is written."""
        if self.continues:
            self._state["overlap"] = overlap.to_dict()
            write_json(self._folder / JOURNAL, self._state)

    def position(self, split: str) -> tuple[int, list[ShardInfo], int]:
        """For a split: the documents in its shards, the number of full shards, and the tokens in the unfinished shard."""
        noted = self._state.get("splits", {}).get(split, {"documents": 0, "shards": [], "tokens": 0})
        return noted["documents"], [ShardInfo(**shard) for shard in noted["shards"]], noted["tokens"]

    def is_due(self) -> bool:
        """Whether to note the position again."""
        return self.continues and time.monotonic() - self._noted >= _SECONDS

    def note(self, split: str, documents: int, shards: list[ShardInfo], tokens: int) -> None:
        """Call it when the files are on the disk up to that position."""
        self._noted = time.monotonic()
        here = {"documents": documents, "shards": [asdict(shard) for shard in shards], "tokens": tokens}
        self._state["splits"][split] = here
        write_json(self._folder / JOURNAL, self._state)

    def remove(self) -> None:
        for name in (JOURNAL, DOCUMENTS):
            (self._folder / name).unlink(missing_ok=True)


def read_journal(folder: Path) -> dict[str, Any]:
    """The journal in a folder; empty if there is none."""
    try:
        state = parse_json((folder / JOURNAL).read_bytes())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def has_journal(folder: Path, key: dict[str, Any]) -> bool:
    """Whether the preparation with this key can be continued in a folder."""
    return read_journal(folder).get("key") == key
