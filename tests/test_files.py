"""The folder for what can be made again, and places where no lock can be made."""

import os
from pathlib import Path

import pytest

from parbank.errors import FileError
from parbank.files import default_cache, is_running, locked, write_file


def test_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARBANK_CACHE", str(tmp_path / "here"))
    assert default_cache() == tmp_path / "here"
    monkeypatch.delenv("PARBANK_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "parbank"


def test_without_a_home_the_error_says_how_to_name_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user of a container whom its system does not know."""
    monkeypatch.delenv("PARBANK_CACHE", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 2)
    with pytest.raises(FileError, match="no home folder for the cache; set PARBANK_CACHE to a folder"):
        default_cache()


def test_a_name_too_long_for_a_lock_is_not_taken_for_a_file_of_another_program(tmp_path: Path) -> None:
    lock = tmp_path / f".{'x' * 250}.lock"  # of 256 bytes
    with pytest.raises(OSError, match="File name too long"), locked(lock, tmp_path):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("pid", [2**22 + 1, 10**30])  # above Linux's largest, and above that of any system
def test_a_number_that_no_process_has_is_not_running(pid: int) -> None:
    assert not is_running(pid)
    assert is_running(os.getpid())


@pytest.mark.parametrize("waits", [False, True])
def test_a_folder_that_takes_no_files_is_not_in_use(waits: bool) -> None:
    """The system's own reason reaches the caller, and nobody waits for a process that is not there."""
    with (
        pytest.raises(FileNotFoundError, match="No such file or directory"),
        locked(Path("/proc/.x.lock"), Path("/proc/x"), wait=pytest.fail if waits else None),
    ):
        pytest.fail("the lock cannot be there")


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127, "n" * 199 + "é" * 28])
def test_a_file_may_have_the_longest_name_there_is(name: str, tmp_path: Path) -> None:
    """A temporary file has a longer name than its target, and 255 bytes are the limit for both."""
    write_file(tmp_path / name, b"old")
    assert write_file(tmp_path / name, b"new") == 3
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == b"new"


def test_the_leftover_of_a_long_name_is_removed(tmp_path: Path) -> None:
    leftover = tmp_path / f".{'n' * 200}.{'0' * 12}.tmp"
    leftover.write_bytes(b"half of a file")
    write_file(tmp_path / ("n" * 255), b"whole")
    assert not leftover.exists()
