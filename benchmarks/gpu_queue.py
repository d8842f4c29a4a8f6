"""Runs what waits for a GPU, the most valuable first, inside a time limit; a second call goes on where the first stopped.

    python benchmarks/provenance.py --stamp
    python benchmarks/gpu_queue.py --data SPEC --seconds 570 --out DIR          # again, until the table has no line "open"
    python benchmarks/gpu_queue.py --data SPEC --list

Each step is a process of its own with a time limit of its own. A step that fails or is cut off does not stop the others, and a
step that does not fit in the time left makes way for a shorter one. After every step, DIR has the table, the ends of the logs
and every result so far, in at most 8 files of 16 MiB: a call that is cut off loses only the step under way. `python
benchmarks/claims.py --unpack DIR/results.tar.gz` puts results in their place. --work holds the state: steps that have ended well
or failed are not run again, unless --again names them. A step that the end of a call cut off comes first in the next call. To
go on on another machine, copy DIR/queue.json to --work there: it says what has ended.

The seconds below are those of one H200, from earlier results where there are some. Commands are those of run_all.py and
studies.py.
"""

import argparse
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE)]

import provenance  # noqa: E402
import run_all  # noqa: E402

MOST_BYTES = 16 * 2**20 - 2**16
LOG_BYTES = 100_000  # of the end of each log
STOP_SECONDS = 10.0  # between the request to end and the end
FITS = 0.9
"""Of its estimate: a step starts if so much is left. Most estimates are of a start with nothing compiled."""
LEAST = 80.0  # seconds for which a step that goes on is started, unless one piece of its work takes longer
RESERVE = 40.0  # of them, seconds in which such a step stops and writes what it has
SEEDS = (7, 8, 9)


@dataclass(frozen=True)
class Step:
    """One process."""

    group: int
    """Of the queue: 1 works at all, 2 tests, 3 start and pass, 4 optimizer, 5 plans, 6 studies, 7 scores and files."""
    command: str
    """{python}, {data}, {runs}, {results} and {dev} are filled in; a name of run_all.py alone stands for its command."""
    seconds: float
    limit: float = 0.0
    """Seconds; twice the estimate if not given."""
    seeds: tuple[int, ...] = (SEEDS[0],)
    after: tuple[str, ...] = ()
    """Steps that must be done: until then it stays open."""
    goes_on: bool = False
    """Whether a second call goes on where the first was cut off; then it starts if `least` seconds are left."""
    least: float = LEAST


def _test(folders: str, seconds: float) -> Step:
    words = "-m gpu -q -rf -p no:cacheprovider --maxfail=40"
    return Step(2, f"{{python}} -m pytest {words} {folders}", seconds)


def _study(claim: str, words: str, seconds: float, least: float = LEAST) -> Step:
    script = "{python} benchmarks/studies.py --claim " + f"{claim} --seconds {{left}} --out {{results}} -- "
    return Step(6, script + words, seconds, limit=600, goes_on=True, least=least)


