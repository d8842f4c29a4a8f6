"""Atomic file writes, locks on folders, and the cache folder for everything that can be rebuilt."""

import errno
import fcntl
import glob
import json
import os
import secrets
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from parbank.errors import FileError

HOLDER = ".run.json"
"""The file in the folder of a run that names the process training there."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux: fcntl.h, fs.h
_LONGEST = 200  # bytes of a file's name in that of its temporary file, which adds 18; file systems allow 255


def default_cache() -> Path:
    """Where prepared text and compiled kernels are kept: $PARBANK_CACHE, else ~/.cache/parbank."""
    if chosen := os.environ.get("PARBANK_CACHE"):
        return Path(chosen)
    try:
        return Path.home() / ".cache" / "parbank"
    except RuntimeError:  # HOME is not set, and the system does not know this user, as in some containers
        raise FileError("this user has no home folder for the cache; set PARBANK_CACHE to a folder") from None


def write_file(path: str | Path, data: bytes) -> int:
    """Writes `data` to `path` atomically and returns its size.

    A reader sees the old file or the whole new one, even after a crash or a power cut.
    """
    try:
        with writing(path) as file:
            file.write(data)
    except OSError as error:
        raise FileError(
            f"cannot write {path}: {error.strerror or error}; "
            f"choose a folder you may write to, with {len(data):,} bytes free"
        ) from error
    return len(data)


@contextmanager
def writing(path: str | Path) -> Iterator[BinaryIO]:
    """A file that gets its name when the block has succeeded and every byte is on the disk. Raises OSError."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent, glob.escape(_shorten(target.name)))
    temporary, file = _open_temporary(target)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, target)  # while the file is locked: without its lock it would be a leftover
    except BaseException:  # Ctrl-C too: a half-written file must not stay behind
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def _open_temporary(target: Path) -> tuple[Path, BinaryIO]:
    """A new file beside the target, locked for as long as it is open."""
    while True:
        # A random name in the same folder: os.replace is atomic only within a file system, and two writers never share it.
        temporary = target.with_name(f".{_shorten(target.name)}.{secrets.token_hex(6)}.tmp")
        file = open(temporary, "xb")  # noqa: SIM115 (closed by `writing`)
        if _lock(file) is not False and temporary.exists():
            return temporary, file
        file.close()  # another process took it for a leftover before it was locked


def _shorten(name: str) -> str:
    """The beginning of a name, cut between two characters."""
    while len(os.fsencode(name)) > _LONGEST:
        name = name[:-1]
    return name


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Deletes the temporary files that killed writers of `pattern` left: those that no process holds locked. Links and
    pipes of such a name stay, and are not opened: opening a pipe would wait for ever."""
    for temporary in folder.glob(f".{pattern}.{'[0-9a-f]' * 12}.tmp"):
        with suppress(OSError):
            if not stat.S_ISREG(os.lstat(temporary).st_mode):
                continue
            with open(temporary, "rb") as file:
                if _lock(file):
                    temporary.unlink(missing_ok=True)


def refuse_link(path: str | Path) -> None:
    """Refuses to write to a symbolic link, which a new file would replace."""
    if os.path.islink(path):
        raise FileError(
            f"{path} is a symbolic link, and a new file would take its place; name the file it points to "
            f"({os.path.realpath(path)}), or delete the link yourself"
        )


def _lock(file: BinaryIO) -> bool | None:
    """Whether this process now has the lock on a file; None where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def move_into_place(source: Path, target: Path) -> None:
    """Gives a finished file of the same file system its name, as `writing` does: every byte is on the disk before. Raises
    OSError."""
    with open(source, "rb") as file:
        os.fsync(file.fileno())
    os.replace(source, target)
    sync_folder(target.parent)


def write_json(path: str | Path, value: Any) -> int:
    """Writes a value as indented JSON, as `write_file` does."""
    return write_file(path, (json.dumps(value, indent=2) + "\n").encode("utf-8"))


def sync_folder(folder: Path) -> None:
    """Syncs a folder, so that a rename survives a power cut, where the system supports it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def exchange(one: Path, other: Path) -> bool:
    """Swaps the names of two folders in one step, so that both names always exist. False where the system or the file
    system cannot do that."""
    import ctypes

    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False
    sys.audit("os.rename", str(one), str(other), -1, -1)  # as os.rename does
    if swap(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(error, os.strerror(error), str(other))


@contextmanager
def locked(lock: Path, folder: Path, *, wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Holds `folder` for this process by the file `lock`, which is deleted at the end.

    A second process is refused with the name of the first, or waits for it and says so by `wait`. The system releases
    the lock (flock) when its process ends, even by a kill. Raises OSError where no lock can be made.
    """
    file, holder = FileLock(lock), lock.with_suffix(".json")
    _refuse_foreign(lock, holder)
    try:
        file.acquire(timeout=0)
    except Timeout:
        _check_lock(lock)
        user = _describe_holder(holder, patience=2)
        if wait is None:
            raise FileError(f"{folder} is in use by {user}; wait until it has ended, or choose another --out") from None
        wait(f"waiting for {user}, which works on {folder}")
        file.acquire(poll_interval=0.2)
    try:
        since = datetime.now().isoformat(" ", "seconds")
        write_json(holder, {"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        yield
    finally:
        # While the lock is held: a waiting process sees that the file is gone and starts over. A folder that cannot be
        # written any more keeps them, and they lock nothing once this process has ended.
        with suppress(OSError):
            holder.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
        file.release()


def _check_lock(lock: Path) -> None:
    """Raises the system's error if a lock cannot be made at all, as in /proc, which takes no files. filelock would wait for
    ever there: it assumes that another process has just deleted the file."""
    if not os.path.lexists(lock):
        os.close(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644))


def _describe_holder(path: Path, *, patience: float) -> str:
    """Names the process that holds a lock. It writes its name just after it took the lock: wait `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        with suppress(OSError, ValueError, KeyError, TypeError):
            return _read_holder(path)
        if time.monotonic() > deadline:
            return "another process"
        time.sleep(0.02)


def _read_holder(path: Path) -> str:
    found = json.loads(path.read_bytes())
    return f"process {found['pid']} on {found['host']}, since {found['since']}"


def _refuse_foreign(lock: Path, holder: Path) -> None:
    """Refuses to use files of another program as a lock, since both are deleted at the end. A lock is an empty file; where
    there is no flock, filelock writes to it, and then our holder is beside it."""
    foreign = None
    try:
        _read_holder(holder)
    except FileNotFoundError:
        with suppress(FileNotFoundError):
            foreign = lock if os.lstat(lock).st_size else None
    except OSError:
        if not os.path.lexists(holder):  # its name is too long, for one: the lock cannot be made
            raise
        foreign = holder
    except (ValueError, KeyError, TypeError, RecursionError):
        foreign = holder
    if foreign is not None:
        raise FileError(
            f"{foreign} is a file of another program, and would be deleted; move it, or choose another --out"
        )


def is_running(pid: int) -> bool:
    """Whether this machine has a process of that number, of any user."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # in a damaged file, any number may stand for a process
        return False
    except PermissionError:
        return True
    return True
