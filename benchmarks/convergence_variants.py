"""Variants of Muon that are no setting of a run, on the small GPT of convergence.py: QK-clip, AdaMuon and SOAP-Muon.

    python benchmarks/convergence_variants.py [--rate LR] [--only NAME...] [--seeds 4] [--workers 2] [--out DIR]

Text, model, schedule and score are those of convergence.py. Embeddings, head and norms have AdamW at --rest. AdaMuon,
SOAP-Muon and Muon each have a learning rate tuned on a seed of its own, and updates of 0.2 per number (`lr_scale="rms"`), so
that only the algorithm differs. QK-clip is tried at Muon's tuned rate and at 8 times that rate. Its paper claims that it bounds
the logits of attention (threshold 100) and costs no loss. This model has no QK norm, as QK-clip assumes. `largest logit` is the
largest of all seeds. No time is measured, so runs may share a machine. Bound: none; Muon is the baseline. Writes
benchmarks/results/convergence_variants.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from convergence import EDGES, MEASURED, SIZES, TUNING_SEED, Made, Maker, SmallGPT, Study, _adamw, read_text
from harness import Row, settings_of, start, write
from torch import Tensor, nn

from parbank import ParallelMuon, orthogonalize
from parbank.optim import QKClip

GRID = (0.005, 0.01, 0.02)


# --- AdaMuon and SOAP-Muon --------------------------------------------------------------------------------------------


class MatrixOptimizer(torch.optim.Optimizer):
    """Subtracts lr * 0.2 * sqrt(max(rows, cols)) times a direction whose singular values are about 1."""

    def __init__(self, params: Sequence[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def direction(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if not param.grad.any():  # the head starts at zero: nothing arrives here in the first step
                    continue
                found = self.direction(param.grad, self.state[param])
                param.sub_(found, alpha=group["lr"] * 0.2 * max(param.shape) ** 0.5)


class AdaMuon(MatrixOptimizer):
    """Si, Zhang and Shen 2025. m = 0.95 m + g; O is the polar factor of sign(m); v = 0.95 v + 0.05 O^2. The update O /
    sqrt(v) is scaled to the Frobenius norm of an orthogonal matrix."""

    def direction(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["mean"], state["square"] = torch.zeros_like(grad), torch.zeros_like(grad)
        state["mean"].mul_(0.95).add_(grad)
        polar = orthogonalize(state["mean"].sign())
        state["square"].lerp_(polar.square(), 0.05)
        update = polar / (state["square"].sqrt() + 1e-8)
        return update * (min(grad.shape) ** 0.5 / (update.norm() + 1e-8))


class SoapMuon(MatrixOptimizer):
    """Vyas et al. 2025: Adam in the eigenbases of the running means of G G^T and G^T G, then the polar factor. The bases
    are refreshed every 10 steps; the first step only computes them."""

    def direction(self, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state |= {"step": 0, "mean": torch.zeros_like(grad), "square": torch.zeros_like(grad)}
            state["left"], state["right"] = torch.zeros_like(grad @ grad.T), torch.zeros_like(grad.T @ grad)
        update = torch.zeros_like(grad)
        state["mean"].lerp_(grad, 0.05)
        if state["step"] > 0:
            left, right = state["bases"]
            state["square"].lerp_((left.T @ grad @ right).square(), 0.05)
            turned = left.T @ state["mean"] @ right / (state["square"].sqrt() + 1e-8)
            update = orthogonalize(left @ turned @ right.T)
        state["left"].lerp_(grad @ grad.T, 0.05)
        state["right"].lerp_(grad.T @ grad, 0.05)
        if state["step"] == 0:
            state["bases"] = [torch.linalg.eigh(state[side]).eigenvectors for side in ("left", "right")]
        elif state["step"] % 10 == 0:  # one power iteration: near the eigenvectors, without another decomposition
            state["bases"] = [
                torch.linalg.qr(state[side] @ basis).Q for side, basis in zip(("left", "right"), state["bases"])
            ]
        state["step"] += 1
        return update


# --- what is compared -------------------------------------------------------------------------------------------------


def make_with(kind: Callable[[Sequence[nn.Parameter], float], torch.optim.Optimizer]) -> Maker:
    def make(model: SmallGPT, lr: float, rest: float) -> Made:
        hidden, others = model.split()
        return [kind(hidden, lr), _adamw(others, rest)]

    return make


class Logits:
    """Makes ParallelMuon, keeps the largest logit of attention in training, and clips above a threshold."""

    def __init__(self, threshold: float = math.inf) -> None:
        self.threshold = threshold
        self.largest: list[float] = []
        """Of each run."""

    def make(self, model: SmallGPT, lr: float, rest: float) -> Made:
        hidden, others = model.split()
        clip = QKClip(self.threshold)
        self.largest.append(0.0)
        for block in model.blocks:
            self._watch(block, clip.add(block.query.weight, block.key.weight, heads=block.heads))  # type: ignore[arg-type]
        groups = [{"params": hidden, "lr": lr, "lr_scale": "rms"}, {"params": others, "algorithm": "adamw", "lr": rest}]
        return [ParallelMuon(groups, extra_captured=clip.apply)]

    def _watch(self, block: Any, layer: Any) -> None:
        outputs: list[Tensor] = []

        def split(x: Tensor) -> Tensor:
            return x.detach().unflatten(-1, (block.heads, -1)).transpose(1, 2)

        def see(module: nn.Module, inputs: Any, output: Tensor) -> None:
            outputs.append(split(output))
            if len(outputs) == 2:  # the block calls query, then key
                if torch.is_grad_enabled():
                    layer.observe(*outputs, exact=True)
                    self.largest[-1] = max(self.largest[-1], float(layer.largest.max()))
                outputs.clear()

        block.query.register_forward_hook(see)
        block.key.register_forward_hook(see)


@dataclass(frozen=True)
class Variant:
    """One column of the result."""

    make: Maker | None = None
    """None: ParallelMuon."""
    threshold: float = math.inf
    """Of QK-clip."""
    factor: float | None = None
    """Of Muon's tuned rate; None tunes a rate of its own."""


