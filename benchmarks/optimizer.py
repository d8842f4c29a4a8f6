"""What an optimizer step costs: ParallelMuon beside torch.optim.Muon and microsoft/dion, eager and as CUDA graphs.

    python benchmarks/optimizer.py [--quick] [--only muon section] [--models "golf" ...] [--claim NAME] [--out DIR]

One timer for all: the wall time from calling step() on an idle device until the device is idle again. Gradients are random
and are filled anew before each call, outside the time. Two cases for each model:

- muon: Muon on all its matrices as separate weights, as a user's model has them. Eager is compared with eager, a graph with a
  graph. `as banks` are ours alone: the same matrices stacked by shape, as parbank's own model holds them.
- section: clip + AdamW + Muon + EMA, everything between backward and the next forward, beside the same in plain PyTorch: fused
  AdamW, batched Newton-Schulz, eager and captured as a graph.

Memory is what the optimizer holds beyond parameters and gradients, at its peak. Bound of a step: the plain iteration's FLOP at
the run's product rate, and one pass over the state. Writes benchmarks/results/optimizer, or the folder of --claim.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import Row, Settings, bound_ms, capture, in_a_line, nothing_compiles, settings_of, start, write
from optimizer_shapes import MODELS
from torch import Tensor, nn

from parbank.optim import ParallelMuon
from parbank.optim.newton_schulz import count_products

MEASURED = ("parbank/optim", "parbank/ops/symmetric.py", "parbank/ops/configs.py", "benchmarks/optimizer.py")
STEPS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)
LONG_ENOUGH = 2000.0  # milliseconds of timed calls after which ten of them are enough
Step = Callable[[], Any]


def make(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    """Random weights of a usual size, with random gradients."""
    params = [nn.Parameter(torch.randn(shape, device="cuda") * 0.02) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def separate(banks: list[tuple[int, int, int]]) -> list[tuple[int, ...]]:
    return [(rows, cols) for count, rows, cols in banks for _ in range(count)]


def count_flops(banks: list[tuple[int, int, int]]) -> float:
    """Five plain steps of Newton-Schulz."""
    total = 0.0
    for count, *shape in banks:
        rows, cols = sorted(shape)
        total += count * count_products(rows, cols, STEPS, "plain", False) * 2 * rows**3
    return total


def count_numbers(shapes: list[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


# --- Muon in plain PyTorch --------------------------------------------------------------------------------------------


def plain_newton_schulz(G: Tensor) -> Tensor:
    """bfloat16, as usually written; one matrix or a stack."""
    a, b, c = QUINTIC
    X = G.bfloat16()
    if tall := G.shape[-2] > G.shape[-1]:
        X = X.mT
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if tall else X


class PlainMuon:
    """Muon as usually written, over banks: the batched form."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.buffers = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self) -> None:
        for param, buffer in zip(self.params, self.buffers):
            assert param.grad is not None
            buffer.mul_(0.95).add_(param.grad)
            update = plain_newton_schulz(param.grad.add(buffer, alpha=0.95))
            param.mul_(1 - 0.02 * 0.01)
            param.add_(update, alpha=-0.02 * max(1.0, param.shape[-2] / param.shape[-1]) ** 0.5)


# --- timing -----------------------------------------------------------------------------------------------------------


def wall_ms(step: Step, params: list[nn.Parameter], settings: Settings) -> float:
    """The median time from the call to an idle device, in milliseconds."""
    grads = [p.grad for p in params]
    originals = [g.clone() for g in grads if g is not None]

    def time_once() -> float:
        torch._foreach_copy_(grads, originals)
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began)

    for _ in range(settings.warmup):
        time_once()
    times: list[float] = []
    with nothing_compiles():
        while len(times) < settings.repeats and not (len(times) >= 10 and sum(times) > LONG_ENOUGH):
            times.append(time_once())
    return statistics.median(times)


def record(
    rows: list[Row],
    case: str,
    provider: str,
    bound: float,
    shapes: list[tuple[int, ...]],
    build: Callable[[list[nn.Parameter]], Step],
    settings: Settings,
) -> None:
    """Two rows: time and memory. A provider that fails keeps its place, with the reason."""
    value, memory, note = None, None, ""
    try:
        params = make(shapes)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step = build(params)
        for _ in range(6):  # state, compilation, capture
            step()
        torch.cuda.synchronize()
        memory = (torch.cuda.max_memory_allocated() - before) / 2**20
        value = wall_ms(step, params, settings)
        del step, params
    except Exception as error:
        note = in_a_line(error)
    rows.append(Row(case, provider, value, "ms", bound, note))
    rows.append(Row(f"{case}: memory", provider, memory, "MiB", None, note))
    print(f"{case:40} {provider:36} {note or f'{value:9.4f} ms {memory:9.0f} MiB'}  bound {bound:.4f}", flush=True)
    gc.collect()  # graphs and optimizers hold each other
    torch.cuda.empty_cache()


