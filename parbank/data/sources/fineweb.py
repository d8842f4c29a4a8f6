"""`fineweb`: the published FineWeb shards with 1024 tokens (Penedo et al. 2024; parameter-golf), fetched once, file by
file, into one folder.

They come from the Hugging Face hub, through the optional package huggingface_hub, or from a local folder with the
repository's layout: a mirror, a shared disk, or a test.

The first fetch into a folder resolves the branch to a commit. `fetched.json` (pins.py) keeps that commit and the sha256 of
every file, so that later fetches get the same data or an error. Files from the hub must also have the hash that the hub
gives for them.
"""

import hashlib
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from parbank.data.progress import Meter, Say, say_on_stderr
from parbank.data.sources.pins import Pins, hash_file
from parbank.data.sources.source import Source
from parbank.errors import ConfigError, DataError
from parbank.files import locked, move_into_place

# The public parameter-golf data set, and where in it the 1024-token export lies.
REPOSITORY = "willdepueoai/parameter-golf"
SHARDS_AT = "datasets/datasets/fineweb10B_sp1024"
TOKENIZER_AT = "datasets/tokenizers/fineweb_1024_bpe.model"
BRANCH = "main"  # resolved to a commit at the first fetch
_HALF_WAY = ".fetching"
_LOCK = ".fetch.lock"
_COPY_BYTES = 16 << 20


class _Source(Protocol):
    """A source of files."""

    name: str

    def resolve(self, revision: str) -> str:
        """The commit of a revision, or of the branch, which the other methods then use; empty if there are no commits."""

    def files(self) -> list[str]: ...

    def fault(self, file: str, path: Path) -> str:
        """A phrase if a file differs from the source's, by its hash; empty if not."""

    def fetch(self, file: str, place: Path, say: Say) -> Path:
        """Fetches one file to a path under `place` and returns the path. Resumes an interrupted download."""


def fetch_fineweb(
    out: Path, *, shards: int = 1, source: str | Path = REPOSITORY, revision: str = "", say: Say = say_on_stderr
) -> list[Path]:
    """`data fetch fineweb`: the tokenizer, all validation shards and the first `shards` training shards, into `out`.

    Valid files are skipped; interrupted downloads resume. `source` is a folder, or the name of a repository on the
    hub. `revision` is a commit of it; by default the commit that the folder was fetched from, or the newest for a new
    folder. A second process waits for the first.
    """
    out = Path(out)
    if shards < 1:
        raise DataError(f"{shards} shards cannot be fetched; ask for 1 or more")
    origin, is_new = _open_source(source), not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with locked(out / _LOCK, out, wait=say):
            pins = Pins.read(out)
            commit = origin.resolve(pins.agree(origin.name, revision))
            wanted = _choose(origin, shards)
            _refuse_foreign(origin, wanted, out, pins)
            pins.start(origin.name, commit)
            fetched = [_fetch_file(origin, file, out, pins, say) for file in wanted]
            shutil.rmtree(out / _HALF_WAY, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"cannot write to {out}: {error.strerror or error}; choose another folder, or free some space"
        ) from error
    finally:
        if is_new:
            with suppress(OSError):  # a folder that was made for nothing is empty
                out.rmdir()
    return fetched


def fineweb_folder(cache: Path) -> Path:
    """The folder that `data fetch fineweb` writes and the spec `fineweb` reads."""
    return Path(cache) / "fineweb"


@dataclass(frozen=True)
class FinewebRequest:
    shards: int | None
    """The least number of training shards; None takes the existing ones, or fetches one."""

    @property
    def spec(self) -> str:
        return "fineweb" if self.shards is None else f"fineweb:{self.shards}"

    def open(self, cache: Path, say: Say = say_on_stderr, *, source: str | Path = REPOSITORY) -> Path:
        """The folder in the cache, fetched when it is not there."""
        folder = fineweb_folder(cache)
        have = len(list(folder.glob("*_train_*.bin")))
        known = Pins.read(folder)
        whole = not known.source or all(path.name in known.files for path in folder.glob("*.bin"))
        parts = any(folder.glob("*.model")) and any(folder.glob("*_val_*.bin"))
        complete = parts and whole and not (folder / _HALF_WAY).exists()
        needed = max(1, have) if self.shards is None else self.shards
        if not complete or have < needed:
            fetch_fineweb(folder, shards=needed, source=source, say=say)
        return folder


def parse(rest: str) -> FinewebRequest:
    if rest and not (rest.isdecimal() and int(rest) >= 1):
        raise ConfigError(
            f"fineweb:{rest} is not understood; write fineweb, or fineweb:N for at least N training shards"
        )
    return FinewebRequest(int(rest) if rest else None)


def _choose(origin: _Source, shards: int) -> list[str]:
    """The tokenizer first: the shards are checked against it."""
    files = sorted(origin.files())
    train = [file for file in files if file.startswith(f"{SHARDS_AT}/fineweb_train_")]
    val = [file for file in files if file.startswith(f"{SHARDS_AT}/fineweb_val_")]
    if TOKENIZER_AT not in files or not val:
        raise DataError(
            f"{origin.name} does not hold {TOKENIZER_AT} and {SHARDS_AT}/fineweb_val_*.bin; give another source"
        )
    if len(train) < shards:
        raise DataError(f"{origin.name} has {len(train)} training shards, {shards} were asked for")
    return [TOKENIZER_AT, *val, *train[:shards]]


