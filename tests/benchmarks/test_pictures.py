"""Pictures are drawn from result files alone."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RUN = {"device": "cpu", "val_bpb": 1.2, "compressors_bpb": {"xz": 1.5}, "curve": [[0.1, 1, 5.0], [0.2, 2, 4.0]]}
STEP_ROWS = [
    {"case": "products + attention", "provider": "floor", "value": 4.0},
    {"case": "forward + backward, 98,304 tokens", "provider": "ours", "value": 6.0},
    {"case": "forward + backward, 98,304 tokens: host", "provider": "ours", "value": 1.0},
    {"case": "waterfall, micro: GEMM", "provider": "ours", "value": 5.0},
    {"case": "waterfall, micro: gaps", "provider": "ours", "value": 1.0},
    {"case": "waterfall, whole: gaps", "provider": "ours", "value": 2.0},
]
QUANTISED = {"method": "solver at 8,000", "bytes": 8000, "bpb": 1.3, "lost": 0.1, "seconds": 2.0, "note": ""}
LOSSES = {"way": "on", "seed": 0, "device": "cpu", "losses": [3.0, 2.0]}
STARTS = [
    {"case": case, "provider": start, "value": value}
    for start in ("first start", "second start")
    for case, value in (
        ("train: whole command", 9.0), ("train: data", 4.0), ("train: training", 2.0), ("train: after training", 3.0),
        ("train: after training: packing", 3.0), ("warmup --import", 1.0),
        ("eval, chunked", 5.0), ("eval, chunked: scoring alone", 2.0), ("eval, chunked: bits per byte", 1.1),
    )
]  # fmt: skip
RATES = [
    {"case": f"{shape}, {side}", "provider": provider, "value": value}
    for shape in ("square", "1 : 4")
    for side in (512, 1024)
    for provider, value in (("parbank", 700.0), ("dion, Triton", 400.0), ("dion, Gram", None))
]
ABOUTS: dict[str, dict[str, Any]] = {
    "quality.py": {"runs": [RUN | {"seed": 1}], "settings": {"recipe": "demo"}},
    "step.py": {"rows": STEP_ROWS, "machine": {"gpu": "H200"}},
    "quantisation.py": {"results": [QUANTISED], "float32_bpb": 1.2},
    "startup.py": {"rows": STARTS, "machine": {"cpu": "x"}, "settings": {"recipe": "nano", "only": None}},
    "optimizer_newton_schulz.py": {
        "rows": RATES,
        "machine": {"gpu": "H200"},
        "rates": {"bf16_product_TFLOP_per_s": 650.0},
    },
    "curves.py": {"runs": [LOSSES, LOSSES | {"way": "off"}], "settings": {"recipe": "demo"}},
}


@pytest.fixture
def pictures(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("pictures")


def add(root: Path, script: str, name: str = "a", **more: Any) -> Path:
    folder = root / name
    folder.mkdir()
    about = {"command": f"python benchmarks/{script} --quick", "commit": "c"} | ABOUTS.get(script, {}) | more
    (folder / "result.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize("script", ABOUTS)
def test_every_picture_can_be_drawn_from_its_result(pictures: ModuleType, tmp_path: Path, script: str) -> None:
    assert set(ABOUTS) == set(pictures.PICTURES)
    folder = add(tmp_path, script)
    path = pictures.draw(folder)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert pictures.draw(folder) is None, "it is there already"
    assert pictures.draw(folder, again=True) == path


def test_results_without_pictures_are_left_alone(pictures: ModuleType, tmp_path: Path) -> None:
    assert pictures.draw(add(tmp_path, "ops.py")) is None


def test_the_phases_of_a_start_are_its_parts(pictures: ModuleType) -> None:
    bars = pictures.startup.find_phases(STARTS)
    assert bars["first start"] == {"data": 4.0, "packing": 3.0}
    assert bars["chunked, second start"] == {"loading and compiling": 3.0, "scoring": 2.0}


def test_seeds_of_one_commit_share_a_picture(
    pictures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = add(tmp_path, "quality.py")
    add(tmp_path, "quality.py", "b", runs=[RUN | {"seed": 0}])
    add(tmp_path, "quality.py", "c", runs=[RUN | {"seed": 2}], commit="another")
    drawn: list[int] = []
    monkeypatch.setattr(pictures.quality, "draw", lambda runs, *_: drawn.extend(run["seed"] for run in runs))
    pictures.draw(folder)
    assert drawn == [0, 1]
