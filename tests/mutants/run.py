"""Plants the faults of mutants.toml, one at a time, and sees whether the tests named beside each of them notice.

    python tests/mutants/run.py                      all of them
    python tests/mutants/run.py --only NAME ...      some of them
    python tests/mutants/run.py --report FILE.md     also writes the table

Each fault goes into a fresh copy of the tree; the working tree is never changed. A mutant is killed when the tests named
for it pass on the sound tree and one of them fails on the mutant. A mutant that cannot be imported, or whose tests hang,
does not count as killed: it says nothing about what the tests hold.
"""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.toml")
LIMIT_SECONDS = 300.0  # of one selection, which takes seconds; beside other work on the machine some take a minute
SOUND_SECONDS = 1800.0  # of all selections together on the sound tree, which take about two minutes
FAILED = 1  # pytest's exit code where tests ran and some of them failed


@dataclass(frozen=True)
class Mutant:
    """One fault: `old` stands exactly once in `file` and becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    why: str
    """What the fault would do to somebody."""
    tests: tuple[str, ...]
    """The pytest selection that is to notice it."""

    def plant(self, tree: Path) -> None:
        path = tree / self.file
        path.write_text(path.read_text(encoding="utf-8").replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    mutant: Mutant
    outcome: str
    """killed, survived, broken (its tests did not run) or hung."""
    by: str
    """The first test that failed."""
    seconds: float


def load_mutants() -> list[Mutant]:
    table = tomllib.loads(LIST.read_text(encoding="utf-8"))
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in table["mutant"]]


def find_faults(mutants: Iterable[Mutant], root: Path = ROOT) -> list[str]:
    """What is wrong with the list itself, a line each."""
    mutants, found = list(mutants), []
    names = [mutant.name for mutant in mutants]
    found += [f"{name}: the name is used twice" for name in sorted({n for n in names if names.count(n) > 1})]
    for mutant in mutants:
        path = root / mutant.file
        count = path.read_text(encoding="utf-8").count(mutant.old) if path.is_file() else 0
        if count != 1:
            found.append(f"{mutant.name}: its old text stands {count} times in {mutant.file}, it must stand there once")
        if mutant.old == mutant.new:
            found.append(f"{mutant.name}: old and new text are the same")
        missing = [test for test in mutant.tests if not (root / test.split("::")[0]).exists()]
        found += [f"{mutant.name}: there is no {test}" for test in missing]
        if not mutant.tests:
            found.append(f"{mutant.name}: it names no tests")
    return found


@contextmanager
def copied_tree() -> Iterator[Path]:
    """The files of the working tree that git does not ignore, as they are now, in a folder of their own."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    with tempfile.TemporaryDirectory(prefix="parbank-mutant-") as folder:
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # a file that another test made and has removed since it was listed
                    shutil.copy2(ROOT / name, Path(folder) / name)
        yield Path(folder)


def run_tests(tree: Path, tests: Iterable[str], limit: float = LIMIT_SECONDS) -> tuple[int | None, str]:
    """pytest's exit code in a tree, None where it ran out of time, and the first test that failed."""
    # No bytecode: a mutant may have the size and the second of the file it replaces, which is all Python compares.
    own = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    find = f"import sys, importlib.util as u; sys.exit(u.find_spec('parbank').origin != {str(tree / 'parbank/__init__.py')!r})"
    subprocess.run(
        [sys.executable, "-c", find], cwd=tree, env={**os.environ, **own}, check=True
    )  # not an installed one
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return done.returncode, failed[1] if failed else done.stdout[-300:]


def judge(mutant: Mutant) -> Verdict:
    with copied_tree() as tree:
        mutant.plant(tree)
        began = time.monotonic()
        code, by = run_tests(tree, mutant.tests)
        outcome = {0: "survived", FAILED: "killed", None: "hung"}.get(code, "broken")
        return Verdict(mutant, outcome, "" if outcome == "survived" else by, time.monotonic() - began)


def check_sound(mutants: list[Mutant]) -> str:
    """What fails on the sound tree among the tests that are to notice mutants; nothing where all of them pass."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with copied_tree() as tree:
        code, by = run_tests(tree, tests, SOUND_SECONDS)
    return "" if code == 0 else by or "a test hangs"


def write_report(verdicts: list[Verdict], path: Path, seconds: float) -> None:
    commit, changed = (
        subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    )
    lines = [
        "# Mutants",
        "",
        f"Made by `python tests/mutants/run.py --report {path.name}` at commit {commit}{' (changed)' if changed else ''}.",
        f"Python {platform.python_version()}, {os.cpu_count()} cores that other work may have shared.",
        f"{sum(v.outcome == 'killed' for v in verdicts)} of {len(verdicts)} mutants are killed, in {seconds:.0f} s.",
        "[mutants.toml](mutants.toml) says what each fault would do.",
        "",
        "| mutant | file | outcome | by | seconds |",
        "| --- | --- | --- | --- | ---: |",
    ]
    for verdict in sorted(verdicts, key=lambda v: (v.mutant.file, v.mutant.name)):
        by = verdict.by.removeprefix("tests/").replace("|", "\\|")
        cells = (verdict.mutant.name, f"`{verdict.mutant.file}`", verdict.outcome, f"`{by}`" if by else "")
        lines.append(f"| {' | '.join(cells)} | {verdict.seconds:.1f} |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants alone")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="write the table here")
    options = parser.parse_args()
    mutants = load_mutants()
    if unknown := sorted(set(options.only or ()) - {mutant.name for mutant in mutants}):
        parser.error(f"no mutant is called {unknown[0]}")
    mutants = [mutant for mutant in mutants if not options.only or mutant.name in options.only]
    if faults := find_faults(mutants):
        print("\n".join(faults))
        return 1
    if failing := check_sound(mutants):
        print(f"the sound tree fails {failing}; a mutant means nothing before that passes")
        return 1
    began, verdicts = time.monotonic(), list[Verdict]()
    with ThreadPoolExecutor(options.jobs) as pool:
        for verdict in pool.map(judge, mutants):
            verdicts.append(verdict)
            print(f"{verdict.outcome:8} {verdict.seconds:6.1f} s  {verdict.mutant.name}  {verdict.by}", flush=True)
    if options.report is not None:
        write_report(verdicts, options.report, time.monotonic() - began)
    alive = [verdict.mutant.name for verdict in verdicts if verdict.outcome != "killed"]
    print(
        f"{len(verdicts) - len(alive)} of {len(verdicts)} killed"
        + (f"; not killed: {', '.join(alive)}" if alive else "")
    )
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
