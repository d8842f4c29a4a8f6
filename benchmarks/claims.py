"""Writes the figures in README.md and docs/ from results. `claims.toml` says which figure is which row of which result. `make
claims` runs this.

    python benchmarks/claims.py                    writes texts, lists results whose measured files have changed since
    python benchmarks/claims.py --check            writes nothing; exits 1 where a text differs from its result
    python benchmarks/claims.py --unpack FILE      first puts the results of an archive, as run_all.py makes it, in their place

Only results of committed code count: a result that is marked as dirty is listed, and no figure is taken from it. One that was
measured beside an outdated git repository counts, too, if [published] names the commit that has exactly its files.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import provenance

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
NOT_YET = "not measured yet"
LINKS = "links"
FIGURE = re.compile(r"\[([^\]\[]*)\]\[([a-z]\w*\.\w+)\]")
BLOCK = re.compile(r"(<!-- claims:(\w+) -->\n)(.*?)(<!-- /claims -->)", re.DOTALL)
HOLE = re.compile(r"\{(\w+)([./])([\w.-]+)\}")
TAKE: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "min": min, "max": max, "count": len}


class ClaimError(Exception):
    """claims.toml or a text asks for something that does not exist."""


class Missing(Exception):
    """No result has the row: a table leaves its line out."""


@dataclass(frozen=True)
class Result:
    """One folder of results/<claim>/."""

    folder: Path
    about: dict[str, Any]

    def values(self, case: str, provider: str) -> list[float]:
        """Of the rows of a case whose provider matches."""
        rows = [row for row in self.about["rows"] if row["case"] == case and fnmatchcase(row["provider"], provider)]
        return [row["value"] for row in rows if row["value"] is not None]

    @property
    def name(self) -> str:
        return f"{self.about['claim']}/{self.folder.name}"


def code_name(about: dict[str, Any]) -> str:
    """The code of a result, as the name of its folder and [published] have it."""
    return about["commit"][:9] + ("-dirty" if about["dirty"] else "")


class Claims:
    """claims.toml and the results it speaks of."""

    def __init__(self, spec: dict[str, Any], results: Path = RESULTS) -> None:
        self._spec, self._results = spec, results
        self._read: dict[str, list[Result]] = {}

    @property
    def published(self) -> dict[str, str]:
        """Code that no commit of this history is named for -> the first commit that has it."""
        return self._spec.get("published", {})

    def results(self, claim: str) -> list[Result]:
        """Those of a claim on its hardware whose code is known, the newest first."""
        if claim not in self._spec["claims"]:
            raise ClaimError(f"claims.toml has no [claims.{claim}]; there are {', '.join(self._spec['claims'])}")
        if claim not in self._read:
            self._read[claim] = self._read_results(claim)
        return self._read[claim]

    def _read_results(self, claim: str) -> list[Result]:
        mark = f"-{self._spec['claims'][claim]['hardware']}-"
        paths = [path for path in self._results.glob(f"{claim}/*/result.json") if mark in path.parent.name]
        found = [Result(path.parent, json.loads(path.read_text(encoding="utf-8"))) for path in paths]
        known = [one for one in found if not one.about["dirty"] or code_name(one.about) in self.published]
        return sorted(known, key=lambda result: (result.about["date"], result.about["time"]), reverse=True)

    def newest(self, claim: str) -> Result:
        if not (found := self.results(claim)):
            raise Missing(claim)
        return found[0]

    def value(self, name: str) -> float:
        """The number behind a figure."""
        figure = self._figure(name)
        if "of" in figure:
            first, second = map(self.value, figure["of"])
            return first / second if figure["take"] == "ratio" else first - second
        claim = name.partition(".")[0]
        newest = self.newest(claim)
        pooled = [one for one in self.results(claim) if code_name(one.about) == code_name(newest.about)]
        sources = pooled if figure.get("pool") else [newest]
        values = [value for r in sources for value in r.values(figure["case"], figure["provider"])]
        if not values:
            raise Missing(name)
        return TAKE[figure.get("take", "median")](values)

    def show(self, name: str) -> str:
        """A figure as texts have it."""
        figure = self._figure(name)
        return figure["show"].format(self.value(name) / figure.get("divide", 1))

    def link(self, name: str, where: Path) -> str:
        """The page of the result behind a figure, or the script that will make it."""
        claim = name.partition(".")[0]
        try:
            self.value(name)
            target = self.newest(claim).folder / "result.md"
        except Missing:
            target = HERE / self._spec["claims"][claim]["script"]
        return relative(target, where)

    def _figure(self, name: str) -> dict[str, Any]:
        claim, _, figure = name.partition(".")
        self.results(claim)
        found = self._spec["claims"][claim].get(figure)
        if not isinstance(found, dict):
            raise ClaimError(f"claims.toml has no {figure} under [claims.{claim}]")
        return found

    # --- blocks of a text ---------------------------------------------------------------------------------------------

    def fill(self, template: str, where: Path) -> str:
        """The template with its {claim.figure} and {claim/file} filled in."""

        def filled(hole: re.Match[str]) -> str:
            claim, kind, rest = hole.groups()
            if kind == ".":
                return self.show(f"{claim}.{rest}")
            return relative(self.newest(claim).folder / rest, where)

        return HOLE.sub(filled, template)

    def block(self, name: str, where: Path) -> str:
        """A block as claims.toml describes it. What lacks a result is left out."""
        if name not in self._spec["blocks"]:
            raise ClaimError(f"claims.toml has no [blocks.{name}]; there are {', '.join(self._spec['blocks'])}")
        spec = self._spec["blocks"][name]
        if "text" in spec:
            try:
                return self.fill(spec["text"], where)
            except Missing:
                return ""
        make = self._lost if "lost" in spec else self._grid if "grid" in spec else self._table
        columns, lines = make(spec, where)
        lead = f"{spec['lead']}\n\n" if lines and "lead" in spec else ""
        table = [columns, ["---"] * len(columns), *lines] if lines else []
        return lead + "".join(f"| {' | '.join(cells)} |\n" for cells in table)

    def _table(self, spec: dict[str, Any], where: Path) -> tuple[list[str], list[list[str]]]:
        """Lines of templates, with the results they come from in the last column."""
        lines = []
        for cells in spec["rows"]:
            try:
                claims = dict.fromkeys(hole[1] for cell in cells for hole in HOLE.finditer(cell))
                links = [f"[{claim}]({relative(self.newest(claim).folder / 'result.md', where)})" for claim in claims]
                lines.append([*(self.fill(cell, where) for cell in cells), ", ".join(links)])
            except Missing:
                continue
        return [*spec["columns"], "result"], lines

    def _grid(self, spec: dict[str, Any], where: Path) -> tuple[list[str], list[list[str]]]:
        """Cases of one result down, its providers across."""
        claim = spec["grid"]
        if not self.results(claim):
            return [], []
        newest = self.newest(claim)
        corner = f"[{claim}]({relative(newest.folder / 'result.md', where)})"

        def cell(case: str, provider: str) -> str:
            values = newest.values(case, provider)
            return spec["show"].format(values[0] / spec.get("divide", 1)) if values else ""

        lines = [[label, *(cell(case, p) for p in spec["providers"])] for case, label in spec["cases"].items()]
        return [corner, *spec["providers"].values()], [line for line in lines if any(line[1:])]

    def _lost(self, spec: dict[str, Any], where: Path) -> tuple[list[str], list[list[str]]]:
        """Results that do not name a commit of this history, with the first commit that has their code."""
        lines = []
        for path in sorted(self._results.glob("*/*/result.json")):
            code = code_name(json.loads(path.read_text(encoding="utf-8")))
            if code in self.published:
                name = path.parents[1].name
                link = f"[{name}]({relative(path.with_suffix('.md'), where)})"
                lines.append([link, f"`{code}`", f"`{self.published[code]}`"])
        return spec["lost"], lines

    def render(self, text: str, where: Path) -> str:
        """The text with every figure and block as its result has it. `where` is its path."""
        text = BLOCK.sub(lambda m: m[0] if m[2] == LINKS else between(m, self.block(m[2], where)), text)
        names = sorted({match[2] for match in FIGURE.finditer(text)})
        text = FIGURE.sub(lambda m: f"[{self.show_or_not(m[2])}][{m[2]}]", text)
        links = "".join(f"[{name}]: {self.link(name, where)}\n" for name in names)
        if names and f"<!-- claims:{LINKS} -->" not in text:
            text += f"\n<!-- claims:{LINKS} -->\n<!-- /claims -->\n"
        return BLOCK.sub(lambda m: between(m, links) if m[2] == LINKS else m[0], text)

    def show_or_not(self, name: str) -> str:
        try:
            return self.show(name)
        except Missing:
            return NOT_YET

    def notes(self) -> list[str]:
        """What a reader of the results should know: claims without any, rows that are missing, stale and dirty results.
        Results that no figure is taken from, such as those of studies, are behind other pages."""
        lines = []
        for claim, spec in self._spec["claims"].items():
            if not self.results(claim):
                lines.append(f"{claim}: no result on {spec['hardware']}; python benchmarks/{spec['script']} makes one")
                continue
            lines += [f"{self.newest(claim).name}: {note}" for note in stale(self.newest(claim).about, self.published)]
            names = [f"{claim}.{name}" for name, figure in spec.items() if isinstance(figure, dict)]
            lines += [f"{name}: no result has its row" for name in names if self.show_or_not(name) == NOT_YET]
        for path in sorted(self._results.glob("*/*/result.json")):
            name, about = path.parent.relative_to(self._results), json.loads(path.read_text(encoding="utf-8"))
            if about["dirty"] and code_name(about) not in self.published:
                lines.append(f"{name}: made with uncommitted code, not used")
            elif about["claim"] not in self._spec["claims"]:
                lines += [f"{name}: {note}" for note in stale(about, self.published)]
        return lines


def between(block: re.Match[str], content: str) -> str:
    """The markers with something else between them, and empty lines around it: not all of Markdown is read without."""
    return block[1] + (f"\n{content}\n" if content else "") + block[4]


def relative(target: Path, where: Path) -> str:
    return Path(os.path.relpath(target, where.parent)).as_posix()


def stale(about: dict[str, Any], published: dict[str, str] | None = None) -> list[str]:
    """Which of the files that a result measured have changed since its commit. `published` names the commit of this history
    that first has the code of a result that names none of them."""
    commit, known = about["commit"], (published or {}).get(code_name(about))
    files = changed_since(known if known and about["dirty"] else commit, about["measured"])
    if files is not None:
        return files
    before = about.get("digests", {})
    changed = [name for name, now in provenance.digests(before).items() if now != before[name]]
    notes = [f"stale: {', '.join(changed)} changed since"] if changed else []
    if ask_git("rev-parse", "HEAD") is None:
        return notes
    if known and not before:
        notes = changed_since(known, about["measured"]) or []
    place = f"; {known} is the first commit with its code" if known else ""
    return [f"commit {commit[:9]} is not in this repository{place}", *notes]


def changed_since(commit: str, measured: list[str]) -> list[str] | None:
    """A note if one of the files is another now; None where git does not have the commit."""
    files = ask_git("diff", "--name-only", commit, "--", *measured, ":!benchmarks/results")
    if files is None:
        return None
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return [f"stale: {', '.join(files[:3])}{more} changed since {commit[:9]}"] if files else []


def ask_git(*command: str) -> list[str] | None:
    """The words of git's answer; None without git, without a repository, or where git fails."""
    try:
        found = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return None if found.returncode else found.stdout.split()