STEPS: dict[str, Step] = {
    "smoke": Step(1, "{python} benchmarks/smoke.py --data {data} --runs {runs}/smoke", 140, limit=240),
    "auto": Step(5, "auto", 200),
    "adaptation": Step(7, "adaptation", 120),
    "compression": Step(7, "compression", 240),
    "auto60": Step(5, "auto60", 130),
    "optimizer_loop": Step(4, "optimizer_loop", 390),
    "tests_optim": _test("tests/optim tests/test_graphs.py tests/test_runtime.py", 75),
    "tests_rest": _test("tests/training tests/model tests/eval tests/plan tests/study tests/data tests/faults tests/quant", 125),
    "startup": Step(3, "startup", 200),
    "newton_schulz_sizes": Step(4, "newton_schulz_sizes", 150),
    "tests_ops": _test("tests/ops", 200),
    "startup_auto": Step(3, "startup_auto", 180),
    "step": Step(3, "step", 170),
    "sprint": Step(3, "sprint", 185),
    "peer_golf": Step(3, "peer_golf", 250),
    "optimizer": Step(4, "optimizer", 260),
    "optimizer_large": Step(4, "optimizer_large", 150),
    "newton_schulz": Step(4, "newton_schulz", 45),
    "quantisation": Step(3, "quantisation", 100),
    "scoring": Step(7, "scoring", 150),
    "study_levers30": _study("study_levers30", "benchmarks/studies/levers30.toml --data {data} --out {runs}/levers30", 1000),
    "ladder": Step(5, "{python} benchmarks/ladder.py --data {data} --seconds {left} --runs {runs}/ladder --out {results}", 5400,
                   limit=600, goes_on=True, least=140),
    "plan_runs": Step(5, "{python} benchmarks/plan_runs.py --grid h200 --text corpus={dev} --out {results}/plan_runs.jsonl", 1500,
                      limit=600, goes_on=True, least=200),
    "fit": Step(5, "{python} -m parbank.plan.fit {results}/plan_runs.jsonl --out {results}/fit", 20, after=("plan_runs",)),
    "study_seeds": _study("study_seeds", "seeds --recipe sprint --seeds 5 --keep --data {data} --out {runs}/seeds", 620, least=175),
    "study_kernels": _study("study_kernels", "published-kernels --out {runs}/kernels", 360),
    "study_levers120": _study("study_levers120", "benchmarks/studies/levers120.toml --data {data} --out {runs}/levers120", 870,
                              least=175),
    "study_ranks": Step(6, "{python} benchmarks/study_ranks.py {runs}/levers30 {runs}/levers120 --out {results}", 20,
                        limit=90, after=("study_levers30", "study_levers120")),
    "startup_eval": Step(7, "startup_eval", 420),
    "optimizer_loop_large": Step(4, "optimizer_loop_large", 420),
    "peer_autoresearch": Step(3, "peer_autoresearch", 220),
    "auto_8": Step(5, "auto", 185, seeds=SEEDS[:2]),
    "auto_9": Step(5, "auto", 185, seeds=SEEDS),
    "convergence": Step(4, "convergence", 300),
}  # fmt: skip


