"""Screens many changes with few runs: every run has half of the changes, so each effect is a mean over all runs.

    python benchmarks/screen.py write benchmarks/studies/screen50-factors.toml      # makes screen50.toml, a study
    python benchmarks/studies.py --claim study_screen50 -- benchmarks/studies/screen50.toml --data SPEC --out runs/screen50
    python benchmarks/screen.py show benchmarks/studies/screen50-factors.toml runs/screen50    # or the study's result.json
    python benchmarks/screen.py best benchmarks/studies/screen50-factors.toml runs/screen50    # settings, for `--set`

A change that fails would cost half of the runs. So each can be tried alone first, in a few steps:

    python benchmarks/screen.py singles FACTORS.toml singles.toml     # then `parbank study run singles.toml --budget 20steps`
    python benchmarks/screen.py write FACTORS.toml STUDY.toml --tried runs/study-singles    # without those that failed

The design is that of Plackett and Burman (1946): 12 runs, up to 11 factors of two levels, any two of which occur together
equally often. An effect is the mean of the six runs with the change minus the mean of the other six. With a deviation s of one
run, its deviation is 0.58 s; one change at a time, in as many runs, has 1.41 s. The price: an effect is an average over the
settings of all others, and where two changes need or hinder each other, the design mixes that into third effects. So a screen
finds candidates, and a study of whole runs decides.

Bound: two deviations of an effect, which `show` prints. `write` writes the study's file; the other forms only print.
"""

import argparse
import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

RUNS = 12
_FIRST = (1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0)  # the generating row; the others are its rotations, and one of zeros
NOISE = 0.001
"""Deviation of one run's score, in bits per byte, between seeds: 0.0007 at 120 s, a little more in shorter runs."""


@dataclass(frozen=True)
class Screen:
    """The factors, as a file names them."""

    head: dict[str, Any]
    """What the study has beside its arms."""
    low: dict[str, list[str]]
    high: dict[str, list[str]]
    joint: list[dict[str, Any]]
    """Settings where several factors are high together: factors = [...], settings = [...]."""

    @classmethod
    def read(cls, path: Path) -> "Screen":
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        factors, joint = values.pop("factor"), values.pop("joint", [])
        if len(factors) > RUNS - 1:
            raise SystemExit(f"{path} has {len(factors)} factors; a screen of {RUNS} runs takes {RUNS - 1} at most")
        low = {name: factor.get("low", []) for name, factor in factors.items()}
        return cls(values, low, {name: factor["high"] for name, factor in factors.items()}, joint)

    def only(self, names: set[str]) -> "Screen":
        """The screen of these changes; of the others, the low setting becomes one of the base."""
        head = self.head | {
            "settings": [
                *self.head.get("settings", []),
                *(s for name, low in self.low.items() if name not in names for s in low),
            ]
        }
        return Screen(
            head,
            {name: low for name, low in self.low.items() if name in names},
            {name: high for name, high in self.high.items() if name in names},
            [rule for rule in self.joint if set(rule["factors"]) <= names],
        )

    def settings(self, levels: dict[str, bool]) -> list[str]:
        """Later settings replace earlier ones of the same name, so that a study's arm names each once."""
        found = [setting for name, high in levels.items() for setting in (self.high if high else self.low)[name]]
        for rule in self.joint:
            if all(levels[name] for name in rule["factors"]):
                found += rule["settings"]
        return list({setting.partition("=")[0]: setting for setting in found}.values())


def design(factors: list[str]) -> list[dict[str, bool]]:
    """The levels of each run. In the first one all are low: that is the base of the study."""
    rows = [[0] * (RUNS - 1), *([_FIRST[(column - shift) % 11] for column in range(11)] for shift in range(11))]
    return [{name: bool(row[column]) for column, name in enumerate(factors)} for row in rows]


def study_of(screen: Screen, source: str) -> str:
    """The study as TOML: the run in which all factors are low is its base."""
    first, *rest = design(list(screen.high))
    head = dict(screen.head)
    base = head.pop("settings", []) + screen.settings(first)
    lines = [f"# Written by `python benchmarks/screen.py write {source}`. Each arm has half of the changes."]
    lines += [f"{name} = {_toml(value)}" for name, value in head.items()]
    lines.append(f"settings = {_toml(base)}")
    for number, levels in enumerate(rest, 1):
        names = " ".join(name for name, high in levels.items() if high)
        lines += ["", f"[arm.run-{number:02}]", f"settings = {_toml(screen.settings(levels))}", f'claim = "{names}"']
    return "\n".join(lines) + "\n"


