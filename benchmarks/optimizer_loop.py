"""An optimizer step in a training loop: a real backward, `zero_grad()` before every step, default arguments.

    python benchmarks/optimizer_loop.py [--models golf "GPT-2 small" 1.3B] [--quick] [--claim NAME] [--out DIR]

Every provider runs in a process of its own. Each iteration calls the optimizer's `zero_grad()`, computes a loss over all
matrices and its gradients, waits for the device, and times `step()` from the call to an idle device. Three cases:

- usual: gradients lie wherever PyTorch's allocator puts them. Addresses often come back.
- moving: tensors of random sizes are allocated between the iterations, so that addresses change.
- moving, set_to_none=True: as the last, with `zero_grad(set_to_none=True)`, which some trainers call.

"ParallelMuon, default" is `ParallelMuon(params)`, with the weight decay of all. dion's graph needs gradients that stay: its
`zero_grad()` fills them with zeros. Rows: the wall time; the time until `step()` returns (the host's); the first step; and,
beyond parameters and gradients, the memory at the peak of a step, and the memory held after it, that of CUDA graphs included.

Bound of memory: the momentum and a tenth, without the work on one batch. Times have none; optimizer.py has theirs. Writes
benchmarks/results/optimizer_loop, or the folder of --claim.
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
TIMEOUT = 900  # seconds for one provider; dion compiles for minutes at 1.3B
Maker = Callable[[list[nn.Parameter]], Any]


def make_dion(params: list[nn.Parameter]) -> Any:
    from peers import dion

    return dion.muon(params)


class DionGraph:
    """dion's graphed optimizer, made at the first step: its warmup needs gradients."""

    def __init__(self, params: list[nn.Parameter], gram: bool = False) -> None:
        self.params, self.gram, self.call = params, gram, None

    def zero_grad(self) -> None:
        torch._foreach_zero_([param.grad for param in self.params if param.grad is not None])

    def step(self) -> None:
        from peers import dion

        if self.call is None:
            self.call = dion.captured(self.params, compiled=False, gram=self.gram)
        self.call()


PROVIDERS: dict[str, Maker] = {
    "torch.optim.Muon": lambda params: torch.optim.Muon(params, lr=0.02, weight_decay=0.01),
    "dion, eager": make_dion,
    "dion, graph": DionGraph,
    "dion, graph, Gram": lambda params: DionGraph(params, gram=True),
    "ParallelMuon, default": lambda params: ParallelMuon(params, weight_decay=0.01),
    "ParallelMuon, auto": lambda params: ParallelMuon(params, weight_decay=0.01, cuda_graph="auto"),
    "ParallelMuon, graph": lambda params: ParallelMuon(params, weight_decay=0.01, cuda_graph=True),
}


@dataclass(frozen=True)
class Loop:
    """What the loop around an optimizer does."""

    name: str
    moving: bool = False
    to_none: bool = False
    """`zero_grad(set_to_none=True)`, and not `zero_grad()`."""

    def takes(self, provider: str) -> bool:
        """A graph that is asked for needs gradients that stay."""
        return not (self.to_none and "graph" in provider)


LOOPS = (
    Loop("usual gradients"),
    Loop("moving gradients", moving=True),
    Loop("moving gradients, set_to_none=True", moving=True, to_none=True),
)


@dataclass(frozen=True)
class Measured:
    wall_ms: float
    host_ms: float
    first_ms: float
    peak_mib: float | None
    held_mib: float | None
    about: str
    """What the optimizer says of its graph."""


