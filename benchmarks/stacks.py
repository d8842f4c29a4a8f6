"""The stacks of all threads of one parbank command over time: where the seconds of a start go.

    python benchmarks/stacks.py FILE train --recipe sprint --steps 20     # runs the command, and writes FILE
    python benchmarks/stacks.py --show FILE [--least 0.05]                # what each thread did, in order

A thread looks at the others every 5 ms. A line of the file is the first and the last second of equal samples, the name of the
thread, and its stack from the outside in. The looking thread needs Python's lock: where other threads hold it for long, samples
are further apart. So compare the seconds with those of a run without it. Writes FILE, and no result.
"""

import argparse
import runpy
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import FrameType

EVERY = 0.005
HERE = Path(__file__).resolve().parent


@dataclass
class Span:
    """A stack that a thread had for a while."""

    begin: float
    end: float
    thread: str
    stack: str
    """file:function:line;... from the outside in."""

    @property
    def place(self) -> str:
        """The innermost function of parbank, and the function at work in it."""
        frames = self.stack.split(";")
        ours = [frame for frame in frames if frame.startswith("parbank/")]
        return f"{ours[-1] if ours else '-'} > {frames[-1]}"


class Sampler:
    """Looks at all threads but its own until it is closed."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._began = time.perf_counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="sampler")
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        latest: dict[int, Span] = {}
        while not self._stop.wait(EVERY):
            now = time.perf_counter() - self._began
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            frames = sys._current_frames()
            for ident in latest.keys() - frames.keys():
                latest.pop(ident).end = now
            for ident, frame in frames.items():
                if ident == threading.get_ident():
                    continue
                stack, last = ";".join(reversed(list(_describe(frame)))), latest.get(ident)
                if last is not None:
                    last.end = now
                if last is None or last.stack != stack:
                    latest[ident] = Span(now, now, names.get(ident, str(ident)), stack)
                    self.spans.append(latest[ident])


def _describe(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        file = frame.f_code.co_filename.rpartition("-packages/")[2].removeprefix(f"{HERE.parent}/")
        yield f"{file}:{frame.f_code.co_name}:{frame.f_lineno}"
        frame = frame.f_back


def write(spans: list[Span], path: Path) -> None:
    lines = (f"{span.begin:.3f}\t{span.end:.3f}\t{span.thread}\t{span.stack}\n" for span in spans)
    path.write_text("".join(lines), encoding="utf-8")


def read(path: Path) -> list[Span]:
    rows = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    return [Span(float(begin), float(end), thread, stack) for begin, end, thread, stack in rows]


def describe(spans: list[Span], least: float) -> Iterator[str]:
    """A line for every place where a thread was for so many seconds at a stretch."""
    for thread in dict.fromkeys(span.thread for span in spans):
        yield thread
        own = [span for span in spans if span.thread == thread]
        for place, group in groupby(own, key=lambda span: span.place):
            found = list(group)
            if found[-1].end - found[0].begin >= least:
                yield f"{found[0].begin:9.2f} {found[-1].end:8.2f} s  {place}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="print a file that was written before")
    parser.add_argument("--least", type=float, default=0.05, help="seconds at one place that are worth a line")
    parser.add_argument("file", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="words of a parbank command")
    arguments = parser.parse_args()
    if arguments.show:
        print("\n".join(describe(read(arguments.file), arguments.least)))
        return
    sys.argv = ["parbank", *arguments.command]
    sys.path[0] = str(HERE.parent)
    sampler = Sampler()
    try:
        runpy.run_module("parbank", run_name="__main__", alter_sys=True)
    finally:
        sampler.close()
        write(sampler.spans, arguments.file)


if __name__ == "__main__":
    main()
