"""What an optimizer step costs: ParallelMuon beside torch.optim.Muon, plain forms of Muon, fused AdamW, and the FLOP floor.

    python benchmarks/optimizer.py [--quick] [--only ns muon section] [--out DIR]

Two models: the banks of the published recipe (golf), and GPT-2 small as separate Linear weights. Per model:

- ns: Newton-Schulz alone, each method, as a CUDA graph; the bound is the plain iteration's FLOP at this run's product rate
- muon: one Muon step on the matrices, fused AdamW on the same matrices for comparison
- section: clip + AdamW + Muon + EMA: everything between backward and the next forward

Eager times are between events with the host's work inside: what a step costs when the host is not ahead. Graphed times are
the device's: the host is given a head start, as it has in a training step. `host` rows say what the host does meanwhile.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, Row, Settings, bound_ms, in_a_line, measure, write
from optimizer_shapes import MODELS
from torch import Tensor, nn

from parbank.optim import ParallelMuon, orthogonalize
from parbank.optim.newton_schulz import count_products, normalize

HEAD_START_CYCLES = 20_000_000  # about 10 ms of a GPU clock: more than the host needs for any step here
STEPS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)


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


# --- the plain forms --------------------------------------------------------------------------------------------------


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
    """Muon as usually written: over separate matrices it is the sequential form, over banks the batched one."""

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


def measure_device(call: Callable[[], Any], settings: Settings) -> float:
    """The device's time for a call whose launches the host has queued in advance."""
    for _ in range(settings.warmup):
        call()
    times = []
    for _ in range(settings.repeats):
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START_CYCLES)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in times)


def measure_host(call: Callable[[], Any], settings: Settings) -> float:
    """What the host spends in a call, in milliseconds."""
    for _ in range(settings.warmup):
        call()
    times = []
    for _ in range(settings.repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started))
    torch.cuda.synchronize()
    return statistics.median(times)


def record(rows: list[Row], case: str, provider: str, bound: float, timer: Callable[[], float]) -> None:
    """Adds one row; a provider that fails keeps its place, with the reason."""
    value, note = None, ""
    try:
        value = timer()
    except Exception as error:
        note = in_a_line(error)
    rows.append(Row(case, provider, value, "ms", bound, note))
    print(f"{case:34} {provider:32} {note or f'{value:9.4f} ms'}  bound {bound:.4f}", flush=True)
    torch.cuda.empty_cache()


# --- cases ------------------------------------------------------------------------------------------------------------


def run_ns(name: str, banks: list[tuple[int, int, int]], settings: Settings, rows: list[Row]) -> None:
    from parbank.optim.coefficients import resolve_coefficients
    from parbank.optim.newton_schulz import iterate

    triples = resolve_coefficients("quintic", STEPS)
    whole = {"all": banks} | {f"{count} x {r} x {c}": [(count, r, c)] for count, r, c in banks}
    for label, some in whole.items():
        bound = bound_ms(count_flops(some), 0)
        grads = [torch.randn(shape, device="cuda") for shape in some]
        inputs = [normalize(G.mT if G.shape[-2] > G.shape[-1] else G, torch.float16).contiguous() for G in grads]

        def usual(grads: list[Tensor] = grads) -> list[Tensor]:
            return [plain_newton_schulz(G) for G in grads]

        def ours(method: str, inputs: list[Tensor] = inputs) -> list[Tensor]:
            return [iterate(X, triples, method, graphed=True) for X in inputs]

        def public(graphed: bool, grads: list[Tensor] = grads) -> list[Tensor]:
            return [orthogonalize(G, graphed=graphed) for G in grads]

        case = f"{name}: NS, {label}"
        record(rows, case, "usual bfloat16, graph", bound, partial(measure, usual, settings=settings, graph=True))
        for method in ("plain", "symmetric", "gram", "auto"):
            record(
                rows,
                case,
                f"{method}, graph",
                bound,
                partial(measure, partial(ours, method), settings=settings, graph=True),
            )
        record(
            rows,
            case,
            "orthogonalize, graph",
            bound,
            partial(measure, partial(public, True), settings=settings, graph=True),
        )
        record(rows, case, "orthogonalize, eager", bound, partial(measure, partial(public, False), settings=settings))


