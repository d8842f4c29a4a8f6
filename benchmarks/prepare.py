"""How quickly text becomes tokens: MB/s for each part of a preparation, for each core, and its largest memory.

    python benchmarks/prepare.py --data SPEC [--cores 1,4,16] [--vocab-size 8192 --case-operators]
    python benchmarks/prepare.py --data text:FILE --gigabytes 10 --cores 16      (needs three times that on the disk)

Every preparation is a process of its own with an empty cache, limited to so many cores. --gigabytes writes a .jsonl file of that
size first: the text again and again, each copy with its own number in every document, so that no two documents are equal. The
serial parts, unpacking and the tokenizer's training, are in the total, so a short text has fewer MB/s a core than a long one.
The memory is that of the process and its workers together, looked at 20 times a second; pages that they share count for each.
Bound: none. Writes benchmarks/results/prepare, or the folder of --claim.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402
import provenance  # noqa: E402

from parbank.cores import count_cores  # noqa: E402
from parbank.data.sources import parse_spec  # noqa: E402
from parbank.data.sources.source import Corpus, Skipped  # noqa: E402
from parbank.files import default_cache  # noqa: E402

MEASURED = ("parbank/data", "benchmarks/prepare.py")
PART = re.compile(r"(reading|comparing|tokenising): ([\d.]+) MB in ([\d.]+) s|(trained a tokenizer) .* in ([\d.]+) s")

# Prints the bytes of the text.
CHILD = """
import os, sys
from pathlib import Path
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[: int(sys.argv[2])])
from parbank.data.dataset import ensure_ready
from parbank.data.tokenizer import TokenizerConfig
spec, vocab_size, cache, operators = sys.argv[1], int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5] == "yes"
config = TokenizerConfig(case_operators=operators)
_, manifest = ensure_ready(spec, vocab_size, cache, lambda line: print(line, flush=True), tokenizer=config)
print(manifest["train"]["bytes"] + manifest["val"]["bytes"])
"""


class MemoryMeter:
    """The largest memory of a process and its children together."""

    def __init__(self, pid: int) -> None:
        self.largest = 0
        self._pid, self._stop = pid, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self.largest = max(self.largest, self._look(self._pid))

    def _look(self, pid: int) -> int:
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            tasks = list(Path(f"/proc/{pid}/task").iterdir())
            children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:  # it ended meanwhile
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE") + sum(map(self._look, children))


def enlarge(spec: str, size: int, path: Path) -> str:
    """Writes a .jsonl file of about `size` bytes from the documents of a spec. Returns the spec of the file."""
    opened = parse_spec(spec).open(default_cache(), print)
    assert isinstance(opened, Corpus)
    copy = written = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            for document in opened.documents(opened.files, Skipped()):
                written += file.write(json.dumps({"text": f"{copy} {document.decode()}"}, ensure_ascii=False) + "\n")
                if written >= size:
                    break
            copy += 1
    return f"text:{path}"


def prepare(spec: str, cores: int, vocab_size: int, operators: bool) -> list[harness.Row]:
    """One preparation on so many cores."""
    began, rows, lines = time.perf_counter(), [], []
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-c", CHILD, spec, str(cores), str(vocab_size), cache, "yes" if operators else "no"]
        environment = {**os.environ, "PYTHONPATH": provenance.python_path(), "PARBANK_CACHE": cache}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            memory = MemoryMeter(child.pid)
            for line in child.stdout:
                lines.append(line)
                print(line, end="", flush=True)
            memory.close()
    if child.returncode:
        raise SystemExit(f"the preparation failed with {child.returncode}: see its output above")
    seconds, size = time.perf_counter() - began, int(lines[-1])
    provider = f"{cores} cores"
    for line in lines:
        if part := PART.match(line):
            rows.append(harness.Row(f"prepare: {part[1] or part[4]}", provider, float(part[3] or part[5]), "s"))
    rate = size / 1e6 / seconds
    return [
        *rows,
        harness.Row("prepare: whole", provider, seconds, "s", note=f"{size:,} bytes of text"),
        harness.Row("prepare: rate", provider, rate, "MB/s"),
        harness.Row("prepare: rate of a core", provider, rate / cores, "MB/s"),
        harness.Row("prepare: largest memory", provider, memory.largest / 1e6, "MB"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--gigabytes", type=float, default=0.0, help="enlarge the text to this size")
    parser.add_argument("--cores", default="", help="separated by commas; all that there are if not given")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--case-operators", action="store_true", help="as plans have them")
    parser.add_argument("--claim", default="prepare", help="the result's folder")
    arguments = harness.start(parser)
    most = count_cores()
    cores = [int(word) for word in arguments.cores.split(",") if word] or [most]
    if unlike := [count for count in cores if not 1 <= count <= most]:
        parser.error(
            f"--cores {unlike[0]}: this process may use 1 to {most}, and the result would name cores that did nothing"
        )
    rows: list[harness.Row] = []
    with tempfile.TemporaryDirectory() as folder:
        spec = arguments.data
        if arguments.gigabytes:
            spec = enlarge(spec, int(1e9 * arguments.gigabytes), Path(folder, "large.jsonl"))
        for count in cores:
            rows += prepare(spec, count, arguments.vocab_size, arguments.case_operators)
            options = harness.settings_of(arguments)
            written = harness.write(arguments.claim, rows, out=arguments.out, settings=options, measured=MEASURED)
    print(written.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
