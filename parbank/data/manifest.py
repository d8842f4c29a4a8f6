"""manifest.json of a prepared folder, and fetched.json of a fetched one. Both may be damaged or of another program, and both
are compared with the files they list.

Every shard must have the tokens that were written, by their sha256. A hash takes a pass over the file, so a side file
in the cache remembers which file had which hash, by size, times and inode. A second open of an unchanged folder hashes
nothing.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from parbank.data.progress import Say
from parbank.data.shards import HEADER_BYTES, shard_length
from parbank.data.sources.pins import Pins
from parbank.errors import DataError, FileError
from parbank.files import default_cache, write_json

FORMAT = 1  # of manifest.json and of everything that affects the tokens: raised when either changes
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.model"
_WRITTEN = re.compile(rf".+_(train|val)_[0-9]{{6}}\.bin|{re.escape(TOKENIZER)}")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder that parbank prepared. None if there is none, or if it is of another program. A damaged one
    is an error: without it no shard can be checked."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(path, error.strerror or error) from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, "it is not JSON") from error
    if isinstance(manifest, dict) and manifest and not _is_ours(manifest):
        return None
    if not _is_sound(manifest):
        raise _unreadable(path, "a field is missing or of another type")
    return cast(dict[str, Any], manifest)


def _is_ours(manifest: dict[str, Any]) -> bool:
    """Whether parbank wrote a manifest, which may be damaged since."""
    return manifest.get("made_by") == "parbank" or "dropped_duplicates" in manifest


def _unreadable(path: Path, reason: object) -> DataError:
    return DataError(
        f"{path} is damaged ({reason}), and the shards beside it cannot be checked; prepare them again (`parbank data "
        "prepare`), or delete that file if they are to be trusted as they are"
    )


def find_written(folder: Path) -> list[str]:
    """The files of a preparation in a folder: those of its manifest, or, where that is damaged, those with the names that
    a preparation gives."""
    try:
        manifest = read_manifest(folder)
    except DataError:
        names = [path.name for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
        return [*filter(_WRITTEN.fullmatch, names), *(name for name in names if name == MANIFEST)]
    if manifest is None:
        return []
    return [*listed_files(manifest), MANIFEST]


def listed_files(manifest: dict[str, Any]) -> list[str]:
    """The names of the shards and the tokenizer."""
    return [*(shard["name"] for part in ("train", "val") for shard in manifest[part]["shards"]), TOKENIZER]


def verify_folder(folder: Path, manifest: dict[str, Any]) -> None:
    """Refuses a folder whose files are not those of its manifest."""
    again = "prepare it again"
    try:
        tokenizer = hashlib.sha256((folder / TOKENIZER).read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {folder / TOKENIZER}: {error.strerror or error}; {again}") from error
    if tokenizer != manifest["tokenizer"]:
        raise DataError(f"{folder / TOKENIZER} differs from its manifest (by sha256); {again}")
    shards = [shard for part in ("train", "val") for shard in manifest[part]["shards"]]
    for part in ("train", "val"):
        found, listed = len(list(folder.glob(f"*_{part}_*.bin"))), len(manifest[part]["shards"])
        if found != listed:
            raise DataError(f"{folder} holds {found} {part} shards, its manifest lists {listed}; {again}")
    for shard in shards:
        length = shard_length(folder / shard["name"])
        if length != shard["tokens"]:
            raise DataError(f"{folder / shard['name']} holds {length} tokens, {shard['tokens']} were written; {again}")
    for shard, digest in zip(shards, hash_shards([folder / shard["name"] for shard in shards])):
        if digest != shard["sha256"]:
            raise DataError(f"{folder / shard['name']} differs from its manifest (by sha256); {again}")


def describe_input(path: Path) -> dict[str, Any]:
    """A file of text, as a manifest names it."""
    try:
        stat = path.stat()
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    return {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": digest}


def same_inputs(known: list[dict[str, Any]], files: Sequence[Path]) -> bool:
    """Whether the files are those of a manifest. Trusts equal size and time. A file with another time is read again, since
    a copy or a checkout changes only the time."""
    if [entry["path"] for entry in known] != [str(path) for path in files]:
        return False
    for entry in known:
        stat = os.stat(entry["path"])
        if stat.st_size != entry["size"]:
            return False
        if stat.st_mtime_ns != entry["mtime_ns"] and describe_input(Path(entry["path"]))["sha256"] != entry["sha256"]:
            return False
    return True


def verify_fetched(folder: Path, pins: Pins) -> None:
    """Refuses a folder of fetched data whose files are not those of the fetch."""
    again = f"fetch it again (`parbank data fetch fineweb --out {folder}`)"
    found = sorted(path.name for pattern in ("*.bin", "*.model") for path in folder.glob(pattern))
    for name in found:
        if name not in pins.files:
            raise DataError(f"{folder / name} was not fetched: {pins.path} does not name it; move it away, or {again}")
    missing = [name for name in pins.files if "_val_" in name and name not in found]
    if missing:  # training shards may be left out: less is trained on, and the same is scored
        raise DataError(f"{folder / missing[0]} is missing, and {pins.path} names it; {again}")
    for name, digest in zip(found, hash_shards([folder / name for name in found], whole=True)):
        if digest != pins.files[name]:
            raise DataError(f"{folder / name} is not the file that was fetched (by the sha256 in {pins.path}); {again}")


def hash_shards(paths: Sequence[Path], *, whole: bool = False) -> list[str]:
    """sha256 of the tokens of each shard of a folder, or of each whole file, from the side file where it is unchanged."""
    folder = paths[0].parent.resolve()
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:24] + ("-whole" if whole else "")
    side = default_cache() / "verified" / f"{name}.json"
    try:
        known = json.loads(side.read_bytes())
        known = known if isinstance(known, dict) else {}
    except (OSError, ValueError, RecursionError):
        known = {}
    states = [_state(path) for path in paths]
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda path, state: _known_digest(known, state) or _hash(path, whole), paths, states))
    fresh = dict(zip(states, digests))
    if any(known.get(state) != digest for state, digest in fresh.items()):
        with suppress(FileError):  # a cache that cannot be written costs time on the next open, nothing else
            write_json(side, fresh)
    return digests


def _known_digest(known: dict[str, Any], state: str) -> str | None:
    digest = known.get(state)
    return digest if isinstance(digest, str) else None


def _state(path: Path) -> str:
    """Values that change when a file is written or replaced. No program can set the ctime back."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise DataError(f"cannot read the shard {path}: {error.strerror or error}") from error
    return f"{path.name} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"


