"""Atomic file writes, and the cache folder for everything that can be rebuilt."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

from parbank.errors import FileError


def default_cache() -> Path:
    """Where prepared text and compiled kernels are kept: $PARBANK_CACHE, else ~/.cache/parbank."""
    return Path(os.environ.get("PARBANK_CACHE") or Path.home() / ".cache" / "parbank")


def write_file(path: str | Path, data: bytes) -> int:
    """Writes `data` to `path` atomically and returns its size.

    A reader sees the old file or the whole new one, even after a crash or a power cut.
    """
    target = Path(path)
    # A random name in the same folder: os.replace is atomic only within a file system, and two writers never share it.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:  # Ctrl-C too: a half-written file must not stay behind
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)
    except OSError as error:
        raise FileError(
            f"cannot write {target}: {error.strerror or error}; "
            f"choose a folder you may write to, with {len(data):,} bytes free"
        ) from error
    return len(data)


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
