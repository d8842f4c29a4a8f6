"""Every script in examples/ runs, as its first line says, and prints what it promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

EXAMPLES = ROOT / "examples"
SECONDS = 300


def run_example(name: str, *arguments: str, folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PARBANK_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "error::UserWarning", str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """Some text: the pages of the manual."""
    folder = tmp_path / "books"
    folder.mkdir()
    for number, page in enumerate(sorted((ROOT / "docs" / "design").glob("*.md"))):
        (folder / f"{number}.txt").write_text(page.read_text())
    return folder


def test_train_on_text(books: Path, tmp_path: Path) -> None:
    out = run_example("train_on_text", str(books), "0.05", folder=tmp_path)
    assert re.search(r"\d+ steps in \d s, [\d,]+ bytes\n\d\.\d+ bits per byte; \{'zlib", out)
    assert (tmp_path / "runs" / "own-text" / "model.pbk").exists()


def test_muon_loop(tmp_path: Path) -> None:
    out = run_example("muon_loop", "30", folder=tmp_path)
    losses = {line.split()[0]: float(line.split()[-1]) for line in out.splitlines()}
    assert losses.keys() == {"AdamW", "ParallelMuon"}
    assert all(0 < loss < 2.4 for loss in losses.values()), "below log(12), which guessing gives"


def test_qk_clip(tmp_path: Path) -> None:
    losses = [float(line.split()[-1]) for line in run_example("qk_clip", folder=tmp_path).splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]


def test_pack_module(tmp_path: Path) -> None:
    out = run_example("pack_module", folder=tmp_path)
    sizes = [int(size.replace(",", "")) for size in re.findall(r"packed in ([\d,]+) bytes", out)]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert sizes[0] <= 100_000
    assert sizes[1] <= 40_000
    assert losses[0] < 0.1, "the module has learned the rule"
    assert losses[1] < losses[0] + 0.1
    assert losses[1] < losses[2] < 0.5, "guessing gives 6.2"


def test_logger_and_scores(books: Path, tmp_path: Path) -> None:
    out = run_example("custom_logger", str(books), "20", folder=tmp_path)
    rows = out.split()
    assert rows[0].startswith("step,tokens,seconds,loss,")
    assert [row.split(",")[0] for row in rows[1:]] == ["1", "5", "10", "15", "20"]
    out = run_example("score_and_sample", "runs/csv", str(books / "0.txt"), folder=tmp_path)
    assert re.search(r"streaming +\d\.\d{4} bits per byte over [\d,]+ bytes", out)
    assert "likeliest next tokens: [" in out


def test_every_example_has_a_test() -> None:
    tested = set(re.findall(r'run_example\("(\w+)"', Path(__file__).read_text()))
    assert tested == {path.stem for path in EXAMPLES.glob("*.py")}
