"""Text prepared in a process of its own: the same result, the same messages, the same errors."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from parbank.data.apart import _pass_on, prepare_apart
from parbank.data.dataset import open_dataset
from parbank.errors import DataError
from parbank.files import is_running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(12):
        words = [f"word{number * k % 97}" for k in range(400)]
        (folder / f"{number}.txt").write_text(" ".join(words), encoding="utf-8")
    return folder


def test_the_result_is_the_same(folder: Path, tmp_path: Path) -> None:
    spec, said, here = f"text:{folder}", [], []
    apart = open_dataset(spec, vocab_size=320, cache=tmp_path / "apart", say=said.append, apart=True)
    alone = open_dataset(spec, vocab_size=320, cache=tmp_path / "alone", say=here.append)
    assert apart.fingerprint == alone.fingerprint
    assert apart.folder.parent == tmp_path / "apart"
    assert {line.split()[0] for line in said} == {line.split()[0] for line in here}
    assert sum(line.startswith("preparing") for line in said) == 1, "this process found it ready"


def test_the_process_starts_without_torch() -> None:
    """Importing torch takes seconds, and every cold start would wait for them."""
    script = "import sys, parbank.data.dataset\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_an_error_is_raised_here(folder: Path, tmp_path: Path) -> None:
    (folder / "bad.txt").write_bytes(b"text \xff")
    with pytest.raises(DataError, match=r"bad\.txt, byte 5: not UTF-8"):
        prepare_apart(f"text:{folder}", vocab_size=320, cache=tmp_path / "cache", say=lambda line: None)


def test_a_child_that_dies_leaves_the_work_to_this_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(sys, "executable", "false")
    data = open_dataset(f"text:{folder}", vocab_size=320, cache=tmp_path / "cache", say=said.append, apart=True)
    assert "ended with 1; preparing in this one" in said[0]
    assert len(data.train) > 1000


def test_the_process_is_not_misled_by_files_of_the_current_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As this one is not, where a user calls the command `parbank`."""
    (tmp_path / "numpy.py").write_text("raise SystemExit(7)")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    prepare_apart(f"text:{folder}", vocab_size=320, cache=tmp_path / "cache", say=said.append)
    assert not [line for line in said if "ended with" in line]
    assert any(line.startswith("trained") for line in said)


def test_an_interrupted_parent_ends_its_child(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that would go on for minutes: a real one may be done before a busy machine lets its parent read a line."""
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\necho $$ reads\nexec sleep 300\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    said: list[str] = []

    def interrupt(line: str) -> None:
        said.append(line)
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        prepare_apart(f"text:{folder}", vocab_size=320, cache=tmp_path / "cache", say=interrupt)
    assert time.monotonic() - began < 200, "it did not end by itself"
    assert not is_running(int(said[0].split()[0]))


def test_other_words_of_the_child_are_passed_on() -> None:
    said: list[str] = []
    _pass_on("a library's warning\n", said.append)
    _pass_on('{"text": "reading"}\n', said.append)
    assert said == ["a library's warning", "reading"]