# --- cases ------------------------------------------------------------------------------------------------------------


def run_muon(name: str, banks: list[tuple[int, int, int]], settings: Settings, rows: list[Row]) -> None:
    from peers import dion

    weights, stacked = separate(banks), [tuple(bank) for bank in banks]
    # Once over gradient (read), momentum and weights (read and written), 4 bytes each, and the plain iteration's FLOP.
    bound = bound_ms(count_flops(banks), 0) + bound_ms(0, 20 * count_numbers(weights))
    case = f"{name}: Muon over {len(weights)} matrices"
    builders: dict[str, tuple[list[tuple[int, ...]], Callable[[list[nn.Parameter]], Step]]] = {
        "torch.optim.Muon, eager": (
            weights,
            lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0.01, momentum=0.95).step,
        ),
        "dion, eager": (weights, lambda p: dion.muon(p).step),
        "ParallelMuon, eager": (weights, lambda p: ParallelMuon(p, weight_decay=0.01, cuda_graph=False).step),
        "ParallelMuon, eager, as banks": (stacked, lambda p: ParallelMuon(p, weight_decay=0.01, cuda_graph=False).step),
        "dion, graph": (weights, lambda p: dion.captured(p, compiled=False)),
        "dion, graph, compiled": (weights, lambda p: dion.captured(p, compiled=True)),
        "ParallelMuon, graph": (weights, lambda p: ParallelMuon(p, weight_decay=0.01, cuda_graph=True).step),
        "ParallelMuon, graph, as banks": (stacked, lambda p: ParallelMuon(p, weight_decay=0.01, cuda_graph=True).step),
    }
    for provider, (shapes, build) in builders.items():
        record(rows, case, provider, bound, shapes, build, settings)


def run_section(
    name: str, banks: list[tuple[int, int, int]], small: list[tuple[int, ...]], settings: Settings, rows: list[Row]
) -> None:
    stacked: list[tuple[int, ...]] = [tuple(bank) for bank in banks]
    # Muon as above, AdamW 28 bytes a number, and for all: 4 to measure the norm and 12 for the average.
    traffic = 20 * count_numbers(stacked) + 28 * count_numbers(small) + 16 * count_numbers([*stacked, *small])
    bound = bound_ms(count_flops(banks), 0) + bound_ms(0, traffic)
    case = f"{name}: clip + AdamW + Muon + EMA"

    def plain(params: list[nn.Parameter], graph: bool) -> Step:
        matrices, rest = params[: len(stacked)], params[len(stacked) :]
        muon, adam = PlainMuon(matrices), torch.optim.AdamW(rest, lr=1e-3, fused=True, capturable=graph)
        averages = [p.detach().clone() for p in params]
        live = [p.detach() for p in params]

        def call() -> None:
            torch.nn.utils.clip_grad_norm_(params, 0.3)
            adam.step()
            muon.step()
            torch._foreach_lerp_(averages, live, 0.003)

        if not graph:
            return call
        for _ in range(3):
            call()
        return capture(call)

    def ours(params: list[nn.Parameter], graph: bool) -> Step:
        matrices, rest = params[: len(stacked)], params[len(stacked) :]
        live = [p.detach() for p in params]
        averages = [p.clone() for p in live]
        groups = [{"params": matrices, "weight_decay": 0.04}, {"params": rest, "algorithm": "adamw", "lr": 1e-3}]
        return ParallelMuon(
            groups,
            max_norm=0.3,
            cuda_graph=graph,
            extra_captured=lambda: torch._foreach_lerp_(averages, live, 0.003),
        ).step

    shapes = [*stacked, *small]
    for label, graph in (("eager", False), ("graph", True)):
        record(rows, case, f"plain PyTorch, batched, {label}", bound, shapes, lambda p, g=graph: plain(p, g), settings)
        record(rows, case, f"ParallelMuon, {label}", bound, shapes, lambda p, g=graph: ours(p, g), settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--only", nargs="*", default=["muon", "section"], choices=["muon", "section"])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--claim", default="optimizer", help="the result's folder")
    arguments = start(parser)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch sees none")
    from peers import dion

    settings = Settings(quick=arguments.quick)
    rows: list[Row] = []
    for name in arguments.models:
        banks, small = MODELS[name]
        torch.manual_seed(0)
        if "muon" in arguments.only:
            run_muon(name, banks, settings, rows)
        if "section" in arguments.only and small:
            run_section(name, banks, small, settings, rows)
        torch._dynamo.reset()
        path = write(
            arguments.claim,
            rows,
            out=arguments.out,
            settings=settings_of(arguments),
            measured=MEASURED,
            peers=[dion.describe()],
        )
        print(path)


if __name__ == "__main__":
    main()
