"""Shared by the benchmarks: how time is measured, what a bound is, and how results are written.

Times are medians of single runs between CUDA events, warm, on random data, with L2 overwritten before each run. So they are
the cost of an op inside a training step, where its input was last touched long ago. Every result holds two rates measured in
the same run, a large copy and a large bfloat16 product, from which each row's bound is computed. The same card gives other
numbers when it is hot or shared, and then its bounds move too. The providers of a case take turns: if one were timed after
the other, the last, which is ours, would be timed on the hottest card.

A provider that compiles a kernel or a graph while it is timed fails: its time would be the compiler's.

`write` makes <out>/<claim>/<date>-<hardware>-<commit>/ with result.json and result.md, the same as a table. <out> is
benchmarks/results unless --out is given.
"""

import argparse
import functools
import importlib.util
import json
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import provenance
import torch
from provenance import hardware

__all__ = ["hardware"]

RESULTS = Path(__file__).parent / "results"
FLUSH_BYTES = 256 * 2**20  # five times the L2 of an H200
TURNS = 5  # in which a provider's repeats are taken


@dataclass(frozen=True)
class Row:
    """One number of a result."""

    case: str
    provider: str
    value: float | None
    """None: the provider failed, and `note` says how."""
    unit: str = "ms"
    bound: float | None = None
    """What the hardware allows, in the same unit."""
    note: str = ""


@dataclass(frozen=True)
class Case:
    """One thing measured for several providers."""

    op: str
    """What `--only` selects by."""
    name: str
    providers: dict[str, Callable[[], Callable[[], Any]]]
    """Name -> a function that makes the inputs and returns the call to time. Built just before it is timed, then freed."""
    flops: float = 0.0
    bytes: float = 0.0
    """The work that cannot be avoided, from which the bound follows."""
    graph: bool = False
    """Time the replay of a CUDA graph: without the host."""


@dataclass
class Settings:
    quick: bool = False
    only: tuple[str, ...] = ()
    warmup: int = field(init=False)
    repeats: int = field(init=False)

    def __post_init__(self) -> None:
        self.warmup, self.repeats = (3, 10) if self.quick else (10, 50)


def run_cases(cases: Iterable[Case], settings: Settings) -> list[Row]:
    """Times every provider of every case. A provider that fails keeps its row, with the reason."""
    rows = []
    for case in cases:
        if settings.only and not any(case.op.startswith(name) for name in settings.only):
            continue
        rows += run_case(case, settings)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return rows


def run_case(case: Case, settings: Settings) -> list[Row]:
    bound = bound_ms(case.flops, case.bytes)
    ready, notes = {}, {}
    for provider, build in case.providers.items():
        try:
            ready[provider] = prepare(build(), settings, graph=case.graph)
        except Exception as error:
            notes[provider] = in_a_line(error)
    times, compiled = take_turns(ready, settings)
    notes |= compiled
    rows = [Row(case.name, name, times.get(name), "ms", bound, notes.get(name, "")) for name in case.providers]
    for row in rows:
        shown = row.note or f"{row.value:9.4f} ms"
        print(f"{row.case:48} {row.provider:24} {shown}  bound {bound:.4f}", flush=True)
    return rows


