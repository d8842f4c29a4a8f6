"""The folder for what can be made again, and places where no lock can be made."""

from pathlib import Path

import pytest

from parbank.files import default_cache, locked


def test_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARBANK_CACHE", str(tmp_path / "here"))
    assert default_cache() == tmp_path / "here"
    monkeypatch.delenv("PARBANK_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "parbank"


@pytest.mark.parametrize("waits", [False, True])
def test_a_folder_that_takes_no_files_is_not_in_use(waits: bool) -> None:
    """The system's own reason reaches the caller, and nobody waits for a process that is not there."""
    with (
        pytest.raises(FileNotFoundError, match="No such file or directory"),
        locked(Path("/proc/.x.lock"), Path("/proc/x"), wait=pytest.fail if waits else None),
    ):
        pytest.fail("the lock cannot be there")
