"""Symbolic links and named pipes where a command writes: no link is replaced, and no pipe is waited for."""

import json
import os
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from parbank.artifact.container import check_target
from parbank.artifact.safetensors import export_model, import_model
from parbank.errors import ArtifactError, ConfigError, FileError, ParbankError
from parbank.files import write_file
from parbank.report.write import write_pages
from parbank.training.load import load_model
from parbank.training.portable import ABOUT, check_export

RUN = Path(__file__).parents[1] / "training/data/first_run"
SECONDS = 20


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """An open of a pipe that waits for a writer ends in an error."""

    def end(*event: object) -> None:
        raise AssertionError("waited for a pipe")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def pack(out: Path) -> None:
    check_target(out)
    write_file(out, (RUN / "model.pbk").read_bytes())


def export(out: Path) -> None:
    export_model(load_model(RUN / "model.pbk", torch.device("cpu")), out)


def report(out: Path) -> None:
    write_pages([RUN], out)


def export_kernels(out: Path) -> None:
    check_export(out)
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(ABOUT, json.dumps({"made_by": "parbank"}))


WRITERS: dict[str, Callable[[Path], None]] = {
    "a.pbk": pack,
    "a.safetensors": export,
    "a.html": report,
    "a.zip": export_kernels,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_link_to_an_earlier_file_is_not_replaced(name: str, tmp_path: Path) -> None:
    """The file it points to may be replaced, but by its own name. The link was made by somebody."""
    real, link = tmp_path / "real" / name, tmp_path / name
    real.parent.mkdir()
    WRITERS[name](real)
    WRITERS[name](real)
    before = real.read_bytes()
    link.symlink_to(real)
    with pytest.raises(FileError, match="is a symbolic link, and a new file would take its place; name the file it"):
        WRITERS[name](link)
    assert link.is_symlink()
    assert real.read_bytes() == before


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("kind", ["pipe", "link to nothing"])
def test_a_pipe_and_a_broken_link_are_refused(name: str, kind: str, tmp_path: Path) -> None:
    target = tmp_path / name
    if kind == "pipe":
        os.mkfifo(target)
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ParbankError, match="exists and"):
        WRITERS[name](target)
    assert os.path.lexists(target)


def test_a_broken_link_in_the_place_of_a_tokenizer_stays(tmp_path: Path) -> None:
    (tmp_path / "a.model").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"a\.model, which holds another one"):
        export(tmp_path / "a.safetensors")
    assert (tmp_path / "a.model").is_symlink()


def test_a_pipe_or_a_link_is_no_leftover(tmp_path: Path) -> None:
    """Temporary files of killed writers are deleted by their names."""
    pipe, link, left = (tmp_path / f".a.pbk.{letter * 12}.tmp" for letter in "abc")
    (tmp_path / "mine").write_text("mine")
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "mine")
    left.write_bytes(b"half")
    write_file(tmp_path / "a.pbk", b"whole")
    assert (tmp_path / "a.pbk").read_bytes() == b"whole"
    assert pipe.exists()
    assert link.is_symlink()
    assert not left.exists()


def test_a_pipe_is_no_model_to_import(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(ArtifactError, match="is not a regular file"):
        import_model(tmp_path / "a.safetensors", tmp_path / "a.pbk")