def _refuse_foreign(origin: _Source, wanted: list[str], out: Path, pins: Pins) -> None:
    """Refuses files that lie where fetched files would go, and are not among them: nothing of the user's is overwritten, or
    taken for the data set."""
    if not pins.source and os.path.lexists(out / _HALF_WAY):
        raise DataError(f"{out / _HALF_WAY} exists, and would be deleted; move it away, or choose another folder")
    for file in wanted:
        target = out / Path(file).name
        if target.name not in pins.files and os.path.lexists(target):
            fault = origin.fault(file, target) if target.is_file() else "it is no file"
            if fault:
                raise DataError(
                    f"{target} exists and is not the file of {origin.name} ({fault}); it stays as it is: move it away, or choose "
                    "another folder"
                )


def _fetch_file(origin: _Source, file: str, out: Path, pins: Pins, say: Say) -> Path:
    target = out / Path(file).name
    if target.exists() and (_fault(target, out) or pins.check(target, target.name)) is None:
        if target.name not in pins.files:  # the same file, from elsewhere or before hashes were kept
            pins.add(target)
        return target
    arrived = origin.fetch(file, out / _HALF_WAY, say)
    fault = origin.fault(file, arrived) or _fault(arrived, out)
    if fault:
        arrived.unlink()
        raise DataError(
            f"{file} from {origin.name} arrived damaged and was deleted; run the same command again. ({fault})"
        )
    if changed := pins.check(arrived, target.name):
        arrived.unlink()
        raise DataError(f"{origin.name} has changed: {changed}; give the source it came from, or use another folder")
    move_into_place(arrived, target)
    pins.add(target)
    return target


def _fault(path: Path, out: Path) -> DataError | None:
    """The fault of a file that has arrived, or nothing."""
    from parbank.data.shards import read_shard
    from parbank.data.tokenizer import Tokenizer

    try:
        if path.suffix == ".model":
            Tokenizer.load(path)
        else:
            read_shard(path, vocab_size=Tokenizer.load(out / Path(TOKENIZER_AT).name).vocab_size)
    except DataError as error:
        return error
    return None


class _Folder:
    """A local folder laid out like the repository."""

    def __init__(self, root: Path) -> None:
        self.name, self._root = str(root.resolve()), root

    def resolve(self, revision: str) -> str:
        if revision:
            raise DataError(f"{self.name} is a folder and has no revision {revision}; leave --revision out")
        return ""

    def fault(self, file: str, path: Path) -> str:
        found, promised = hash_file(path), hash_file(self._root / file)
        return "" if found == promised else f"its sha256 is {found}, the folder's file has {promised}"

    def files(self) -> list[str]:
        return [path.relative_to(self._root).as_posix() for path in self._root.rglob("*") if path.is_file()]

    def fetch(self, file: str, place: Path, say: Say) -> Path:
        target = place / Path(file).name
        place.mkdir(exist_ok=True)
        size = (self._root / file).stat().st_size
        with (
            open(self._root / file, "rb") as source,
            open(target, "wb") as copy,
            Meter(f"fetching {target.name}", say, total=size) as meter,
        ):
            while block := source.read(_COPY_BYTES):
                copy.write(block)
                meter.advance(len(block))
        return target


class _Hub:
    """A data set on the Hugging Face hub. The client shows its own progress and takes up broken downloads."""

    def __init__(self, repository: str) -> None:
        self.name = repository
        try:
            import huggingface_hub
        except ImportError:
            raise DataError(
                "fetching FineWeb needs the package huggingface_hub; install it with pip install 'parbank[fineweb]'"
            ) from None
        self._api: Any = huggingface_hub.HfApi()
        self._revision = BRANCH

    def resolve(self, revision: str) -> str:
        try:
            self._revision = str(self._api.dataset_info(self.name, revision=revision or BRANCH).sha)
        except Exception as error:  # the client raises errors of three libraries, by version
            raise self._explain(f"revision {revision or BRANCH}", error) from error
        return self._revision

    def files(self) -> list[str]:
        try:
            return list(self._api.list_repo_files(self.name, repo_type="dataset", revision=self._revision))
        except Exception as error:  # as above
            raise self._explain("its list of files", error) from error

    def fault(self, file: str, path: Path) -> str:
        try:
            about = self._api.get_paths_info(self.name, [file], repo_type="dataset", revision=self._revision)[0]
        except Exception as error:  # as above
            raise self._explain(f"the hash of {file}", error) from error
        if about.lfs is not None:
            found, promised = hash_file(path), about.lfs.sha256
        else:  # a small file, which git itself holds
            data = path.read_bytes()
            found = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
            promised = about.blob_id
        return "" if found == promised else f"its hash is {found}, the hub has {promised}"

    def fetch(self, file: str, place: Path, say: Say) -> Path:
        say(f"fetching {Path(file).name} from {self.name}")
        try:
            where = {"repo_type": "dataset", "revision": self._revision, "local_dir": str(place)}
            return Path(self._api.hf_hub_download(self.name, file, **where))
        except Exception as error:  # as above
            raise self._explain(file, error) from error

    def _explain(self, what: str, error: Exception) -> DataError:
        return DataError(
            f"cannot fetch {what} from the data set {self.name} on the hub: {type(error).__name__}: {error}; check the network "
            "and the name, then run the same command again: it continues where it stopped"
        )


def _open_source(source: str | Path) -> _Source:
    if Path(source).is_dir():
        return _Folder(Path(source))
    if isinstance(source, Path) or str(source).startswith((".", "/", "~")):
        raise DataError(
            f"{source} is not a folder; give a folder laid out like the data set {REPOSITORY}, or its name on the hub"
        )
    return _Hub(source)


SOURCE = Source(
    name="fineweb",
    form="fineweb or fineweb:N",
    help="the published FineWeb shards, fetched when they are not here; at least N training shards of 100 million tokens",
    parse=parse,
    tokens=True,
    public=True,
    package="huggingface_hub",
)