def run_muon(name: str, banks: list[tuple[int, int, int]], settings: Settings, rows: list[Row]) -> None:
    shapes: list[tuple[int, ...]] = list(banks)
    # Once over gradient (read), momentum and weights (read and written), 4 bytes each, and the plain iteration's FLOP.
    bound = bound_ms(count_flops(banks), 0) + bound_ms(0, 20 * count_numbers(shapes))
    case = f"{name}: Muon step"
    builders: dict[str, Callable[[], Callable[[], Any]]] = {
        "torch.optim.Muon": lambda: (
            torch.optim.Muon(make(separate(banks)), lr=0.02, weight_decay=0.01, momentum=0.95).step
        ),
        "plain, sequential": lambda: PlainMuon(make(separate(banks))).step,
        "plain, batched": lambda: PlainMuon(make(shapes)).step,
        "fused AdamW": lambda: torch.optim.AdamW(make(shapes), lr=1e-3, fused=True).step,
        "ParallelMuon, eager": lambda: ParallelMuon(make(shapes), weight_decay=0.01).step,
        "ParallelMuon, eager, 66 weights": lambda: ParallelMuon(make(separate(banks)), weight_decay=0.01).step,
        "ParallelMuon, polar express": lambda: ParallelMuon(make(shapes), coefficients="polar_express").step,
        "ParallelMuon, NorMuon": lambda: ParallelMuon(make(shapes), normuon=True).step,
    }
    builders = {key.replace("66", str(len(separate(banks)))): build for key, build in builders.items()}
    for provider, build in builders.items():
        record(rows, case, provider, bound, lambda build=build: measure(build(), settings=settings))  # type: ignore[misc]
    for provider, made in (("graph", shapes), (f"graph, {len(separate(banks))} weights", separate(banks))):
        optimizer = ParallelMuon(make(made), weight_decay=0.01, cuda_graph=True)
        record(rows, case, f"ParallelMuon, {provider}", bound, partial(measure_device, optimizer.step, settings))
        record(rows, case, f"ParallelMuon, {provider}: host", bound, partial(measure_host, optimizer.step, settings))
        del optimizer


def run_section(
    name: str, banks: list[tuple[int, int, int]], small: list[tuple[int, ...]], settings: Settings, rows: list[Row]
) -> None:
    shapes: list[tuple[int, ...]] = list(banks)
    # Muon as above, AdamW 28 bytes a number, and for all: 4 to measure the norm and 12 for the average.
    traffic = 20 * count_numbers(shapes) + 28 * count_numbers(small) + 16 * count_numbers([*shapes, *small])
    bound = bound_ms(count_flops(banks), 0) + bound_ms(0, traffic)
    case = f"{name}: clip + AdamW + Muon + EMA"

    def usual() -> Callable[[], None]:
        matrices, rest = make(shapes), make(small)
        muon, adam = PlainMuon(matrices), torch.optim.AdamW(rest, lr=1e-3, fused=True)
        everything = [*matrices, *rest]
        averages = [p.detach().clone() for p in everything]

        def call() -> None:
            torch.nn.utils.clip_grad_norm_(everything, 0.3)
            adam.step()
            muon.step()
            torch._foreach_lerp_(averages, [p.detach() for p in everything], 0.003)

        return call

    def ours(graph: bool) -> Callable[[], Any]:
        matrices, rest = make(shapes), make(small)
        everything = [p.detach() for p in [*matrices, *rest]]
        averages = [p.clone() for p in everything]
        groups = [{"params": matrices, "weight_decay": 0.04}, {"params": rest, "algorithm": "adamw", "lr": 1e-3}]
        return ParallelMuon(
            groups,
            max_norm=0.3,
            cuda_graph=graph,
            extra_captured=lambda: torch._foreach_lerp_(averages, everything, 0.003),
        ).step

    record(rows, case, "clip_grad_norm_, AdamW, batched", bound, lambda: measure(usual(), settings=settings))
    record(rows, case, "ParallelMuon, eager", bound, lambda: measure(ours(False), settings=settings))
    record(rows, case, "ParallelMuon, eager: host", bound, lambda: measure_host(ours(False), settings))
    record(rows, case, "ParallelMuon, graph", bound, lambda: measure_device(ours(True), settings))
    record(rows, case, "ParallelMuon, graph: host", bound, lambda: measure_host(ours(True), settings))

    # What running AdamW beside the reduce-scatter hides at most, and one pass over all gradients: the price of knowing
    # before it that they are finite everywhere.
    case = f"{name}: AdamW on the small parameters"
    group = {"params": make(small), "algorithm": "adamw", "lr": 1e-3}
    adam = ParallelMuon([group], cuda_graph=True)
    bound = bound_ms(0, 28 * count_numbers(small))
    record(rows, case, "ParallelMuon, graph", bound, lambda: measure_device(adam.step, settings))
    grads = [p.grad for p in make(shapes)]
    case = f"{name}: largest magnitude of the gradients"
    bound = bound_ms(0, 4 * count_numbers(shapes))
    record(
        rows,
        case,
        "foreach_norm",
        bound,
        lambda: measure(lambda: torch._foreach_norm(grads, torch.inf), settings=settings),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--only", nargs="*", default=["ns", "muon", "section"], choices=["ns", "muon", "section"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch sees none")
    settings = Settings(quick=arguments.quick)
    rows: list[Row] = []
    for name, (banks, small) in MODELS.items():
        torch.manual_seed(0)
        if "ns" in arguments.only:
            run_ns(name, banks, settings, rows)
        if "muon" in arguments.only:
            run_muon(name, banks, settings, rows)
        if "section" in arguments.only:
            run_section(name, banks, small, settings, rows)
        print(write("optimizer", rows, out=arguments.out))


if __name__ == "__main__":
    main()
