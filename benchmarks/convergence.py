"""A short convergence study: AdamW, torch.optim.Muon, dion's Muon and ParallelMuon on one small GPT.

    python benchmarks/convergence.py [--size gpu|cpu|tiny] [--text FILE...] [--seeds 4] [--only NAME...] [--out DIR]

A byte-level GPT in plain PyTorch learns the Python standard library's source, or the files of --text. Every optimizer sees
the same batches, the same initial weights, the same schedule (a short warmup, then flat, then linear to zero over the last
half) and no weight decay. Each optimizer's learning rate is tuned first: a grid in steps of 2, on a seed of its own, extended
while the best is at an edge. The three Muons use AdamW's tuned rate for all parameters that are not hidden matrices. Then every
seed trains once at the tuned rate. The score is the validation loss at the end, in bits per byte.

The Muons differ in their polynomial (dion's default is Polar Express, the others' is the quintic) and in the factor for a
matrix's shape. Momentum 0.95 with Nesterov is the same in all. Bound: none; AdamW is the baseline. Writes
benchmarks/results/convergence.
"""

import argparse
import math
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import Row, in_a_line, settings_of, start, write
from torch import Tensor, nn

from parbank import ParallelMuon

MEASURED = ["parbank/optim", "parbank/ops", "benchmarks/convergence.py"]
TUNING_SEED = 1000
TEXT_BYTES = 8_000_000
ADAM_GRID = (1e-3, 2e-3, 4e-3)
MUON_GRID = (0.01, 0.02, 0.04)
EDGES = 3  # how often a grid is extended


@dataclass(frozen=True, kw_only=True)
class Size:
    width: int
    layers: int
    heads: int
    sequence: int
    batch: int
    steps: int
    validation: int
    """Batches."""


SIZES = {
    "gpu": Size(width=256, layers=6, heads=4, sequence=256, batch=32, steps=400, validation=16),
    "cpu": Size(width=64, layers=2, heads=2, sequence=64, batch=16, steps=150, validation=16),
    "tiny": Size(width=16, layers=1, heads=1, sequence=16, batch=4, steps=3, validation=1),
}


# --- the model -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList([nn.RMSNorm(size.width) for _ in range(2)])
        self.query, self.key, self.value, self.out = (nn.Linear(size.width, size.width, bias=False) for _ in range(4))
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        q, k, v = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norms[1](x))).square())


class SmallGPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, size.width)
        self.places = nn.Embedding(size.sequence, size.width)
        self.blocks = nn.Sequential(*[Block(size) for _ in range(size.layers)])
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids[:, :-1]) + self.places.weight[: ids.shape[1] - 1]
        logits = self.head(self.norm(self.blocks(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def split(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Hidden matrices, and the rest."""
        hidden = [p for p in self.blocks.parameters() if p.ndim == 2]
        chosen = set(map(id, hidden))
        return hidden, [p for p in self.parameters() if id(p) not in chosen]


# --- the optimizers --------------------------------------------------------------------------------------------------

Made = list[torch.optim.Optimizer]
Maker = Callable[[SmallGPT, float, float], Made]
"""(model, the tuned rate, AdamW's rate for the rest) -> optimizers to step."""


def _adamw(params: Sequence[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def make_adamw(model: SmallGPT, lr: float, rest: float) -> Made:
    return [_adamw(list(model.parameters()), lr)]


def make_torch_muon(model: SmallGPT, lr: float, rest: float) -> Made:
    hidden, others = model.split()
    return [torch.optim.Muon(hidden, lr=lr, weight_decay=0.0, momentum=0.95), _adamw(others, rest)]


def make_dion(model: SmallGPT, lr: float, rest: float) -> Made:
    from peers import dion

    hidden, others = model.split()
    return [dion.muon(hidden, lr=lr, weight_decay=0.0, triton=torch.cuda.is_available()), _adamw(others, rest)]


def make_ours(model: SmallGPT, lr: float, rest: float) -> Made:
    hidden, others = model.split()
    return [ParallelMuon([{"params": hidden, "lr": lr}, {"params": others, "algorithm": "adamw", "lr": rest}])]


PROVIDERS: dict[str, Maker] = {
    "AdamW": make_adamw,
    "torch.optim.Muon": make_torch_muon,
    "dion": make_dion,
    "ParallelMuon": make_ours,
}


# --- training --------------------------------------------------------------------------------------------------------


def read_text(files: list[Path]) -> Tensor:
    """Bytes of the given files, or of the standard library's modules in the order of their names."""
    chosen = files or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    content = b"".join(path.read_bytes() for path in chosen)[:TEXT_BYTES]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


@dataclass(frozen=True)
class Run:
    bits: float
    seconds: float


class Study:
    """One text and one size of model."""

    def __init__(self, text: Tensor, size: Size, device: str) -> None:
        self.size, self.device = size, device
        held_out = len(text) // 10
        if held_out < 4 * size.sequence:
            raise SystemExit(f"the text has {len(text):,} bytes; give at least {40 * size.sequence:,}")
        self.train_text, self.held_out = text[:-held_out].to(device), text[-held_out:].to(device)

    def batch(self, text: Tensor, generator: torch.Generator) -> Tensor:
        size = self.size
        starts = torch.randint(len(text) - size.sequence - 1, (size.batch,), generator=generator).to(self.device)
        return text[starts[:, None] + torch.arange(size.sequence + 1, device=self.device)]

    def train(self, make: Maker, lr: float, rest: float, seed: int) -> Run:
        """Trains from scratch and scores."""
        torch.manual_seed(seed)
        model = SmallGPT(self.size).to(self.device)
        optimizers = make(model, lr, rest)
        # Numbers, not dion's tensors, which the next assignment to the group changes in place.
        peaks = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in optimizers]
        generator = torch.Generator().manual_seed(seed)
        began = time.perf_counter()
        for step in range(self.size.steps):
            for optimizer, rates in zip(optimizers, peaks):
                for group, peak in zip(optimizer.param_groups, rates):
                    group["lr"] = peak * share(step, self.size.steps)
                optimizer.zero_grad()
            model(self.batch(self.train_text, generator)).backward()
            for optimizer in optimizers:
                optimizer.step()
        with torch.no_grad():
            fixed = torch.Generator().manual_seed(0)
            losses = [float(model(self.batch(self.held_out, fixed))) for _ in range(self.size.validation)]
        bits = statistics.mean(losses) / math.log(2)
        return Run(bits if math.isfinite(bits) else math.inf, time.perf_counter() - began)

    def tune(self, make: Maker, grid: Sequence[float], rest: float) -> tuple[float, dict[float, float]]:
        """The best rate, and the score of each that was tried."""
        scores = {lr: self.train(make, lr, rest, TUNING_SEED).bits for lr in grid}
        for _ in range(EDGES):
            best = min(scores, key=lambda lr: scores[lr])
            beyond = {min(scores): min(scores) / 2, max(scores): max(scores) * 2}.get(best)
            if beyond is None:
                break
            scores[beyond] = self.train(make, beyond, rest, TUNING_SEED).bits
        return min(scores, key=lambda lr: scores[lr]), scores


def share(step: int, steps: int) -> float:
    """Of the peak learning rate: a warmup of 5%, and linear to zero over the second half."""
    return min(1.0, (step + 1) / max(1, steps // 20), 2 * (steps - step) / steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), help="gpu where there is one, else cpu")
    parser.add_argument("--text", nargs="*", type=Path, default=[], metavar="FILE")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=list(PROVIDERS), choices=list(PROVIDERS))
    arguments = start(parser)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments.size = arguments.size or ("gpu" if device == "cuda" else "cpu")
    torch.set_float32_matmul_precision("high")
    from peers import dion

    study = Study(read_text(arguments.text), SIZES[arguments.size], device)
    rows: list[Row] = []
    tuned: dict[str, Any] = {}
    rest = ADAM_GRID[1]
    for name in arguments.only:
        grid = ADAM_GRID if name == "AdamW" else MUON_GRID
        try:
            lr, scores = study.tune(PROVIDERS[name], grid, rest)
            runs = [study.train(PROVIDERS[name], lr, rest, seed) for seed in range(arguments.seeds)]
        except Exception as error:  # a peer that fails keeps its row
            rows.append(Row("bits per byte", name, None, "bits", note=in_a_line(error)))
            continue
        if name == "AdamW":
            rest = lr
        tuned[name] = {"lr": lr, "tried": {str(key): round(value, 4) for key, value in sorted(scores.items())}}
        bits = [run.bits for run in runs]
        spread = statistics.stdev(bits) if len(bits) > 1 else 0.0
        rows.append(Row("bits per byte", name, statistics.mean(bits), "bits", note=f"sd {spread:.4f}, lr {lr:g}"))
        rows += [Row(f"bits per byte, seed {seed}", name, run.bits, "bits") for seed, run in enumerate(runs)]
        rows.append(Row("training", name, statistics.median(run.seconds for run in runs), "s"))
        print(f"{name:18} {statistics.mean(bits):.4f} bits per byte, sd {spread:.4f}, lr {lr:g}", flush=True)
    path = write(
        "convergence",
        rows,
        out=arguments.out,
        settings=settings_of(arguments),
        measured=MEASURED,
        seeds=range(arguments.seeds),
        peers=[dion.describe()],
        extra={"tuned": tuned},
    )
    print(path)


if __name__ == "__main__":
    main()
