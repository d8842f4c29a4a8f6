"""Writes docs/reference/levers.md: every published change with its verdict, and its difference in every study that tried it.

    python benchmarks/levers.py           writes the page
    python benchmarks/levers.py --check   writes nothing; exits 1 where the page differs from levers.toml and the results

A lever names its arms in levers.toml. The differences come from the results of studies: one result, one budget. `make claims`
runs this.
"""

import argparse
import json
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE)]

from screen import RUNS, Screen, effects  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "levers.md"
HEAD = """# Changes considered for plans

`auto` is `parbank train` without a recipe: it trains [a plan](../guide/auto.md). A *lever* is a change that was
considered for it. `benchmarks/levers.py` writes this page from `benchmarks/levers.toml` and the results of studies.

A difference is arm minus base in bits per byte; below zero is better. Each study has its own base, so differences of
two studies do not compare. **With one seed, a difference under 0.003 says little.** In a screen of 12 runs, where half
of the runs have a change, a difference under 0.003 says little: each holds some of what pairs of changes do together.
Every number is computed from a committed result. *log* links an experiment without a result. An empty cell under
"measured" means that nothing was tried.

| lever | arm | in `auto` | measured | verdict |
| --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True, kw_only=True)
class Lever:
    """One row of levers.toml."""

    name: str
    verdict: str
    arms: tuple[str, ...] = ()
    benchmark: str = ""
    """A script of benchmarks/ that measures it, where it is no setting and no study can."""
    plan: bool = False
    rows: tuple[tuple[str, str, str], ...] = ()
    """Pairs of rows of a result: its claim, the arm, the base."""
    log: tuple[str, ...] = ()
    """Sections of docs/log that tried it without a result: page#section. The table links them and shows no number."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One arm in one study."""

    arm: str
    difference: float
    seeds: int
    where: str
    """The budget and the machine."""
    link: str
    sure: bool = False
    """Whether the study's interval leaves zero out."""
    screened: bool = False
    """An effect in a screen, whose runs are `seeds` (benchmarks/screen.py)."""

    def text(self) -> str:
        seeds = f"{self.seeds} runs" if self.screened else f"{self.seeds} seed{'s' if self.seeds > 1 else ''}"
        sure = ", shown" if self.sure else ""
        return f"`{self.arm}` {self.difference:+.3f} ([{self.where}]({self.link}), {seeds}{sure})"


def read_levers(path: Path = HERE / "levers.toml") -> list[Lever]:
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["lever"]
    lists = ("arms", "rows", "log")
    return [Lever(**{**row, **{name: tuple(row.get(name, ())) for name in lists}}) for row in rows]


def find_measured(results: Path = HERE / "results") -> list[Measured]:
    """Every arm of every training study among the results."""
    found = []
    for path in sorted(results.glob("*/*/result.json")):
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        study = result.get("study")
        if not isinstance(study, dict) or study.get("kind") != "training":
            continue
        budget = study["base"]["budget"]
        minutes = budget.get("minutes")
        length = f"{60 * minutes:.0f} s" if minutes else f"{budget['steps']:,} steps"
        machine = path.parent.name.split("-")[3].upper()
        factors = HERE / "studies" / f"{study['name']}-factors.toml"
        if factors.exists():  # its arms have half of the changes each
            found += _screened(factors, path, f"screen of {length}, {machine}")
            continue
        for arm, comparison in result["arms"].items():
            if comparison["pairs"]:
                found.append(
                    Measured(
                        arm=arm,
                        difference=comparison["mean"],
                        seeds=comparison["pairs"],
                        where=f"{length}, {machine}",
                        link=f"../../{path.with_suffix('.md').relative_to(ROOT)}",
                        sure=comparison["verdict"] in ("better", "worse"),
                    )
                )
    return found


def _screened(factors: Path, path: Path, where: str) -> list[Measured]:
    screen = Screen.read(factors)
    link = f"../../{path.with_suffix('.md').relative_to(ROOT)}"
    return [
        Measured(arm=name, difference=effect, seeds=RUNS, where=where, link=link, screened=True)
        for name, effect in effects(screen, path).items()
        if screen.high.get(name, []) != screen.low.get(name, [])
    ]


def find_arms() -> set[str]:
    """The names of all arms and factors: shipped, and in the files of studies."""
    sys.path.insert(0, str(ROOT))
    from parbank.study.arms import ARMS

    files = sorted((HERE / "studies").glob("*.toml"))
    own = [tomllib.loads(path.read_text(encoding="utf-8")) for path in files]
    return {*ARMS, *(name for file in own for kind in ("arm", "factor") for name in file.get(kind, {}))}


def measured_of(lever: Lever, measured: list[Measured]) -> list[Measured]:
    return [one for one in measured if one.arm in lever.arms] + [_compare(*row) for row in lever.rows]


def _compare(claim: str, arm: str, base: str) -> Measured:
    """Two providers of a claim's newest result, by their bits per byte."""
    path = max((HERE / "results").glob(f"{claim}/*/result.json"))
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    values = {(row["case"], row["provider"]): row["value"] for row in result["rows"]}
    seeds = [case for case, provider in values if provider == arm and case.startswith("bits per byte, seed ")]
    return Measured(
        arm=arm,
        difference=values["bits per byte", arm] - values["bits per byte", base],
        seeds=len(seeds),
        where=f"{claim}, {path.parent.name.split('-')[3].upper()}",
        link=f"../../{path.with_suffix('.md').relative_to(ROOT)}",
    )


def make_page(levers: list[Lever], measured: list[Measured]) -> str:
    rows = []
    for lever in levers:
        logged = (f"[log](../log/{section})" for section in lever.log)
        own = "; ".join([*(one.text() for one in measured_of(lever, measured)), *logged])
        arms = ", ".join(f"`{arm}`" for arm in lever.arms) or (lever.benchmark and f"`benchmarks/{lever.benchmark}.py`")
        rows.append(f"| {lever.name} | {arms} | {'yes' if lever.plan else ''} | {own} | {lever.verdict} |\n")
    return HEAD + "".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    page = make_page(read_levers(), find_measured())
    if check and (not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page):
        sys.exit(f"{PAGE.relative_to(ROOT)} differs from its data: run python benchmarks/levers.py")
    if not check:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
