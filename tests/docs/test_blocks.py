"""Every block of Python in README and docs runs as pasted, in the order of its page."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_distributed_test
from tests.docs.pages import ROOT, Block, find_blocks, find_pages, name

MUON = ROOT / "docs" / "guide" / "muon.md"  # its blocks are for several ranks
PAGES = [page for page in find_pages() if page != MUON and any(block.reason is None for block in find_blocks(page))]
SECONDS = 300
MOST_NOT_RUN = 2


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    """In a folder of its own that holds what a clone holds, by a fresh interpreter in which warnings are errors."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(_numbered(block) for block in find_blocks(page) if block.reason is None))
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PARBANK_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "error::UserWarning", script.name]
    done = subprocess.run(
        command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, f"{name(page)}:\n{done.stdout}\n{done.stderr}"


def _numbered(block: Block) -> str:
    return f"# block {block.number} of {name(block.page)}\n{block.code}"


def test_blocks_run_on_two_ranks() -> None:
    blocks = find_blocks(MUON)
    assert run_distributed_test(_run_muon, 2) == [len(blocks)] * 2


def _run_muon() -> int:
    """All of them in one namespace, as a reader would paste them."""
    namespace: dict[str, Any] = {}
    torch.manual_seed(0)
    for block in find_blocks(MUON):
        exec(compile(block.code, f"{name(MUON)}, block {block.number}", "exec"), namespace)
    return block.number


def test_few_blocks_are_not_run() -> None:
    left_out = [block for page in find_pages() for block in find_blocks(page) if block.reason is not None]
    assert len(left_out) <= MOST_NOT_RUN, left_out
