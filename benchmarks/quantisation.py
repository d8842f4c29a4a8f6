"""What every way to spend bytes on weights costs: method x bytes x bits per byte x seconds, on one trained checkpoint.

    python benchmarks/quantisation.py CHECKPOINT --data SPEC [--calibrate text:val=PATH] [--caps 16000000,8000000]
                                      [--qat CHECKPOINT] [--rows-only] [--name NAME] [--device cuda] [--out DIR]

Integers per row at 8 and 6 bits first, then each technique alone on the 6-bit rows, then the solver at several caps, one of
them the size of the 6-bit file. Sizes are those of real files; weights are scored as a reader of the file gets them.
Training that knew of the rounding needs a checkpoint of its own: `--qat` names one of the same run that went on with
`parbank train --resume --set quant.qat_share=...`, so that its last steps are the only difference.
Writes quantisation_<hardware>_<date>.json, the table beside it, and a picture of bpb against bytes.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402

from parbank.artifact import decode_artifact  # noqa: E402
from parbank.data.dataset import open_dataset  # noqa: E402
from parbank.data.validation import open_validation  # noqa: E402
from parbank.errors import ArtifactError  # noqa: E402
from parbank.eval.calibrate import calibrate  # noqa: E402
from parbank.eval.load import TOKENIZER  # noqa: E402
from parbank.eval.score import score_chunked  # noqa: E402
from parbank.quant import QuantConfig, Solver, pack_contents, role, unpack_tensors  # noqa: E402
from parbank.quant.bank import Bank, Contents  # noqa: E402
from parbank.quant.codecs import Quantised, dequantise, quantise_rows, to_half  # noqa: E402
from parbank.quant.gptq import round_bank  # noqa: E402
from parbank.quant.low_rank import correct  # noqa: E402
from parbank.quant.pruning import prune_ones  # noqa: E402
from parbank.quant.rotation import block_size, rotate  # noqa: E402
from parbank.quant.streams import Coder  # noqa: E402
from parbank.runtime import Runtime, pick_device  # noqa: E402
from parbank.train.load import load_trained  # noqa: E402
from parbank.train.run import _meta  # noqa: E402

CAPS = (16_000_000, 12_000_000, 8_000_000, 4_000_000)
GOLF_WEIGHTS = 26_900_000  # of the golf model: a smaller model gets caps in proportion
Q6 = 31


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
        self, checkpoint: Path, data: str | None, calibrate: str | None, device: torch.device, out: Path, name: str
    ) -> None:
        self.runtime, self.out, self.name = Runtime(device=device), out, name
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

    def build(self, contents: Contents, coder: Coder = "ans") -> bytes:
        roles, extra = {name: self.roles[name] for name in contents}, {TOKENIZER: self.tokenizer.to_bytes()}
        return pack_contents(contents, roles, _meta(self.config), extra, coder=coder)

    def record(self, method: str, contents: Contents, began: float, *, coder: Coder = "ans", note: str = "") -> Result:
        """Codes the contents and scores what a reader gets."""
        data = self.build(contents, coder)
        self.sync()
        return self.add(method, len(data), read(contents), time.perf_counter() - began, note)

    def add(self, method: str, size: int, weights: dict[str, Tensor], seconds: float, note: str = "") -> Result:
        bpb = self.score(weights)
        result = Result(method, size, bpb, bpb - self.base, seconds, note)
        self.results.append(result)
        print(f"{method:34} {size:12,} bytes  {bpb:.5f} bpb  +{result.lost:.5f}  {seconds:6.1f} s  {note}", flush=True)
        self.save()
        return result

    def save(self) -> Path:
        """Writes what there is: after every row, so that a run that is cut off leaves it."""
        extra = {"results": [asdict(result) for result in self.results], "float32_bpb": self.base}
        path = harness.write(self.name, rows_of(self), out=self.out, extra=extra)
        draw(self.results, self.base, path.with_suffix(".png"))
        page = path.with_suffix(".md")
        page.write_text(page.read_text() + table(self.results))
        return path

    def sync(self) -> None:
        self.runtime.synchronize()

    def halves(self) -> Contents:
        return {name: to_half(array, name=name) for name, array in self.arrays.items()}

    def rows(self, matrix_q: int, config: QuantConfig) -> Contents:
        """Integers per row with the clip search, embeddings at 8 bits."""
        found: Contents = {}
        for name, array in self.arrays.items():
            if self.roles[name] == "other":
                found[name] = to_half(array, name=name)
            else:
                q = matrix_q if self.roles[name] == "matrix" else config.embedding_q
                found[name] = quantise_rows(array, q, config.clip_fractions, name=name)
        return found


def read(contents: Contents) -> dict[str, Tensor]:
    """The weights as a reader of the file gets them (a test holds that packing and reading gives exactly these)."""
    return {
        name: torch.from_numpy(dequantise(c) if isinstance(c, Quantised) else c.astype("float32"))
        for name, c in contents.items()
    }


def scales_of(bank: Bank, contents: Contents) -> Tensor:
    found = [torch.from_numpy(c.scales) for name in bank.names if isinstance(c := contents[name], Quantised)]
    return torch.stack(found).to(bank.weights.device)


def values_of(bank: Bank, contents: Contents) -> Tensor:
    found = [torch.from_numpy(c.values) for name in bank.names if isinstance(c := contents[name], Quantised)]
    return torch.stack(found).to(bank.weights.device)


def plain(weights: Tensor, scales: Tensor, q: int = Q6) -> Tensor:
    """To nearest, on scales per row or per group."""
    wide = scales.float().repeat_interleave(weights.shape[2] // scales.shape[2], 2)
    return (weights / torch.where(wide > 0, wide, torch.inf)).round().clamp(-q, q).to(torch.int8)


def full_range(weights: Tensor, groups: int = 1) -> Tensor:
    """Scales that reach the largest value of each row or group, rounded up to float16."""
    largest = weights.unflatten(2, (groups, -1)).abs().amax(3) / Q6
    return (largest * (1 + 2.0**-10)).clamp(max=65504).half()


Technique = Callable[[Bank, Contents], tuple[Tensor, Tensor, dict[str, Any]]]
"""Integers, scales, and what else a Quantised of these tensors holds (rotation, factors), for one bank."""


def techniques(multiplier: float) -> dict[str, Technique]:
    def gptq(bank: Bank, base: Contents) -> tuple[Tensor, Tensor, dict[str, Any]]:
        scales = scales_of(bank, base)
        return round_bank(bank.weights, scales, Q6, bank.factors)[0], scales, {}

    def rotation(bank: Bank, base: Contents) -> tuple[Tensor, Tensor, dict[str, Any]]:
        block = block_size(bank.weights.shape[2])
        turned = rotate(bank.weights, block)
        scales = full_range(turned)
        return plain(turned, scales), scales, {"rotation": block}

    def groups(bank: Bank, base: Contents) -> tuple[Tensor, Tensor, dict[str, Any]]:
        cols = bank.weights.shape[2]
        scales = full_range(bank.weights, cols // 64 if cols % 64 == 0 else 1)
        return plain(bank.weights, scales), scales, {}

    def sigma(bank: Bank, base: Contents) -> tuple[Tensor, Tensor, dict[str, Any]]:
        scales = (4.0 * bank.weights.std(2, keepdim=True) / Q6).half()
        return plain(bank.weights, scales), scales, {}

    def pruning(bank: Bank, base: Contents) -> tuple[Tensor, Tensor, dict[str, Any]]:
        scales, values = scales_of(bank, base), values_of(bank, base)
        return prune_ones(bank.weights, values, scales, bank.hessians, bank.sensitivity, multiplier), scales, {}

    def low_rank(bank: Bank, base: Contents) -> tuple[Tensor, Tensor, dict[str, Any]]:
        scales, values = scales_of(bank, base), values_of(bank, base)
        error = bank.weights - values.float() * scales.float()
        tall, flat = correct(error, bank.hessians, bank.sensitivity, 8)
        return values, scales, {"low_rank": (tall.cpu(), flat.cpu())}

    return {
        "GPTQ": gptq,
        "rotation": rotation,
        "groups of 64": groups,
        "clip at 4 standard deviations": sigma,
        "pruning of +-1": pruning,
        "low rank 8 (LQER)": low_rank,
    }


def apply(technique: Technique, banks: list[Bank], base: Contents, roles: dict[str, Any]) -> Contents:
    """The 6-bit rows with one technique on every matrix; embeddings and floats stay as they are."""
    found = dict(base)
    for bank in banks:
        chosen = bank.pick([roles[name] == "matrix" for name in bank.names])
        if chosen is None:
            continue
        values, scales, more = technique(chosen, base)
        values, scales = values.cpu(), scales.cpu()
        for i, name in enumerate(chosen.names):
            content = Quantised(values[i].numpy(), scales[i].numpy(), Q6, more.get("rotation", 0))
            if "low_rank" in more:
                content = replace(content, low_rank=tuple(factor[i].numpy() for factor in more["low_rank"]))
            found[name] = content
    return found


def run(bench: Bench, caps: list[int], qat: Path | None, rows_only: bool) -> None:
    config = QuantConfig()
    began = time.perf_counter()
    halves = bench.halves()
    bench.record("float16", halves, began)
    for q in (127, Q6):
        began = time.perf_counter()
        rows = bench.rows(q, config)
        six = bench.record(f"int{q.bit_length() + 1} rows + lzma", rows, began, coder="lzma")
    bench.record("int6 rows + ANS", rows, time.perf_counter(), note="coding alone")
    if qat is not None:
        record_qat(bench, qat, config)
    if rows_only:
        return
    began = time.perf_counter()
    bench.model.load_state_dict(bench.tensors)
    calibration = calibrate(
        bench.model,
        bench.train,
        context=bench.config.batch.sequence_length,
        count=config.calibration_tokens,
        runtime=bench.runtime,
    )
    solver = Solver(bench.tensors, bench.roles, calibration, config, device=bench.runtime.device, say=print)
    bench.sync()
    bench.calibration_seconds = time.perf_counter() - began
    print(f"calibrated and factorised in {bench.calibration_seconds:.1f} s", flush=True)
    multiplier = solve(bench, solver, six.bytes, "solver at the size of int6 + lzma")
    for name, technique in techniques(multiplier).items():
        began = time.perf_counter()
        contents = apply(technique, solver.plain, rows, bench.roles)
        bench.record(f"int6 rows, {name}", contents, began)
    share = min(1.0, sum(array.size for array in bench.arrays.values()) / GOLF_WEIGHTS)
    for cap in caps or [cap if share > 0.9 else round(share * cap) for cap in CAPS]:
        try:
            solve(bench, solver, cap, f"solver at {cap:,}")
        except ArtifactError as error:  # a small model's tokenizer and floats may leave nothing of a small cap
            print(f"solver at {cap:,}: {error}", flush=True)


def record_qat(bench: Bench, checkpoint: Path, config: QuantConfig) -> None:
    """The other checkpoint's weights as they are and as 6-bit rows, each against the first one's float32."""
    model, _, trained = load_trained(checkpoint, bench.runtime.device)
    tensors = model.state_dict()
    other = {name: tensor.float().cpu().contiguous().numpy() for name, tensor in tensors.items()}
    share = f"the last {trained.quant.qat_share:.0%} of the budget, {trained.quant.qat_rounding} rounding"
    bench.add("late QAT, float32", sum(4 * array.size for array in other.values()), tensors, 0.0, share)
    began = time.perf_counter()
    own, bench.arrays = bench.arrays, other
    try:
        bench.record("int6 rows, late QAT", bench.rows(Q6, config), began, note=share)
    finally:
        bench.arrays = own


def solve(bench: Bench, solver: Solver, cap: int, name: str) -> float:
    """The whole way: search, file, and back from the file."""
    began = time.perf_counter()
    solved = solver.solve(bench.build, cap)
    seconds = time.perf_counter() - began
    weights = unpack_tensors(decode_artifact(solved.data))
    note = f"{len(solved.builds)} builds, expected +{solved.expected_loss:.5f} nats a token"
    bench.add(name, len(solved.data), weights, seconds, note)
    return solved.multiplier


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
    parser.add_argument(
        "--rows-only", action="store_true", help="leave out what needs calibration: GPTQ, the solver, ..."
    )
    parser.add_argument("--name", default="quantisation", help="of the result files")
    parser.add_argument("--qat", type=Path, default=None, help="a checkpoint of the same run that ended with QAT")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    bench = Bench(arguments.checkpoint, arguments.data, arguments.calibrate, device, arguments.out, arguments.name)
    run(bench, [int(cap) for cap in arguments.caps.split(",") if cap], arguments.qat, arguments.rows_only)
    print(bench.save().with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
