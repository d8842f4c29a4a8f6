"""How quickly text becomes tokens: MB/s for each part of a preparation, for each core, and its largest memory.

    python benchmarks/prepare.py --data SPEC [--cores 1,4,16]
    python benchmarks/prepare.py --data text:FILE --gigabytes 10 --cores 16      (needs three times that on the disk)

Every preparation is a process of its own with an empty cache, limited to so many cores. --gigabytes writes a .jsonl file of that
size first: the text again and again, each copy with its own number in every document, so that no two documents are equal. The
serial parts, unpacking and the tokenizer's training, are in the total, so a short text has fewer MB/s a core than a long one.
Bound: none. Writes benchmarks/results/prepare, or the folder of --claim.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402
import provenance  # noqa: E402

from parbank.data.sources import parse_spec  # noqa: E402
from parbank.data.sources.source import Corpus, Skipped  # noqa: E402
from parbank.files import default_cache  # noqa: E402

MEASURED = ("parbank/data", "benchmarks/prepare.py")
PART = re.compile(r"(reading|comparing|tokenising): ([\d.]+) MB in ([\d.]+) s|(trained a tokenizer) .* in ([\d.]+) s")

# Prints the manifest's sizes and the largest memory of the process.
CHILD = """
import json, os, resource, sys
from pathlib import Path
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[: int(sys.argv[2])])
from parbank.data.dataset import ensure_ready
_, manifest = ensure_ready(sys.argv[1], int(sys.argv[3]), Path(sys.argv[4]), lambda line: print(line, flush=True))
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"bytes": manifest["train"]["bytes"] + manifest["val"]["bytes"], "memory": memory}))
"""


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


def prepare(spec: str, cores: int, vocab_size: int) -> list[harness.Row]:
    """One preparation on so many cores."""
    began, rows, lines = time.perf_counter(), [], []
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-c", CHILD, spec, str(cores), str(vocab_size), cache]
        environment = {**os.environ, "PYTHONPATH": provenance.python_path(), "PARBANK_CACHE": cache}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                lines.append(line)
                print(line, end="", flush=True)
    if child.returncode:
        raise SystemExit(f"the preparation failed with {child.returncode}: see its output above")
    seconds, found = time.perf_counter() - began, json.loads(lines[-1])
    provider = f"{cores} cores"
    for line in lines:
        if part := PART.match(line):
            rows.append(harness.Row(f"prepare: {part[1] or part[4]}", provider, float(part[3] or part[5]), "s"))
    rate = found["bytes"] / 1e6 / seconds
    return [
        *rows,
        harness.Row("prepare: whole", provider, seconds, "s", note=f"{found['bytes']:,} bytes of text"),
        harness.Row("prepare: rate", provider, rate, "MB/s"),
        harness.Row("prepare: rate of a core", provider, rate / cores, "MB/s"),
        harness.Row("prepare: largest memory", provider, found["memory"] / 1e6, "MB"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--gigabytes", type=float, default=0.0, help="enlarge the text to this size")
    parser.add_argument("--cores", default="", help="separated by commas; all that there are if not given")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--claim", default="prepare", help="the result's folder")
    arguments = harness.start(parser)
    cores = [int(word) for word in arguments.cores.split(",") if word] or [len(os.sched_getaffinity(0))]
    rows: list[harness.Row] = []
    with tempfile.TemporaryDirectory() as folder:
        spec = arguments.data
        if arguments.gigabytes:
            spec = enlarge(spec, int(1e9 * arguments.gigabytes), Path(folder, "large.jsonl"))
        for count in cores:
            rows += prepare(spec, count, arguments.vocab_size)
            options = harness.settings_of(arguments)
            written = harness.write(arguments.claim, rows, out=arguments.out, settings=options, measured=MEASURED)
    print(written.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
