"""No damaged byte of a checkpoint goes unnoticed, and a hostile one takes little memory. Older files still load."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from parbank.errors import CheckpointError
from parbank.training.checkpoint import load_checkpoint, save_checkpoint

STATE: dict[str, Any] = {"step": 3, "model": {"w": torch.arange(12.0)}, "config": {"seed": 7}}


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    return save_checkpoint(tmp_path, STATE, keep=1).read_bytes()


def load(data: bytes, folder: Path) -> dict[str, Any]:
    (folder / "x.pt").write_bytes(data)
    return load_checkpoint(folder / "x.pt")


def test_every_damaged_byte_is_noticed(whole: bytes, tmp_path: Path) -> None:
    assert load(whole, tmp_path)["config"] == {"seed": 7}
    for place in (*range(0, len(whole) - 200, 3), *range(len(whole) - 200, len(whole))):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(CheckpointError, match=r"x\.pt is damaged"):
            load(bytes(damaged), tmp_path)


def test_a_digest_cannot_be_cut_off(whole: bytes, tmp_path: Path) -> None:
    bare = whole[: whole.rindex(b"parbank sha256 ")]
    with pytest.raises(CheckpointError, match=r"x\.pt is damaged: its digest is missing"):
        load(bare[:-2] + bytes(2), tmp_path)


def test_checkpoints_from_before_the_digest_still_load(tmp_path: Path) -> None:
    torch.save({"format": 1, **STATE}, tmp_path / "old.pt")
    assert torch.equal(load_checkpoint(tmp_path / "old.pt")["model"]["w"], STATE["model"]["w"])


def test_members_that_are_compressed_are_refused(whole: bytes, tmp_path: Path) -> None:
    """A megabyte of compressed zeros would become a gigabyte."""
    (tmp_path / "whole.pt").write_bytes(whole)
    with (
        zipfile.ZipFile(tmp_path / "whole.pt") as source,
        zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for member in source.namelist():
            target.writestr(member, source.read(member))
    with pytest.raises(CheckpointError, match=r"small\.pt is damaged .*compressed"):
        load_checkpoint(tmp_path / "small.pt")


@pytest.mark.parametrize(
    "tensor", [torch.zeros(1).expand(1 << 40), torch.empty(1 << 40, device="meta"), torch.eye(2).to_sparse()]
)
def test_tensors_without_numbers_are_refused(tensor: torch.Tensor, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, {"step": 1, "model": {"w": tensor}}, keep=1)
    with pytest.raises(CheckpointError, match="claim more numbers than it holds"):
        load_checkpoint(path)


@pytest.mark.parametrize("module", ["builtins", "__builtin__"])
def test_a_length_is_not_taken_for_bytes(module: str, tmp_path: Path, benchmark: Callable[[str], ModuleType]) -> None:
    """torch.load knows bytearray, which a few bytes of a pickle can ask for at any length: bytearray(300_000_000)."""
    path, length = tmp_path / "x.pt", (300_000_000).to_bytes(8, "little")
    call = b"c" + module.encode() + b"\nbytearray\n\x8a\x08" + length + b"\x85R"
    pickled = b"\x80\x02}(X\x06\x00\x00\x00formatK\x01X\x05\x00\x00\x00model" + call + b"u."
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little"}.items():
            archive.writestr(f"archive/{name}", data)
    found = benchmark("faults_processes").measure(lambda: load_checkpoint(path))
    assert found.ending == "error"
    assert "it holds an array of bytes" in found.said
    assert found.megabytes < 64