def _hash(path: Path, whole: bool) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(0 if whole else HEADER_BYTES)
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read the shard {path}: {error.strerror or error}") from error


def _is_sound(manifest: Any) -> bool:
    """Whether a manifest has the fields that are read, with names that stay inside its folder."""
    try:
        if manifest["made_by"] != "parbank" or not isinstance(manifest["tokenizer"], str):
            return False
        shards = [shard for part in ("train", "val") for shard in manifest[part]["shards"]]
        return (
            isinstance(manifest["spec"], str)
            and all(isinstance(entry[key], str) for entry in manifest["inputs"] for key in ("path", "sha256"))
            and all(type(entry[key]) is int for entry in manifest["inputs"] for key in ("size", "mtime_ns"))
            and all(manifest[part]["shards"] for part in ("train", "val"))
            and all(_is_plain(shard["name"]) and type(shard["tokens"]) is int for shard in shards)
            and all(isinstance(shard["sha256"], str) for shard in shards)
        )
    except (KeyError, TypeError):
        return False


def _is_plain(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".bin") and "\0" not in name and Path(name).name == name


def count_skipped(manifest: dict[str, Any]) -> int:
    """The bad files and lines that were left out when the text was prepared; 0 if the manifest does not say."""
    count = manifest.get("skipped_bad")
    return count if isinstance(count, int) else 0


def report_skipped(manifest: dict[str, Any], say: Say) -> None:
    """Says, when prepared text is used again, how much of its source was left out."""
    if count := count_skipped(manifest):
        say(f"skipped bad files and lines: {count:,}, when the text was prepared")