VARIANTS = {
    "Muon": Variant(),
    "AdaMuon": Variant(make_with(AdaMuon)),
    "SOAP-Muon": Variant(make_with(SoapMuon)),
    "QK-clip at 5": Variant(threshold=5.0, factor=1.0),  # at the tuned rate logits reach about 9
    "8 times the rate": Variant(factor=8.0),
    "8 times the rate, QK-clip at 100": Variant(threshold=100.0, factor=8.0),  # the paper's threshold
}


def train(name: str, size: str, lr: float, rest: float, seed: int) -> tuple[float, float]:
    """Bits per byte, and the largest logit, 0 where none was observed."""
    torch.set_num_threads(1)
    study, logits = Study(read_text([]), SIZES[size], "cpu"), Logits(VARIANTS[name].threshold)
    bits = study.train(VARIANTS[name].make or logits.make, lr, rest, seed).bits
    return bits, max(logits.largest, default=0.0)


class Table:
    """Runs, several at a time, each in a process with one thread."""

    def __init__(self, pool: Executor, size: str, rest: float) -> None:
        self._run = lambda name, lr, seed: pool.submit(train, name, size, lr, rest, seed)
        self.tuned: dict[str, Any] = {}
        self.rows: list[Row] = []

    def tune(self, name: str) -> float:
        """As Study.tune does, with the runs of a grid at a time."""
        scores: dict[float, float] = {}
        grid: Sequence[float] = GRID
        for _ in range(1 + EDGES):
            runs = {lr: self._run(name, lr, TUNING_SEED) for lr in grid}
            scores |= {lr: run.result()[0] for lr, run in runs.items()}
            best = min(scores, key=lambda lr: scores[lr])
            beyond = {min(scores): min(scores) / 2, max(scores): max(scores) * 2}.get(best)
            if beyond is None:
                break
            grid = (beyond,)
        self.tuned[name] = {"lr": best, "tried": {str(lr): round(scores[lr], 4) for lr in sorted(scores)}}
        return best

    def repeat(self, name: str, lr: float, seeds: Iterable[int]) -> list[Future[tuple[float, float]]]:
        return [self._run(name, lr, seed) for seed in seeds]

    def add(self, name: str, lr: float, runs: Iterable[Future[tuple[float, float]]]) -> None:
        found = [run.result() for run in runs]
        bits, logit = [value for value, _ in found], max(value for _, value in found)
        spread = statistics.stdev(bits) if len(bits) > 1 else 0.0
        self.rows.append(Row("bits per byte", name, statistics.mean(bits), "bits", note=f"sd {spread:.4f}, lr {lr:g}"))
        self.rows += [Row(f"bits per byte, seed {seed}", name, value, "bits") for seed, value in enumerate(bits)]
        self.rows += [Row("largest logit", name, logit, "")] if logit else []
        print(
            f"{name:34} {statistics.mean(bits):.4f} bits per byte, sd {spread:.4f}, lr {lr:g}, {logit:.1f}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="cpu")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--rest", type=float, default=0.008, help="AdamW's rate, as convergence.py tuned it")
    parser.add_argument("--rate", type=float, default=0.0, help="Muon's rate, if it was tuned before; 0 tunes it")
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--workers", type=int, default=2)
    arguments = start(parser)
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        table = Table(pool, arguments.size, arguments.rest)
        muon = arguments.rate or table.tune("Muon")
        begun = []
        for name in arguments.only:
            factor = 1.0 if name == "Muon" else VARIANTS[name].factor
            lr = table.tune(name) if factor is None else muon * factor
            begun.append((name, lr, table.repeat(name, lr, range(arguments.seeds))))
        for name, lr, runs in begun:
            table.add(name, lr, runs)
    path = write(
        "convergence_variants",
        table.rows,
        out=arguments.out,
        settings=settings_of(arguments),
        measured=[*MEASURED, "benchmarks/convergence_variants.py"],
        seeds=range(arguments.seeds),
        extra={"tuned": table.tuned},
    )
    print(path)


if __name__ == "__main__":
    main()
