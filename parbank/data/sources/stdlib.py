"""`stdlib`: the standard library of the running Python, text that every machine has."""

import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from parbank.data.progress import Say
from parbank.data.sources.source import Corpus, Source
from parbank.errors import ConfigError, DataError

_OUTSIDE = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class StdlibRequest:
    spec: str = "stdlib"

    def open(self, cache: Path, say: Say) -> Corpus:
        """The library's sources, tests included, without installed packages."""
        root = Path(sysconfig.get_paths()["stdlib"])
        files = list(_find_sources(root))
        if not files:
            raise DataError(f"no standard library sources under {root}; use text:PATH with text of your own")
        spec = f"stdlib:{platform.python_version()}:{root}"
        return Corpus(name="stdlib", spec=spec, train=tuple(sorted(files)), read=_read)


def parse(rest: str) -> StdlibRequest:
    if rest:
        raise ConfigError(f"stdlib takes nothing after it, got {rest!r}; write --data stdlib")
    return StdlibRequest()


def _find_sources(root: Path) -> Iterator[Path]:
    """Does not look into the folders that it leaves out: installed packages may be ten times as many files."""
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _OUTSIDE]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _read(path: Path) -> Iterator[bytes]:
    """Help topics are documents too. Empty files, and the few tests that are deliberately not UTF-8, are left out."""
    if path.parts[-2:] == ("pydoc_data", "topics.py"):
        from pydoc_data.topics import topics

        yield from (text.encode("utf-8") for text in topics.values())
        return
    try:
        document = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        document.decode("utf-8")
    except UnicodeDecodeError:
        return
    if document:
        yield document


SOURCE = Source(name="stdlib", form="stdlib", help="the running Python's library", parse=parse, public=True)