def texts() -> list[Path]:
    """The log keeps its figures as they were."""
    pages = (ROOT / "docs").rglob("*.md")
    return sorted([ROOT / "README.md", *(page for page in pages if "log" not in page.relative_to(ROOT).parts)])


def read_claims() -> Claims:
    return Claims(tomllib.loads((HERE / "claims.toml").read_text(encoding="utf-8")))


def unpack(archive: Path, results: Path = RESULTS) -> list[Path]:
    """Puts an archive's folders in their place. One whose name is taken by another run's result gets a number."""

    def run_of(folder: Path) -> list[str]:
        about = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return [about[name] for name in ("date", "time", "command")]

    placed = []
    with tempfile.TemporaryDirectory() as temporary, tarfile.open(archive) as packed:
        packed.extractall(temporary, filter="data")
        for source in sorted(path.parent for path in Path(temporary).glob("*/*/result.json")):
            target, number = results / source.parent.name / source.name, 1
            while target.exists() and run_of(target) != run_of(source):
                number += 1
                target = target.with_name(f"{source.name}-{number}")
            shutil.copytree(source, target, dirs_exist_ok=True)
            placed.append(target)
    return placed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--unpack", type=Path, action="append", default=[], metavar="FILE")
    arguments = parser.parse_args()
    for archive in arguments.unpack:
        print("\n".join(f"unpacked {folder.relative_to(ROOT)}" for folder in unpack(archive)))
    claims, differ = read_claims(), []
    for page in texts():
        text = page.read_text(encoding="utf-8")
        if (rendered := claims.render(text, page)) != text:
            differ.append(page.relative_to(ROOT).as_posix())
            if not arguments.check:
                page.write_text(rendered, encoding="utf-8")
    print("\n".join([*claims.notes(), *(f"{'differs' if arguments.check else 'written'}: {name}" for name in differ)]))
    sys.exit(1 if arguments.check and differ else 0)


if __name__ == "__main__":
    main()