def in_a_line(error: Exception) -> str:
    """What went wrong, as the note of a row."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def measure(call: Callable[[], Any], *, settings: Settings | None = None, graph: bool = False) -> float:
    """The median time of one call in milliseconds."""
    settings = settings or Settings()
    times, compiled = take_turns({"": prepare(call, settings, graph=graph)}, settings)
    if compiled:
        raise Recompiled(compiled[""])
    return times[""]


def prepare(call: Callable[[], Any], settings: Settings, *, graph: bool) -> Callable[[], Any]:
    """The call, warm; or the replay of its graph."""
    for _ in range(settings.warmup):
        call()
    torch.cuda.synchronize()
    return capture(call) if graph else call


class Recompiled(RuntimeError):
    """Code was compiled while it was timed."""


@contextmanager
def nothing_compiles() -> Iterator[None]:
    """Raises Recompiled at its end if a kernel or a graph was built inside."""
    from parbank.training.compiled import count_kernels, count_lookups

    count_kernels()
    before = count_lookups().built
    yield
    if built := count_lookups().built - before:
        raise Recompiled(f"{built} kernels or graphs were compiled while it was timed")


def take_turns(calls: dict[str, Callable[[], Any]], settings: Settings) -> tuple[dict[str, float], dict[str, str]]:
    """The median milliseconds of each call; and of those that have none, why."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in calls}
    notes: dict[str, str] = {}
    for _ in range(TURNS):
        for name, call in calls.items():
            try:
                with nothing_compiles():
                    events = [_time(call, flush) for _ in range(max(1, settings.repeats // TURNS))]
                    torch.cuda.synchronize()
            except Recompiled as error:
                notes[name] = in_a_line(error)
                continue
            times[name] += [start.elapsed_time(end) for start, end in events]
    return {name: statistics.median(found) for name, found in times.items() if name not in notes}, notes


def _time(call: Callable[[], Any], flush: torch.Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    flush.zero_()
    # The events are queued behind the flush, so the host is ahead of the device when the call is.
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    return start, end


def capture(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call as the replay of a CUDA graph, after a warm-up on the capturing stream as PyTorch asks."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()

    def replay(_inputs: Callable[[], Any] = call) -> None:
        graph.replay()  # a graph knows addresses alone: what lies there stays only as long as the call does

    return replay


def forward_backward(function: Callable[..., Any], inputs: list[torch.Tensor]) -> Callable[[], Any]:
    """A call that runs forward and backward, with random output gradients made once."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    targets = [x for x in leaves if x.requires_grad]
    outputs = function(*leaves)
    grads = [torch.randn_like(y) for y in _tensors(outputs)]

    def call() -> Any:
        return torch.autograd.grad(_tensors(function(*leaves)), targets, grads)

    return call


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


@functools.cache
def copy_rate() -> float:
    """Bytes per second, read plus written, of a large device copy."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (measure(lambda: target.copy_(source)) / 1e3)


@functools.cache
def product_rate() -> float:
    """FLOP per second of a large bfloat16 product."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
    return 2 * n**3 / (measure(lambda: torch.mm(a, b, out=out)) / 1e3)


def bound_ms(flops: float, bytes_: float) -> float:
    """The time under which this work cannot be done at the rates measured in this run."""
    return 1e3 * max(flops / product_rate() if flops else 0.0, bytes_ / copy_rate() if bytes_ else 0.0)


def start(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Adds --out, reads the command line, and notes the code and the load of the machine before the benchmark adds its own.
    Warns where the result will count for nothing, and of other processes on the GPU: the result lists them."""
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="results go into <out>/<claim>/<date>-<hardware>-<commit>/"
    )
    arguments = parser.parse_args()
    if provenance.code_at_start()[0]["dirty"]:
        print(
            "warning: the code is not that of a commit, so no figure will be taken from this result: commit, then copy the tree "
            "with the file that `python benchmarks/provenance.py --stamp` writes",
            file=sys.stderr,
        )
    for process in provenance.load_at_start().get("other_gpu_processes", ()):
        print(f"warning: {process} on the GPU; its work slows what is measured here", file=sys.stderr)
    return arguments


def can_draw() -> bool:
    """Whether matplotlib is installed. Pictures are made of results alone, so that another machine can draw them later."""
    return importlib.util.find_spec("matplotlib") is not None


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The command line's options as a result keeps them."""
    return {name: _plain(value) for name, value in vars(arguments).items() if name != "out"}


def _plain(value: Any) -> Any:
    if isinstance(value, Path | str):
        return provenance.without_folders(str(value))
    return [_plain(x) for x in value] if isinstance(value, list | tuple) else value


def write(
    claim: str,
    rows: list[Row],
    *,
    out: Path,
    settings: dict[str, Any],
    measured: Sequence[str],
    seeds: Sequence[int] = (0,),
    peers: Sequence[dict[str, Any]] = (),
    extra: dict[str, Any] | None = None,
) -> Path:
    """Writes result.json and the table beside it; returns the path of result.json, beside which pictures and logs belong.

    `measured` names the files and folders whose change makes the result stale. `peers` says where others' code came from.
    """
    about = provenance.describe() | provenance.read_code()
    folder = out / claim / provenance.folder_name(about)
    folder.mkdir(parents=True, exist_ok=True)
    result = {"claim": claim, **about, "settings": settings, "seeds": list(seeds), "measured": sorted(measured)}
    result["digests"] = provenance.digests(measured)
    if torch.cuda.is_available():
        result["rates"] = {
            "copy_TB_per_s": round(copy_rate() / 1e12, 3),
            "bf16_product_TFLOP_per_s": round(product_rate() / 1e12, 1),
        }
    result |= {"peers": list(peers), "rows": [asdict(row) for row in rows], **(extra or {})}
    path = folder / "result.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(_markdown(result, rows), encoding="utf-8")
    return path


def _markdown(result: dict[str, Any], rows: list[Row]) -> str:
    """One line a case, one column a provider, the bound last."""
    columns: dict[str, None] = dict.fromkeys(row.provider for row in rows)
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row.case, {})[row.provider] = row
    machine, versions = result["machine"], result["versions"]
    dirty = ", changed since" if result["dirty"] else ""
    lines = [f"# {result['claim']}: {machine.get('gpu', machine['cpu'])}, {result['date']}", ""]
    lines += [f"Commit {result['commit'][:9]}{dirty}. `{result['command']}`", ""]
    lines += [", ".join(f"{name} {version}" for name, version in versions.items()), ""]
    lines += ["| case | " + " | ".join(columns) + " | bound | unit |", "| --- |" + " --- |" * (len(columns) + 2)]
    for case, found in cases.items():
        first = next(iter(found.values()))
        cells = [_cell(found.get(column)) for column in columns]
        lines.append(f"| {case} | {' | '.join(cells)} | {_number(first.bound)} | {first.unit} |")
    notes = [f"- Other work on the GPU: {process}." for process in result["load"].get("other_gpu_processes", ())]
    notes += [f"- {row.case}, {row.provider}: {row.note}" for row in rows if row.note]
    notes += [
        f"- {peer['name']} at {peer['commit'][:9]}: {text}" for peer in result["peers"] for text in peer["differs"]
    ]
    return wrap_prose("\n".join([*lines, *(["", *notes] if notes else []), ""]))


def wrap_prose(text: str) -> str:
    """Markdown with lines of 118 columns at most, tables aside."""
    lines = []
    for line in text.splitlines():
        indent = "  " if line.startswith("- ") else ""
        fits = len(line) <= 118 or line.startswith(("|", "#"))
        wrapped = textwrap.wrap(line, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines += [line] if fits else wrapped
    return "\n".join(lines) + "\n"


def _cell(row: Row | None) -> str:
    return "" if row is None else "failed" if row.value is None else _number(row.value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