def singles_of(screen: Screen, source: str) -> str:
    """A study with each change alone, to see which of them run."""
    head = dict(screen.head)
    low = dict.fromkeys(screen.high, False)
    base = head.pop("settings", []) + screen.settings(low)
    lines = [f"# Written by `python benchmarks/screen.py singles {source}`. Each arm has one of the changes."]
    lines += [f"{name} = {_toml(value)}" for name, value in head.items()]
    lines.append(f"settings = {_toml(base)}")
    for name in screen.high:
        lines += ["", f"[arm.{name}]", f"settings = {_toml(screen.settings(low | {name: True}))}"]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def read_runs(source: Path) -> dict[str, dict[str, Any]]:
    """The runs of each arm, from the folder of a study or from a result."""
    paths = [source] if source.is_file() else sorted(source.glob("results/*.json"))
    if not paths:
        raise SystemExit(f"{source} has no run: give the folder of a study, or its result.json")
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    runs = contents[0]["runs"].values() if source.is_file() else contents
    return {run["arm"]: run for run in runs}


def effects(screen: Screen, source: Path, column: str = "value") -> dict[str, float]:
    """Of each factor, by least squares over the runs that have ended: with all 12 it is the difference of two means."""
    names = list(screen.high)
    found = {arm: run[column] for arm, run in read_runs(source).items()}
    arms = ["base", *(f"run-{number:02}" for number in range(1, RUNS))]
    rows = [(levels, found[arm]) for arm, levels in zip(arms, design(names), strict=True) if arm in found]
    if len(rows) <= len(names):
        raise SystemExit(f"{len(rows)} runs have ended; {len(names)} effects and a mean need {len(names) + 1}")
    matrix = np.array([[1.0, *(levels[name] - 0.5 for name in names)] for levels, _ in rows])
    solved = np.linalg.lstsq(matrix, np.array([value for _, value in rows]), rcond=None)[0]
    return {"mean": float(solved[0])} | dict(zip(names, map(float, solved[1:]), strict=True))


def show(screen: Screen, source: Path, noise: float) -> str:
    speeds = effects(screen, source, "tokens_per_second")
    scores, chunked = effects(screen, source), effects(screen, source, "bpb_chunked")
    lines = [
        f"mean {scores['mean']:.4f} bits/byte, {speeds['mean']:,.0f} tokens/s; two deviations of an effect: "
        f"{4 * noise / math.sqrt(RUNS):.4f}",
        "",
        "| change | streaming | chunked | tokens/s |",
        "| --- | --- | --- | --- |",
    ]
    for name in sorted(screen.high, key=lambda name: scores[name]):
        change = f"{', '.join(screen.low[name]) or 'without'} -> {', '.join(screen.high[name])}"
        speed = speeds[name] / speeds["mean"]
        lines.append(f"| {name}: `{change}` | {scores[name]:+.4f} | {chunked[name]:+.4f} | {speed:+.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "singles", "show", "best"))
    parser.add_argument("factors", type=Path)
    parser.add_argument("study", type=Path, nargs="?", help="the study's folder or result, or the file to write")
    parser.add_argument("--noise", type=float, default=NOISE, help="deviation of one run")
    parser.add_argument("--least", type=float, default=0.0, help="best: changes that gain less are left out")
    parser.add_argument("--tried", type=Path, help="only changes with a run in this folder of a study of `singles`")
    arguments = parser.parse_args()
    screen = Screen.read(arguments.factors)
    if arguments.tried is not None:
        screen = screen.only(set(read_runs(arguments.tried)))
    if arguments.what in ("write", "singles"):
        path = arguments.study or arguments.factors.with_name(arguments.factors.name.replace("-factors", ""))
        if path == arguments.factors:
            parser.error("name the file to write: the factors' file would be overwritten")
        text = study_of if arguments.what == "write" else singles_of
        path.write_text(text(screen, arguments.factors.as_posix()), encoding="utf-8")
        print(f"written: {path}")
    elif arguments.study is None:
        parser.error("name the folder of the study, or its result.json")
    elif arguments.what == "show":
        print(show(screen, arguments.study, arguments.noise))
    else:
        found = effects(screen, arguments.study)
        levels = {name: found[name] < -arguments.least for name in screen.high}
        print("\n".join(screen.settings(levels)))


if __name__ == "__main__":
    main()
