"""The folder that a preparation builds: under another name, renamed when it is complete.

A killed preparation leaves nothing that looks valid, and the next one on the same machine continues or deletes what it
left. A folder with files of the user is never replaced.
"""

import errno
import glob
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from parbank.data.journal import has_journal
from parbank.data.manifest import find_written
from parbank.data.progress import Say
from parbank.errors import DataError, FileError
from parbank.files import exchange, is_running, locked, sync_folder

_OLD = "-old"  # ends the name of a folder that is about to be replaced


@contextmanager
def hold_folder(folder: Path, wait: Say | None) -> Iterator[None]:
    """Locks a folder of data by a file beside it, since preparation replaces the folder itself."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(_lock(folder), folder, wait=wait):
            yield
    except OSError as error:
        raise DataError(
            f"cannot write to {folder}: {error.strerror or error}; choose another folder (--out, or PARBANK_CACHE for the "
            "cache), or free some space"
        ) from error


def _lock(folder: Path) -> Path:
    folder = folder.absolute()  # "." has no name
    return folder.with_name(f".{folder.name}.lock")


def clear_up(folder: Path) -> None:
    """Deletes leftovers of a preparation that was killed after its work: its lock, and the folder it replaced."""
    if _lock(folder).exists():
        with suppress(OSError, FileError), locked(_lock(folder), folder):  # else its holder clears up
            _sweep(folder, folder)


@contextmanager
def build_folder(folder: Path, key: dict[str, Any], say: Say) -> Iterator[Path]:
    """A temporary folder that replaces `folder` if the block succeeds, and is deleted otherwise. After an interruption it
    stays if the next preparation with this key can continue in it."""
    building = folder.with_name(f"{_mark(folder)}{os.getpid()}-{uuid.uuid4().hex[:8]}")
    kept = False
    try:
        if not _take_over(folder, building, key):
            building.mkdir()
        _sweep(folder, building)
        yield building
        _take_place(building, folder)
    except (KeyboardInterrupt, SystemExit):
        kept = has_journal(building, key)
        if kept:
            say(f"interrupted; the same command continues with what is in {building}")
        raise
    finally:
        if not kept:
            shutil.rmtree(building, ignore_errors=True)


def _mark(folder: Path) -> str:
    """The prefix of the names of the temporary folders that this machine builds for a folder."""
    return f".{folder.name}.preparing-{socket.gethostname()}-"


def _find_left(folder: Path) -> list[Path]:
    """The temporary folders whose process has ended, on this machine. This process builds one at a time."""
    mark, found = _mark(folder), []
    for building in sorted(folder.parent.glob(f"{glob.escape(mark)}*")):
        pid = building.name.removeprefix(mark).split("-")[0]
        if pid.isdecimal() and (int(pid) == os.getpid() or not is_running(int(pid))):
            found.append(building)
    return found


def _take_over(folder: Path, building: Path, key: dict[str, Any]) -> bool:
    """Renames the folder of an interrupted preparation to `building`, if there is one to continue."""
    for left in _find_left(folder):
        if has_journal(left, key):
            os.rename(left, building)
            return True
    return False


def _take_place(building: Path, folder: Path) -> None:
    """Renames over an existing folder. The two swap names; where the system cannot do that, the old folder is moved away
    first."""
    try:
        os.rename(building, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        old = building.with_name(f"{building.name}{_OLD}")
        if exchange(building, folder):
            with suppress(OSError):  # the new folder is in place
                os.rename(building, old)
        else:
            os.rename(folder, old)
            try:
                os.rename(building, folder)
            except BaseException:
                os.rename(old, folder)
                raise
        _remove_prepared(old)
    sync_folder(folder.parent)


def _remove_prepared(folder: Path) -> None:
    """Deletes the files of preparation, then the folder if it is empty."""
    for name in find_written(folder):  # the manifest last, so that a kill in between leaves it readable
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _sweep(folder: Path, own: Path) -> None:
    """Deletes temporary folders of killed preparations on this machine.

    An old folder that was moved away comes back if the new one had not taken its place.
    """
    for left in _find_left(folder):
        if left == own:
            continue
        if not left.name.endswith(_OLD):
            shutil.rmtree(left, ignore_errors=True)
        elif folder.exists():
            _remove_prepared(left)
        else:
            os.rename(left, folder)


def check_folder(folder: Path) -> None:
    """Only an empty folder or an earlier result may be replaced, never a user's files."""
    if folder.is_symlink():
        raise DataError(
            f"{folder} is a symbolic link, and a new folder would take its place; name the folder it points to ({folder.resolve()})"
        )
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; choose a folder for the shards")
    if not folder.is_dir():
        return
    if Path.cwd().is_relative_to(folder.resolve()):
        raise DataError(f"{folder} is or holds the current folder, and would be replaced; choose a folder inside it")
    ours = {path for name in find_written(folder) if (path := folder / name).is_file() and not path.is_symlink()}
    foreign = sorted(path.name for path in set(folder.iterdir()) - ours)
    if foreign:
        some = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
        raise DataError(
            f"{folder} holds other files ({some}) and would be replaced; move them away, or choose a new or empty folder"
        )
