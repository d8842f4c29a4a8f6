"""What every way to spend bytes on weights costs: method x bytes x bits per byte x seconds, on one trained checkpoint.

    python benchmarks/quantisation.py CHECKPOINT --data SPEC [--calibrate text:val=PATH] [--caps 16000000,8000000]
                                      [--qat CHECKPOINT]... [--only NAME,NAME] [--rows-only] [--claim NAME] [--device cuda]
                                      [--out DIR]

Integers per row at 8 and 6 bits come first, then each technique alone on the 6-bit rows, then the solver at several caps, one of
them the size of the 6-bit file. At each cap, `rows + lzma` are the finest integers per row that fit it under lzma: the usual way
to the same size. Sizes are those of real files; weights are scored as a reader of the file gets them. Settings of
quant.method=rows (clip, groups, scales) are applied to all that they concern, embeddings included; the other techniques change
the matrices alone.

Quantisation-aware training needs checkpoints of its own. `--qat` names a checkpoint of the same run that went on from an earlier
one by `parbank train --resume --set quant.qat_share=0.2 --set quant.qat_rounding=straight` (or soft), so that its last steps are
the only difference.

Bound: float32, whose loss is 0. Writes benchmarks/results/quantisation, or the folder of --claim.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402
import quantisation_techniques as alone  # noqa: E402

from parbank.artifact.about import TOKENIZER  # noqa: E402
from parbank.artifact.calibrate import calibrate  # noqa: E402
from parbank.artifact.container import decode_artifact  # noqa: E402
from parbank.artifact.contents import pack_contents  # noqa: E402
from parbank.artifact.pack import pack_tensors, plan, unpack_tensors  # noqa: E402
from parbank.data.dataset import open_dataset  # noqa: E402
from parbank.data.validation import open_validation  # noqa: E402
from parbank.errors import ArtifactError, ConfigError  # noqa: E402
from parbank.eval.windows import score_chunked  # noqa: E402
from parbank.quant.bank import Contents  # noqa: E402
from parbank.quant.config import QuantConfig  # noqa: E402
from parbank.quant.integers import Quantised, dequantise, quantise_rows, to_half  # noqa: E402
from parbank.quant.roles import role  # noqa: E402
from parbank.quant.solver import (  # noqa: E402
    Solved,
    Solver,
)
from parbank.runtime import Runtime, pick_device  # noqa: E402
from parbank.training.load import describe_run, load_trained  # noqa: E402

MEASURED = ("parbank/quant", "parbank/artifact", "benchmarks/quantisation.py")
CAPS = (16_000_000, 12_000_000, 8_000_000, 4_000_000)
GOLF_WEIGHTS = 26_900_000  # of the golf model: a smaller model gets caps in proportion
ROWS = QuantConfig(method="rows")  # 6 bits a matrix, 8 an embedding, clip by search
SETTINGS = {
    "no clipping": replace(ROWS, clip_steps=1),
    "clip at 4 standard deviations": replace(ROWS, clip_deviations=4.0),
    "clip at 3 standard deviations": replace(ROWS, clip_deviations=3.0),
    "groups of 64": replace(ROWS, group=64),
    "power-of-two scales": replace(ROWS, scales="exponent"),
    "groups of 64, power-of-two scales": replace(ROWS, group=64, scales="exponent"),
}
"""What quant.method=rows can do instead, each alone; shared exponents also for groups, which are what they are made for."""


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    method: str
    bytes: int
    bpb: float
    lost: float
    """bpb above the float32 weights."""
    seconds: float
    """Quantising and coding; calibration is a row of its own."""
    note: str = ""


class Bench:
    """One model on one device, with everything the methods share."""

    def __init__(
        self,
        checkpoint: Path,
        data: str | None,
        calibrate: str | None,
        device: torch.device,
        arguments: argparse.Namespace,
    ) -> None:
        self.runtime, self.arguments = Runtime(device=device), arguments
        self.model, self.tokenizer, self.config = load_trained(checkpoint, device)
        data = data or self.config.data
        self.val = open_validation(data, self.tokenizer).tokens
        self.train = (
            open_validation(calibrate, self.tokenizer).tokens
            if calibrate
            else open_dataset(data, vocab_size=self.config.model.vocab_size).train
        )
        self.tensors = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.roles = {name: role(name, tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        self.arrays = {name: tensor.float().cpu().contiguous().numpy() for name, tensor in self.tensors.items()}
        self.results: list[Result] = []
        self.calibration_seconds = 0.0
        self.base = self.score(self.tensors)
        print(f"float32: {self.base:.5f} bpb", flush=True)

    def score(self, weights: dict[str, Tensor]) -> float:
        self.model.load_state_dict(weights)
        context = self.config.batch.sequence_length
        found = score_chunked(self.model, self.val, self.tokenizer, context=context, runtime=self.runtime)
        return found.bpb

    def build(self, contents: Contents, coder: str = "ans") -> bytes:
        roles, extra = {name: self.roles[name] for name in contents}, {TOKENIZER: self.tokenizer.model_bytes}
        return pack_contents(contents, roles, describe_run(self.config).to_meta(), extra, coder=coder)

    def record(self, method: str, contents: Contents, began: float, *, coder: str = "ans", note: str = "") -> Result:
        """Codes the contents and scores what a reader gets."""
        data = self.build(contents, coder)
        self.sync()
        return self.add(method, len(data), read(contents), time.perf_counter() - began, note)

    def add(self, method: str, size: int, weights: dict[str, Tensor], seconds: float, note: str = "") -> Result:
        bpb = self.score(weights)
        result = Result(method, size, bpb, bpb - self.base, seconds, note)
        self.results.append(result)
        print(f"{method:45} {size:12,} bytes  {bpb:.5f} bpb  {result.lost:+.5f}  {seconds:6.1f} s  {note}", flush=True)
        self.save()
        return result

    def save(self) -> Path:
        """Writes what there is: after every row, so that a run that is cut off leaves it."""
        extra = {"results": [asdict(result) for result in self.results], "float32_bpb": self.base}
        path = harness.write(
            self.arguments.claim,
            rows_of(self),
            out=self.arguments.out,
            settings=harness.settings_of(self.arguments),
            seeds=[self.config.seed],
            measured=MEASURED,
            extra=extra,
        )
        if harness.can_draw():
            draw(self.results, self.base, path.with_name("sizes.png"))
        page = path.with_suffix(".md")
        page.write_text(page.read_text() + table(self.results))
        return path

    def sync(self) -> None:
        self.runtime.synchronize()

    def halves(self) -> Contents:
        return {name: to_half(array, name=name) for name, array in self.arrays.items()}

    @cached_property
    def six(self) -> Contents:
        """The 6-bit rows that techniques start from."""
        return quantise(self.arrays, ROWS)

    @cached_property
    def solver(self) -> Solver:
        began, config = time.perf_counter(), QuantConfig()
        self.model.load_state_dict(self.tensors)
        context = self.config.batch.sequence_length
        calibration = calibrate(self.model, self.train, config, context=context, runtime=self.runtime)
        solver = Solver(self.tensors, self.roles, calibration, config, device=self.runtime.device, say=print)
        self.sync()
        self.calibration_seconds = time.perf_counter() - began
        print(f"calibrated and factorised in {self.calibration_seconds:.1f} s", flush=True)
        return solver

    @cached_property
    def solved(self) -> tuple[Solved, float]:
        """By the solver at the size of the 6-bit rows under lzma, with the seconds that took."""
        return self.solve(len(self.build(self.six, "lzma")))

    def solve(self, cap: int) -> tuple[Solved, float]:
        solver, began = self.solver, time.perf_counter()
        return solver.solve(self.build, cap), time.perf_counter() - began


def quantise(arrays: dict[str, Any], config: QuantConfig) -> Contents:
    """Integers per row or group as `config` says: what `parbank pack` makes of it without a cap."""
    found: Contents = {}
    for spec in plan({name: array.shape for name, array in arrays.items()}, config, config.matrix_q):
        found[spec.name] = (
            quantise_rows(
                arrays[spec.name],
                spec.q,
                config.clip_fractions,
                groups=spec.groups,
                deviations=config.clip_deviations,
                exponents=config.scales == "exponent",
                name=spec.name,
            )
            if spec.q
            else to_half(arrays[spec.name], name=spec.name)
        )
    return found


def read(contents: Contents) -> dict[str, Tensor]:
    """The weights as a reader of the file gets them (a test holds that packing and reading gives exactly these)."""
    return {
        name: torch.from_numpy(dequantise(c) if isinstance(c, Quantised) else c.astype("float32"))
        for name, c in contents.items()
    }


RowMaker = Callable[[str], object]
"""Records one row under the name it is given."""


def stored_rows(bench: Bench) -> dict[str, RowMaker]:
    """What needs the weights alone."""

    def store(method: str, config: QuantConfig) -> None:
        began = time.perf_counter()
        bench.record(method, quantise(bench.arrays, config), began, coder=config.coder)

    def halve(method: str) -> None:
        began = time.perf_counter()
        bench.record(method, bench.halves(), began)

    eight = replace(ROWS, matrix_bits=8, coder="lzma")
    found: dict[str, RowMaker] = {
        "float16": halve,
        "int8 rows + lzma": partial(store, config=eight),
        "int6 rows + lzma": partial(store, config=replace(ROWS, coder="lzma")),
        "int6 rows + ANS": partial(store, config=ROWS),
    }
    return found | {f"int6 rows, {name}": partial(store, config=config) for name, config in SETTINGS.items()}


def choose_caps(bench: Bench, given: list[int]) -> list[int]:
    """Those of the golf model, or in proportion for a smaller one."""
    share = min(1.0, sum(array.size for array in bench.arrays.values()) / GOLF_WEIGHTS)
    return given or [cap if share > 0.9 else round(share * cap) for cap in CAPS]


def capped_rows(bench: Bench, caps: list[int]) -> dict[str, RowMaker]:
    """Integers per row under lzma, as fine as a cap allows."""

    def store(method: str, cap: int) -> None:
        began, config = time.perf_counter(), replace(ROWS, coder="lzma")
        extra = {TOKENIZER: bench.tokenizer.model_bytes}
        try:
            packed = pack_tensors(
                bench.tensors, config, max_bytes=cap, meta=describe_run(bench.config).to_meta(), extra_sections=extra
            )
        except ArtifactError as error:
            print(f"{method}: {error}", flush=True)
            return
        seconds = time.perf_counter() - began
        bench.add(method, len(packed.data), unpack_tensors(decode_artifact(packed.data)), seconds)

    return {f"rows + lzma at {cap:,}": partial(store, cap=cap) for cap in caps}


def qat_rows(bench: Bench, checkpoint: Path) -> dict[str, RowMaker]:
    """Another checkpoint's weights as they are and as 6-bit rows, each against the first one's float32."""
    model, _, trained = load_trained(checkpoint, bench.runtime.device)
    quant, tensors = trained.quant, model.state_dict()
    if not quant.qat_share:
        raise ConfigError(
            f"{checkpoint} was trained without QAT; --qat takes one that ended with quant.qat_share above 0"
        )
    arrays = {name: tensor.float().cpu().contiguous().numpy() for name, tensor in tensors.items()}
    note = f"the last {quant.qat_share:.0%} of the budget at {quant.qat_bits} bits, {quant.qat_rounding} rounding"

    def keep(method: str) -> None:
        bench.add(method, sum(4 * array.size for array in arrays.values()), tensors, 0.0, note)

    def store(method: str) -> None:
        began = time.perf_counter()
        bench.record(method, quantise(arrays, ROWS), began, note=note)

    label = f"late QAT, {quant.qat_rounding}"
    return {f"{label}, float32": keep, f"int6 rows, {label}": store}


def calibrated_rows(bench: Bench, caps: list[int]) -> dict[str, RowMaker]:
    """What measures the loss on training text first."""

    def apply_one(method: str, technique: alone.Technique) -> None:
        banks, base = bench.solver.plain, bench.six  # made by the first row that asks, outside its seconds
        began = time.perf_counter()
        bench.record(method, alone.apply(technique, banks, base, bench.roles), began)

    def solve(method: str, cap: int) -> None:
        try:
            add_solved(bench, method, *bench.solve(cap))
        except ArtifactError as error:  # a small model's tokenizer and floats may leave nothing of a small cap
            print(f"{method}: {error}", flush=True)

    found: dict[str, RowMaker] = {
        "solver at the size of int6 + lzma": lambda method: add_solved(bench, method, *bench.solved)
    }
    found |= {f"int6 rows, {name}": partial(apply_one, technique=one) for name, one in alone.TECHNIQUES.items()}
    found["int6 rows, pruning of +-1"] = lambda method: apply_one(method, alone.prune_at(bench.solved[0].multiplier))
    return found | {f"solver at {cap:,}": partial(solve, cap=cap) for cap in caps}


def add_solved(bench: Bench, method: str, solved: Solved, seconds: float) -> None:
    """Back from the file."""
    weights = unpack_tensors(decode_artifact(solved.data))
    note = f"{len(solved.builds)} builds, expected +{solved.expected_loss:.5f} nats a token"
    bench.add(method, len(solved.data), weights, seconds, note)


def choose(rows: dict[str, RowMaker], only: list[str]) -> dict[str, RowMaker]:
    """The rows whose names hold one of these words; all of them where there are none."""
    for word in only:
        if not any(word in name for name in rows):
            raise ConfigError(f"no row has {word!r} in its name; there are: {'; '.join(rows)}")
    return {name: make for name, make in rows.items() if not only or any(word in name for word in only)}


def draw(results: list[Result], base: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2))
    solver = sorted((r for r in results if r.method.startswith("solver")), key=lambda r: r.bytes)
    others = [r for r in results if not r.method.startswith(("solver", "late QAT"))]
    axes.plot([r.bytes / 1e6 for r in solver], [r.bpb for r in solver], "o-", color="#2a6f97", label="solver")
    axes.plot([r.bytes / 1e6 for r in others], [r.bpb for r in others], "s", color="#b8b8b8", label="one technique")
    for r in others:
        axes.annotate(r.method, (r.bytes / 1e6, r.bpb), fontsize=6, xytext=(3, 3), textcoords="offset points")
    axes.axhline(base, color="black", linewidth=0.8, linestyle=":", label="float32")
    axes.set(xlabel="megabytes of the file", ylabel="bits per byte, lower is better", xscale="log")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def rows_of(bench: Bench) -> list[harness.Row]:
    rows = []
    for result in bench.results:
        rows.append(harness.Row(result.method, "bytes", result.bytes, "bytes, bpb, bpb lost, s", None, result.note))
        rows.append(harness.Row(result.method, "val bpb", result.bpb))
        rows.append(harness.Row(result.method, "bpb lost", result.lost))
        rows.append(harness.Row(result.method, "seconds", result.seconds))
    rows.append(harness.Row("calibration and factorisation", "seconds", bench.calibration_seconds, "s"))
    return rows


def table(results: list[Result]) -> str:
    """All digits: the table above has four, and what is lost begins behind them."""
    lines = ["", "| method | bytes | val bpb | lost | seconds |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {r.method} | {r.bytes:,} | {r.bpb:.5f} | {r.lost:+.5f} | {r.seconds:.1f} |" for r in results]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--data", default=None)
    parser.add_argument(
        "--calibrate", default=None, help="training text in a file of its own: text:val=PATH takes all of it"
    )
    parser.add_argument("--caps", default="", help="bytes, separated by commas")
    parser.add_argument("--only", default="", help="rows with one of these, separated by commas, in their names")
    parser.add_argument(
        "--rows-only", action="store_true", help="leave out what needs calibration: GPTQ, the solver, ..."
    )
    parser.add_argument("--claim", default="quantisation", help="the result's folder")
    parser.add_argument(
        "--qat",
        type=Path,
        action="append",
        default=[],
        help="a checkpoint of the same run that ended with QAT; repeatable",
    )
    parser.add_argument("--device", default="auto")
    arguments = harness.start(parser)
    device = pick_device(arguments.device)
    bench = Bench(arguments.checkpoint, arguments.data, arguments.calibrate, device, arguments)
    caps = choose_caps(bench, [int(cap) for cap in arguments.caps.split(",") if cap])
    rows = stored_rows(bench) | capped_rows(bench, caps)
    for checkpoint in arguments.qat:
        rows |= qat_rows(bench, checkpoint)
    if not arguments.rows_only:
        rows |= calibrated_rows(bench, caps)
    for name, make in choose(rows, [word for word in arguments.only.split(",") if word]).items():
        make(name)
    print(bench.save().with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
