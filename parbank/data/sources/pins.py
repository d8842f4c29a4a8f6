"""`fetched.json` beside fetched data: the revision it came from, and the sha256 of every file.

The first fetch into a folder writes it. Later ones take the same revision, and a file that differs is refused.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parbank.errors import DataError
from parbank.files import write_json

PINS = "fetched.json"


@dataclass
class Pins:
    """The record of one folder."""

    path: Path
    source: str = ""
    """The repository that the files came from; empty before the first fetch."""
    revision: str = ""
    """Its commit; empty for a local folder."""
    files: dict[str, str] = field(default_factory=dict)
    """sha256 by name."""

    @classmethod
    def read(cls, folder: Path) -> "Pins":
        path = folder / PINS
        try:
            found = json.loads(path.read_bytes())
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError, RecursionError) as error:
            raise _unreadable(path, error) from error
        if not _is_sound(found):
            raise _unreadable(path, "a field is missing or of another type")
        return cls(path, found["source"], found["revision"], found["files"])

    def agree(self, source: str, revision: str) -> str:
        """The revision to fetch: the recorded one, which must be `revision` where that is given. Of another source, such as
        a mirror, only the files are compared."""
        if self.source != source:
            return revision
        if revision not in ("", self.revision):
            raise DataError(
                f"{self.path.parent} holds files of {source} at revision {self.revision}, and {revision} was asked for; fetch it "
                "into another folder"
            )
        return self.revision

    def start(self, source: str, revision: str) -> None:
        """Records where the files come from, at the first fetch."""
        if not self.source:
            self.source, self.revision = source, revision
            self._write()

    def check(self, file: Path, name: str) -> DataError | None:
        """The error for a file that differs from the file fetched before; None if it is equal or the first."""
        found, known = hash_file(file), self.files.get(name)
        if known in (None, found):
            return None
        return DataError(
            f"{name} is not the file that was fetched before: its sha256 is {found}, {self.path} has {known}"
        )

    def add(self, file: Path) -> None:
        self.files[file.name] = hash_file(file)
        self._write()

    def _write(self) -> None:
        write_json(self.path, {"source": self.source, "revision": self.revision, "files": self.files})


def hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_sound(found: Any) -> bool:
    try:
        texts = [found["source"], found["revision"], *found["files"].keys(), *found["files"].values()]
    except (KeyError, TypeError, AttributeError):
        return False
    return all(isinstance(text, str) for text in texts)


def _unreadable(path: Path, reason: object) -> DataError:
    return DataError(
        f"{path} cannot be read ({reason}); delete it if the files beside it are to be trusted as they are"
    )
