"""Draws the pictures that results lack: a machine that measures need not have matplotlib.

    python benchmarks/pictures.py [--again] [RESULT_FOLDER ...]

Pictures are made of result.json alone. Without folders, every folder of benchmarks/results is looked at; --again also redraws
existing pictures. Runs of one commit that were made seed by seed are drawn together, in each of their results. Writes .png files
beside the results. `make claims` runs this.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import curves  # noqa: E402
import optimizer_newton_schulz  # noqa: E402
import quality  # noqa: E402
import quantisation  # noqa: E402
import startup  # noqa: E402
import waterfall  # noqa: E402
from harness import RESULTS  # noqa: E402

About = dict[str, Any]
PASS = "forward + backward, "
SHARE = "waterfall, micro: "


def draw_quality(results: list[About], path: Path) -> None:
    runs = {run["seed"]: run for result in results for run in result["runs"]}
    quality.draw([runs[seed] for seed in sorted(runs)], results[0]["settings"]["recipe"], path)


def draw_curves(results: list[About], path: Path) -> None:
    curves.draw(results[0]["runs"], results[0]["settings"]["recipe"], path)


def draw_quantisation(results: list[About], path: Path) -> None:
    found = [quantisation.Result(**result) for result in results[0]["results"]]
    quantisation.draw(found, results[0]["float32_bpb"], path)


def draw_step(results: list[About], path: Path) -> None:
    rows = results[0]["rows"]
    falls: dict[str, waterfall.Waterfall] = {}
    for row in rows:
        if row["case"].startswith(SHARE):
            fall = falls.setdefault(row["provider"], waterfall.Waterfall({}))
            fall.classes[row["case"].removeprefix(SHARE)] = row["value"]
    size = next(row["case"] for row in rows if row["case"].startswith(PASS) and row["case"].endswith("tokens"))
    floor = next(row["value"] for row in rows if row["case"] == "products + attention")
    waterfall.draw(falls, path, f"{size}, {results[0]['machine']['gpu']}", floor)


def draw_startup(results: list[About], path: Path) -> None:
    machine, settings = results[0]["machine"], results[0]["settings"]
    words = (
        f"parbank train --recipe {settings['recipe']}, without training"
        if settings["only"] != "eval"
        else "parbank eval"
    )
    startup.draw(results[0]["rows"], path, f"{words}: {machine.get('gpu', machine['cpu'])}")


def draw_newton_schulz(results: list[About], path: Path) -> None:
    optimizer_newton_schulz.draw(results[0], path)


PICTURES: dict[str, tuple[str, Callable[[list[About], Path], None]]] = {
    "quality.py": ("curve.png", draw_quality),
    "curves.py": ("curves.png", draw_curves),
    "quantisation.py": ("sizes.png", draw_quantisation),
    "step.py": ("waterfall.png", draw_step),
    "startup.py": ("phases.png", draw_startup),
    "optimizer_newton_schulz.py": ("rates.png", draw_newton_schulz),
}
"""By the script that made a result: the name of its picture, and what draws it."""


def draw(folder: Path, *, again: bool = False) -> Path | None:
    """Draws a result's picture; returns its path, or None where there is none to draw."""
    about = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    script = Path(about["command"].split()[1]).name
    if script not in PICTURES:
        return None
    name, function = PICTURES[script]
    path = folder / name
    if path.exists() and not again:
        return None
    siblings = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.parent.glob("*/result.json"))]
    function([about, *(x for x in siblings if x["commit"] == about["commit"] and x != about)], path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="RESULT_FOLDER")
    parser.add_argument("--again", action="store_true", help="also where there is a picture")
    arguments = parser.parse_args()
    for folder in arguments.folders or sorted(path.parent for path in RESULTS.glob("*/*/result.json")):
        if (path := draw(folder, again=arguments.again)) is not None:
            print(f"drawn: {path}")


if __name__ == "__main__":
    main()