@dataclass
class Queue:
    """The steps, and what became of them."""

    data: str
    work: Path
    out: Path
    ends: float
    """When this call must be over, on the clock of time.monotonic."""
    steps: dict[str, Step]

    def __post_init__(self) -> None:
        self.runs, self.results, self.logs = self.work / "runs", self.work / "results", self.work / "logs"
        for folder in (self.runs, self.results, self.logs, self.out):
            folder.mkdir(parents=True, exist_ok=True)
        self._file, self._running = self.work / "queue.json", self.work / "running.json"
        self.found: dict[str, dict[str, Any]] = json.loads(self._file.read_text()) if self._file.exists() else {}
        self.code = provenance.read_commit()

    @property
    def left(self) -> float:
        return self.ends - time.monotonic()

    def command(self, step: Step, left: float) -> list[str]:
        if step.command in run_all.BENCHMARKS:
            given = self._arguments(",".join(map(str, step.seeds)))
            given.model = run_all.artifact(self._arguments(str(SEEDS[0])))
            return run_all.command_of(step.command, given)
        dev = self.data if "holdout=" in self.data else f"{self.data},holdout=dev"
        values = {"python": sys.executable, "data": self.data, "dev": dev, "runs": self.runs, "results": self.results}
        seconds = max(30.0, left - RESERVE)
        return [word.format(**values, left=f"{seconds:.0f}") for word in shlex.split(step.command)]

    def _arguments(self, seed: str) -> argparse.Namespace:
        """Of run_all.py."""
        return argparse.Namespace(data=self.data, seed=seed, model=None, work=self.runs, results=self.results)

    def may_run(self, name: str) -> bool:
        """Whether a step is open, has what it needs, and fits in what is left."""
        step = self.steps[name]
        there = all(self.state(other) == "done" for other in step.after)
        benchmark = run_all.BENCHMARKS.get(step.command)
        if benchmark is not None and "{run}" in benchmark.command:
            there = there and (self.runs / "sprint" / str(SEEDS[0]) / "model.pbk").exists()
        if benchmark is not None and "{model}" in benchmark.command:
            there = there and run_all.artifact(self._arguments(str(SEEDS[0]))).exists()
        least = step.least if step.goes_on else FITS * step.seconds
        return there and self.left > least and self.state(name) not in ("done", "failed")

    def state(self, name: str) -> str:
        found: str = self.found.get(name, {}).get("state", "open")
        return found

    def run(self, name: str) -> None:
        """Runs a step and notes what became of it."""
        step = self.steps[name]
        own = step.limit or 2 * step.seconds
        limit = min(own, self.left)
        command, began = self.command(step, limit), time.monotonic()
        print(f"\n=== {name}, at most {limit:.0f} s: {shlex.join(command)}", flush=True)
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"PYTHONPATH": provenance.python_path(), "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
            _write(self._running, json.dumps({"pid": process.pid, "command": command}))
            try:
                code = process.wait(timeout=limit)
                state = "done" if code == 0 else "open" if step.goes_on else "failed"
            except subprocess.TimeoutExpired:
                _end(process)
                first = (
                    limit < own and name not in self.found
                )  # the next call has more time; once, lest it hang there, too
                state = "open" if step.goes_on or first else "cut off"
            except BaseException:  # this call is ended: nothing may go on beside the next one
                _end(process)
                raise
        self._running.unlink(missing_ok=True)
        spent = time.monotonic() - began + self.found.get(name, {}).get("seconds", 0.0)
        self.found[name] = {"state": state, "seconds": round(spent, 1), "said": self._last_line(name)}
        self.save()
        print(f"{name}: {state} after {spent:.0f} s; {self.found[name]['said']}", flush=True)

    def work_through(self, names: list[str]) -> None:
        """Runs the open steps in order. One that was cut off before comes after those that were never tried."""
        for again in (False, True):
            for name in names:
                if (self.state(name) == "cut off") == again and self.may_run(name):
                    self.run(name)

    def end_leftover(self) -> None:
        """Ends the step of an earlier call that was killed: it would go on beside what is measured now."""
        try:
            left = json.loads(self._running.read_text(encoding="utf-8"))
            words = Path(f"/proc/{left['pid']}/cmdline").read_bytes().decode().split("\0")[:-1]
        except (OSError, ValueError):
            return
        if words == left["command"]:
            print(f"ending the step that an earlier call has left running: {shlex.join(words)}", flush=True)
            with suppress(ProcessLookupError):
                os.killpg(left["pid"], signal.SIGKILL)
        self._running.unlink()

    def describe_code(self) -> str:
        """The commit that results will name, with a warning where they would count for nothing."""
        said = f"code: {self.code['commit'][:9]}, by {self.code['source']}"
        if self.code["dirty"]:
            said += "; WARNING: results will be marked as dirty and not used: commit, then run provenance.py --stamp"
        return said

    def _last_line(self, name: str) -> str:
        lines = _tail(self.logs / f"{name}.log").decode("utf-8", errors="replace").splitlines()
        return next((line.strip()[:160] for line in reversed(lines) if line.strip()), "")

    def table(self) -> str:
        rows = [self.describe_code(), ""]
        rows += ["| step | group | state | seconds | estimate | last line |", "| --- | --- | --- | --- | --- | --- |"]
        for name, step in self.steps.items():
            found = self.found.get(name, {"state": "open", "seconds": 0.0, "said": ""})
            said = found["said"].replace("|", "/")
            rows.append(
                f"| {name} | {step.group} | {found['state']} | {found['seconds']:.0f} | {step.seconds:.0f} | {said} |"
            )
        return "\n".join(rows) + "\n"

    def save(self) -> None:
        """Writes state, table and archives: at most 8 files."""
        _write(self._file, json.dumps(self.found, indent=1) + "\n")
        shutil.copy(self._file, self.out / "queue.json")
        (self.out / "table.md").write_text(self.table(), encoding="utf-8")
        pack(self.results, self.out, "results", parts=3)
        logs = {path.name: _tail(path) for path in sorted(self.logs.glob("*.log"))}
        _write_archive(self.out / "logs.tar.gz", logs)
        for name in ("sprint", "auto"):
            model = self.runs / name / str(SEEDS[0]) / "model.pbk"
            if model.exists() and model.stat().st_size <= MOST_BYTES:
                shutil.copy(model, self.out / f"{name}-{SEEDS[0]}.pbk")