def measure(make: Maker, shapes: list[tuple[int, ...]], loop: Loop, *, device: str, repeats: int) -> Measured:
    """Trains on random data and times the steps."""
    torch.manual_seed(0)
    chance = random.Random(0)
    params = [nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    inputs = {cols: torch.randn(BATCH, cols, device=device) for cols in {shape[-1] for shape in shapes}}
    find_loss(params, inputs).backward()  # allocates the workspaces of products, which are not the optimizer's
    before = (_allocated(device), _held(device))  # before the optimizer is made: dion makes its momentum at once
    for param in params:
        param.grad = None
    optimizer = make(params)
    walls, hosts, peaks = [], [], []
    pads: list[Tensor] = []
    with ExitStack() as timed:
        for number in range(WARMUP + repeats):
            if number == WARMUP:
                timed.enter_context(nothing_compiles())
            if loop.moving:
                pads = [torch.empty(chance.randrange(1, 2**20), device=device) for _ in range(8)]
            optimizer.zero_grad(**({"set_to_none": True} if loop.to_none else {}))
            find_loss(params, inputs).backward()
            _settle(device)
            wall, host, peak = _time(optimizer.step, device)
            walls.append(wall)
            hosts.append(host)
            if number >= WARMUP:
                peaks.append(peak - before[0] - sum(pad.numel() * 4 for pad in pads))
    del pads
    held = _held(device) - before[1]
    said = [line.strip() for line in repr(optimizer).splitlines() if "cuda_graph:" in line]
    memory = (statistics.median(peaks) / 2**20, held / 2**20) if device == "cuda" else (None, None)
    times = (statistics.median(walls[WARMUP:]), statistics.median(hosts[WARMUP:]), walls[0])
    return Measured(*times, *memory, said[0] if said else "")


def find_loss(params: list[nn.Parameter], inputs: dict[int, Tensor]) -> Tensor:
    return torch.stack([(inputs[param.shape[-1]] @ param.mT).square().mean() for param in params]).sum()


def _time(step: Callable[[], Any], device: str) -> tuple[float, float, int]:
    """(until the device is idle, until the call returns) in milliseconds, and the peak of allocated bytes."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step()
    returned = time.perf_counter()
    _settle(device)
    ended = time.perf_counter()
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return 1e3 * (ended - began), 1e3 * (returned - began), peak


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _held(device: str) -> int:
    """Bytes that cannot be given back: tensors, and the memory of CUDA graphs, which does not count as allocated."""
    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def run_child(model: str, provider: str, loop: Loop, repeats: int) -> Measured:
    """The same in a process of its own."""
    child = json.dumps({"model": model, "provider": provider, "loop": loop.name, "repeats": repeats})
    command = [sys.executable, str(Path(__file__).resolve()), "--child", child]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def answer(child: dict[str, Any]) -> None:
    """What a child prints."""
    loop = next(loop for loop in LOOPS if loop.name == child["loop"])
    found = measure(
        PROVIDERS[child["provider"]], find_shapes(child["model"]), loop, device="cuda", repeats=child["repeats"]
    )
    print(json.dumps(found.__dict__))


def find_shapes(model: str) -> list[tuple[int, ...]]:
    banks, _ = MODELS[model]
    return [(rows, cols) for count, rows, cols in banks for _ in range(count)]


def list_rows(model: str, loop: Loop, provider: str, found: Measured) -> list[Row]:
    case = f"{model}, {loop.name}"
    momentum = sum(4 * rows * cols for rows, cols in find_shapes(model)) / 2**20
    return [
        Row(case, provider, found.wall_ms, note=found.about),
        Row(f"{case}: host", provider, found.host_ms),
        Row(f"{case}: first step", provider, found.first_ms),
        Row(f"{case}: memory, peak", provider, found.peak_mib, "MiB", 1.1 * momentum),
        Row(f"{case}: memory, held", provider, found.held_mib, "MiB", 1.1 * momentum),
    ]


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

    settings = {name: value for name, value in settings_of(arguments).items() if name != "child"}
    rows: list[Row] = []
    for model in arguments.models:
        for loop in LOOPS:
            for provider in [name for name in PROVIDERS if loop.takes(name)]:
                try:
                    found = run_child(model, provider, loop, 10 if arguments.quick else 40)
                except Exception as error:
                    shown = in_a_line(error)
                    rows.append(Row(f"{model}, {loop.name}", provider, None, note=shown))
                else:
                    shown = f"{found.wall_ms:8.3f} ms, host {found.host_ms:8.3f}"
                    rows += list_rows(model, loop, provider, found)
                print(f"{model}, {loop.name:36} {provider:24} {shown}", flush=True)
        options = {"settings": settings, "measured": MEASURED, "peers": [dion.describe()]}
        print(write(arguments.claim, rows, out=arguments.out, **options))  # after each model: a run may be cut off


if __name__ == "__main__":
    main()
