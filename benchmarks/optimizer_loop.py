"""An optimizer step as a training loop sees it: a real backward and zero_grad() before every step, default arguments.

    python benchmarks/optimizer_loop.py [--models golf "GPT-2 small" 1.3B] [--quick] [--out DIR]

Every provider runs in a process of its own. Each iteration sets the gradients to None, computes a loss over all matrices and
its gradients, waits for the device, and times `step()` from the call to an idle device. Two kinds of gradients:

- usual: whatever addresses PyTorch's allocator gives. They often come back.
- moving: tensors of random sizes are allocated between the iterations, so that addresses change.

dion's graph needs gradients at fixed addresses: it gets them zeroed in place. Rows: the wall time, the time until `step()`
returns (the host's), the first step, and the memory of a step beyond parameters and gradients, at its peak.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import Row, in_a_line, nothing_compiles, settings_of, start, write
from optimizer_shapes import MODELS
from torch import Tensor, nn

from parbank.optim import ParallelMuon

MEASURED = ("parbank/optim", "parbank/ops/symmetric.py", "parbank/ops/configs.py", "benchmarks/optimizer_loop.py")
BATCH = 64  # rows of the input of each matrix
WARMUP = 24  # steps until graphs are captured, also where gradients move
Maker = Callable[[list[nn.Parameter]], Any]


def make_torch(params: list[nn.Parameter]) -> Any:
    return torch.optim.Muon(params, lr=0.02, weight_decay=0.01)


def make_dion(params: list[nn.Parameter]) -> Any:
    from peers import dion

    return dion.muon(params)


class DionGraph:
    """dion's graphed optimizer, made at the first step: its warmup needs gradients."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params, self.call = params, None

    def step(self) -> None:
        from peers import dion

        if self.call is None:
            self.call = dion.captured(self.params, compiled=False)
        self.call()


PROVIDERS: dict[str, Maker] = {
    "torch.optim.Muon": make_torch,
    "dion, eager": make_dion,
    "dion, graph": DionGraph,
    "ParallelMuon, eager": lambda params: ParallelMuon(params, weight_decay=0.01, cuda_graph=False),
    "ParallelMuon, auto": lambda params: ParallelMuon(params, weight_decay=0.01, cuda_graph="auto"),
}


@dataclass(frozen=True)
class Measured:
    wall_ms: float
    host_ms: float
    first_ms: float
    memory_mib: float | None
    about: str
    """What the optimizer says of its graph."""


def measure(make: Maker, shapes: list[tuple[int, ...]], *, moving: bool, device: str, repeats: int) -> Measured:
    """Trains on random data and times the steps."""
    torch.manual_seed(0)
    chance = random.Random(0)
    params = [nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    inputs = {cols: torch.randn(BATCH, cols, device=device) for cols in {shape[-1] for shape in shapes}}
    optimizer = make(params)
    in_place = isinstance(optimizer, DionGraph)
    before, gradients = _allocated(device), sum(param.numel() * 4 for param in params)
    walls, hosts, peaks, held = [], [], [], []
    with ExitStack() as timed:
        for number in range(WARMUP + repeats):
            if number == WARMUP:
                timed.enter_context(nothing_compiles())
            if moving:
                held = [torch.empty(chance.randrange(1, 2**20), device=device) for _ in range(8)]
            pads = sum(pad.numel() * 4 for pad in held)
            for param in params:
                if in_place and param.grad is not None:
                    param.grad.zero_()
                else:
                    param.grad = None
            _loss(params, inputs).backward()
            _settle(device)
            wall, host, peak = _time(optimizer.step, device)
            walls.append(wall)
            hosts.append(host)
            if number >= WARMUP and peak is not None:
                peaks.append((peak - before - gradients - pads) / 2**20)
    said = [line.strip() for line in repr(optimizer).splitlines() if "cuda_graph:" in line]
    return Measured(
        statistics.median(walls[WARMUP:]), statistics.median(hosts[WARMUP:]), walls[0],
        statistics.median(peaks) if peaks else None, said[0] if said else "",
    )  # fmt: skip


def _loss(params: list[nn.Parameter], inputs: dict[int, Tensor]) -> Tensor:
    return torch.stack([(inputs[param.shape[-1]] @ param.mT).square().mean() for param in params]).sum()


def _time(step: Callable[[], Any], device: str) -> tuple[float, float, int | None]:
    """(until the device is idle, until the call returns) in milliseconds, and the peak of allocated bytes."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step()
    returned = time.perf_counter()
    _settle(device)
    ended = time.perf_counter()
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return 1e3 * (ended - began), 1e3 * (returned - began), peak


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def run_child(model: str, provider: str, moving: bool, repeats: int) -> Measured:
    """The same in a process of its own."""
    child = json.dumps({"model": model, "provider": provider, "moving": moving, "repeats": repeats})
    command = [sys.executable, str(Path(__file__).resolve()), "--child", child]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def answer(child: dict[str, Any]) -> None:
    """What a child prints."""
    banks, _ = MODELS[child["model"]]
    shapes: list[tuple[int, ...]] = [(rows, cols) for count, rows, cols in banks for _ in range(count)]
    make = PROVIDERS[child["provider"]]
    found = measure(make, shapes, moving=child["moving"], device="cuda", repeats=child["repeats"])
    print(json.dumps(found.__dict__))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["golf", "GPT-2 small"], choices=list(MODELS))
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--claim", default="optimizer_loop", help="the result's folder")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = start(parser)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch sees none")
    if arguments.child:
        return answer(json.loads(arguments.child))
    from peers import dion

    rows: list[Row] = []
    for model in arguments.models:
        for moving in (False, True):
            case = f"{model}, {'moving' if moving else 'usual'} gradients"
            for provider in PROVIDERS:
                try:
                    found = run_child(model, provider, moving, 10 if arguments.quick else 40)
                except Exception as error:
                    rows.append(Row(case, provider, None, note=in_a_line(error)))
                    print(f"{case:36} {provider:24} {in_a_line(error)}", flush=True)
                    continue
                rows.append(Row(case, provider, found.wall_ms, note=found.about))
                rows.append(Row(f"{case}: host", provider, found.host_ms))
                rows.append(Row(f"{case}: first step", provider, found.first_ms))
                rows.append(Row(f"{case}: memory", provider, found.memory_mib, "MiB"))
                print(f"{case:36} {provider:24} {found.wall_ms:8.3f} ms, host {found.host_ms:8.3f}", flush=True)
    settings = {name: value for name, value in settings_of(arguments).items() if name != "child"}
    peers = [dion.PEER.describe(*dion.DIFFERS)]
    print(write(arguments.claim, rows, out=arguments.out, settings=settings, measured=MEASURED, peers=peers))


if __name__ == "__main__":
    main()
