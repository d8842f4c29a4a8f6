"""Local files by path, folder or glob: the common part of the sources `text:` and `parquet:`.

    PATH[,PATH...]                  about 2% of the documents are held out for validation
    train=PATH[,PATH...],val=PATH   the same, saying which is which (`train=` or `val=` holds until the next one)
    glob=PATTERN                    of a folder, only files whose name matches; given again, it adds a pattern
    field=NAME                      where a file has fields, the one that holds the text
    skip-bad=yes                    bad files and lines are left out and counted
    holdout=dev                     validation is one in 64 of the training documents, and the usual one is left out

Commas separate the parts. Reach a path that has a comma through its folder or a glob.
"""

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from parbank.data.progress import Say
from parbank.data.sources.source import Corpus
from parbank.data.sources.unpack import plain_name
from parbank.errors import ConfigError, DataError

OPTIONS = ("glob", "field", "skip-bad", "holdout")
FIELD = "text"  # the usual name in public data sets

# Files that parbank wrote are left out: a run inside the folder that it trains on must not change its data.
# The last one is a study, whose runs keep no config.
_OWN_FOLDERS = ({"config.json", "metrics.jsonl"}, {"manifest.json", "tokenizer.model"}, {"study.json", "results"})

Read = Callable[[Path, str], Iterator[bytes | DataError]]
"""The documents of one file, given the name of the field."""
PassOver = Callable[[Path], str]
"""Why a file of a folder holds no text, such as "binary", or nothing where it does. A damaged file is a DataError."""


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """The parts in which sources of files differ."""

    name: str
    files: str
    """A name for its files, for messages."""
    globs: tuple[str, ...]
    """The files of a folder that it takes if no glob is given."""
    read: Read
    fielded: Callable[[Path], bool]
    """Whether a file has fields."""
    pass_over: PassOver = field(default=lambda path: "")
    earlier_globs: tuple[str, ...] = ()
    """The files of a folder that it took before a spec could say `glob=`: runs from then keep their text."""


@dataclass(frozen=True, kw_only=True)
class FileRequest:
    """Patterns of files, as given in a spec."""

    kind: FileKind
    train: tuple[str, ...]
    val: tuple[str, ...]
    globs: tuple[str, ...]
    field: str
    skip_bad: bool
    holdout: str = ""

    @property
    def spec(self) -> str:
        return self._spell(self.globs)

    def open(self, cache: Path, say: Say) -> Corpus:
        """Finds the files. Their order does not depend on the file system."""
        found = _FileSearch(self)
        train, val = found.find_all(self.train), found.find_all(self.val)
        both = sorted(set(train) & set(val))
        if both:
            raise DataError(f"{both[0]} is in both train= and val=; a file can only be one of them")
        for asked, files in ((self.train, train), (self.val, val)):
            if asked and not files:
                raise DataError(f"no file of {', '.join(asked)} can be read; check their permissions")
        if self.field != FIELD and not any(map(self.kind.fielded, train + val)):
            raise DataError(f"no file of {self.spec} has fields, so field={self.field} picks nothing; leave it out")
        if self.globs not in (self.kind.globs, self.kind.earlier_globs) and not found.folders:
            raise DataError(
                f"no path of {self.spec} is a folder, so glob={self.globs[0]} picks nothing; leave it out, or give the folder"
            )
        found.report(say)
        return Corpus(
            name=self.kind.name,
            spec=self._spell(() if self.globs in (self.kind.globs, self.kind.earlier_globs) else self.globs),
            train=train,
            val=val,
            read=lambda path: self.kind.read(path, self.field),
            skip_bad=self.skip_bad,
            holdout=self.holdout,
        )

    def _spell(self, globs: tuple[str, ...]) -> str:
        parts = [f"{name}={','.join(paths)}" for name, paths in (("train", self.train), ("val", self.val)) if paths]
        parts += [f"glob={pattern}" for pattern in globs]
        parts += [f"field={self.field}"] if self.field != FIELD else []
        parts += ["skip-bad=yes"] if self.skip_bad else []
        parts += [f"holdout={self.holdout}"] if self.holdout else []
        return f"{self.kind.name}:{','.join(parts)}"


def parse_items(kind: FileKind, items: Iterable[str]) -> FileRequest:
    """Each item is a path, `train=` or `val=` before it or not, or an option."""
    split = "train"
    chosen: dict[str, list[str]] = {name: [] for name in ("train", "val", *OPTIONS)}
    for item in items:
        head, sign, tail = item.partition("=")
        name = head.strip() if sign else ""
        value = (tail if name in chosen else item).strip()
        if not value:
            given = f"{name}= without a value" if name else "an empty path"
            raise ConfigError(f"{given} in {kind.name}:; write {kind.name}:PATH or {kind.name}:train=PATH,val=PATH")
        if name in OPTIONS:
            chosen[name].append(value)
        else:
            split = name if name in chosen else split
            chosen[split].append(os.path.abspath(os.path.expanduser(value)))
    if not chosen["train"] + chosen["val"]:
        raise ConfigError(f"{kind.name}: names no path; write {kind.name}:PATH, with {kind.files}, folders or globs")
    return FileRequest(
        kind=kind,
        train=tuple(chosen["train"]),
        val=tuple(chosen["val"]),
        globs=tuple(chosen["glob"]) or kind.globs,
        field=_one(chosen, "field") or FIELD,
        skip_bad={"": False, "no": False, "yes": True}[_one(chosen, "skip-bad", ("yes", "no"))],
        holdout=_one(chosen, "holdout", ("dev",)),
    )