def pack(folder: Path, out: Path, name: str, parts: int) -> None:
    """The files of a folder as name.tar.gz, name-2.tar.gz and so on, each below the limit; small files first."""
    groups: list[dict[str, bytes]] = [{}]
    size = 0
    for path in sorted(filter(Path.is_file, folder.rglob("*")), key=lambda path: path.stat().st_size):
        content = path.read_bytes()
        if size + len(content) > MOST_BYTES and groups[-1]:
            groups.append({})
            size = 0
        groups[-1][path.relative_to(folder).as_posix()] = content
        size += len(content)
    for number, group in enumerate(groups[:parts], 1):
        _write_archive(out / (f"{name}.tar.gz" if number == 1 else f"{name}-{number}.tar.gz"), group)
    if len(groups) > parts:
        print(f"warning: the largest files of {folder} are left out: they do not fit in {parts} archives", flush=True)


def _write_archive(path: Path, files: dict[str, bytes]) -> None:
    """In one move: a call that is cut off here leaves the last archive."""
    temporary = path.with_suffix(".new")
    with tarfile.open(temporary, "w:gz") as archive:
        for name, content in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    temporary.replace(path)


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_BYTES))
        return file.read()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Asks a process and those that it started to end, as by Ctrl-C, so that it writes what it has; then ends them."""
    for asked in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, asked)
            process.wait(STOP_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the text, as in parbank train --data")
    parser.add_argument("--seconds", type=float, default=570.0, help="of this call")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu-queue" / "out", help="table, logs and results")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "gpu-queue", help="state, runs and results")
    parser.add_argument("--only", default="", help="steps separated by commas, in this order")
    parser.add_argument("--again", default="", help="steps to run again, separated by commas")
    parser.add_argument("--list", action="store_true", help="the steps with their estimates, and their sum so far")
    arguments = parser.parse_args()
    names = [name for name in arguments.only.split(",") if name] or list(STEPS)
    again = [name for name in arguments.again.split(",") if name]
    if unknown := sorted({*names, *again} - set(STEPS)):
        parser.error(f"there is no step {unknown[0]!r}; there are {', '.join(STEPS)}")
    if arguments.list:
        total = 0.0
        for name in names:
            total += STEPS[name].seconds
            print(f"{name:20} group {STEPS[name].group}  {STEPS[name].seconds:5.0f} s  {total:6.0f} s in all")
        return
    if missing := provenance.missing_packages():
        parser.error(
            f"{', '.join(missing)} cannot be imported: install parbank's dependencies, or add them to PYTHONPATH"
        )
    ends = time.monotonic() + arguments.seconds
    queue = Queue(arguments.data, arguments.work.resolve(), arguments.out.resolve(), ends, STEPS)
    print(queue.describe_code(), flush=True)
    queue.end_leftover()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: the step under way is ended, too
    for name in again:
        queue.found.pop(name, None)
    queue.save()
    queue.work_through(names)
    print("\n" + queue.table())


if __name__ == "__main__":
    main()