def _one(chosen: dict[str, list[str]], name: str, allowed: tuple[str, ...] = ()) -> str:
    """The value of an option that may be given once."""
    values = chosen[name]
    if len(values) > 1:
        raise ConfigError(f"{name}= is given {len(values)} times: {', '.join(values)}; give it once")
    if values and allowed and values[0] not in allowed:
        raise ConfigError(f"{name} is {' or '.join(allowed)}, got {values[0]!r}")
    return values[0] if values else ""


class _FileSearch:
    """Finds the files of a request, and counts the files it leaves out."""

    def __init__(self, request: FileRequest) -> None:
        self._request = request
        self._passed_over: dict[str, list[str]] = {}
        self.folders = 0
        """Folders that were searched."""

    def find_all(self, patterns: Iterable[str]) -> tuple[Path, ...]:
        return tuple(sorted({path for pattern in patterns for path in self._find(pattern)}))

    def report(self, say: Say) -> None:
        kinds = [f"{len(paths):,} {reason}, such as {min(paths)}" for reason, paths in self._passed_over.items()]
        if kinds:
            say(f"passed over: {'; '.join(kinds)}")

    def _find(self, pattern: str) -> list[Path]:
        matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        if not matches:
            what = "matches nothing" if glob.has_magic(pattern) else "does not exist"
            raise DataError(f"{pattern} {what}; give {self._request.kind.files}, folders or globs")
        return [file for match in matches for file in self._take(Path(match))]

    def _take(self, path: Path) -> list[Path]:
        """A file that was asked for is taken as it is; of a folder, its files that hold text."""
        if path.is_dir():
            self.folders += 1
            return self._search(path)
        if not path.is_file():
            raise DataError(f"{path} is a pipe, a device or a broken link; give a file")
        return [path] if self._is_readable(path) else []

    def _search(self, folder: Path) -> list[Path]:
        """The files under a folder that match a glob and hold text; hidden files and folders are left alone."""
        there, matching = 0, []
        for place, folders, names in os.walk(folder, onerror=self._refuse_folder):
            if place != str(folder) and any(own <= {*names, *folders} for own in _OWN_FOLDERS):
                folders[:] = []
                self._pass_over("folders of runs, studies or shards", place)
                continue
            folders[:] = [name for name in folders if not name.startswith(".")]
            for link in filter(os.path.islink, (os.path.join(place, name) for name in folders)):
                self._pass_over("links to folders", link)  # os.walk does not follow them, since they may form a circle
            paths = [Path(place, name) for name in names if not name.startswith(".")]
            there += len(paths)
            matching += [path for path in paths if self._matches(path.relative_to(folder))]
        found = [path for path in matching if self._holds_text(path)]
        if not found:
            looked = f"of {there:,} files there, {len(matching):,} match {' '.join(self._request.globs)}"
            raise DataError(f"the folder {folder} holds no text: {looked}; give another folder or --glob")
        return found

    def _matches(self, path: Path) -> bool:
        """A pattern with a / is for the path under the folder, one without for the name alone. Case does not matter, and
        a packed file goes by its plain name as well."""
        whole = path.as_posix().lower()
        for pattern in map(str.lower, self._request.globs):
            name = whole if "/" in pattern else path.name.lower()
            if fnmatchcase(name, pattern) or fnmatchcase(plain_name(name), pattern):
                return True
        return False

    def _holds_text(self, path: Path) -> bool:
        kind = self._request.kind
        if not path.is_file():
            return self._pass_over("broken links or special files", path)
        if not self._is_readable(path):
            return False
        if self._request.globs == kind.earlier_globs:  # these were taken by their suffix, without a look into them
            return True
        try:
            reason = kind.pass_over(path)
        except DataError:
            if not self._request.skip_bad:
                raise
            reason = ""  # reading it will skip it
        return self._pass_over(reason, path) if reason else True

    def _is_readable(self, path: Path) -> bool:
        """Whether a file can be read, where bad files are skipped. Preparation takes a hash of every file."""
        if not self._request.skip_bad:
            return True
        try:
            with open(path, "rb") as file:
                file.read(1)
            return True
        except OSError as error:
            return self._pass_over("unreadable", f"{path} ({error.strerror or error})")

    def _refuse_folder(self, error: OSError) -> None:
        if not self._request.skip_bad:
            raise DataError(
                f"cannot read the folder {error.filename}: {error.strerror or error}; leave it out, or skip it by --skip-bad"
            )
        self._pass_over("unreadable", f"{error.filename} ({error.strerror or error})")

    def _pass_over(self, reason: str, path: Path | str) -> bool:
        self._passed_over.setdefault(reason, []).append(str(path))
        return False
