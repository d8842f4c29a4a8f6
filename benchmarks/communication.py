"""When does communication, and not Newton-Schulz, limit ParallelMuon? A model of the step for 1 to 1024 ranks.

    python benchmarks/communication.py [--model golf] [--ns-tflops T] [--link NVLINK,INFINIBAND,ETHERNET] [--out DIR]

What is measured: the rate of Newton-Schulz (FLOP/s on this GPU, at the model's own batches) and the rate of a copy. Without
a GPU both are assumed, and the output says so. What is given: the links' bandwidth and latency. What is modelled: the step
of `parbank.optim.parallel_muon`, batch by batch, with the overlap it has:

    reduce-scatter of every batch, one after the other on the link   (gradients, 4 bytes a number)
    one norm: a latency
    batch by batch: momentum and Newton-Schulz of the largest share, then its all-gather, which flies while the next batch
    is worked on                                                      (updates, 2 bytes a number)
    apply: every rank, all weights

A collective of n bytes over W ranks takes ceil(log2 W) latencies and n (W - 1) / W / bandwidth. Forward and backward, which
hide nothing of this here, and AdamW's small sum are left out: with `opt.reducing()`, backward hides the first line.
"""

import argparse
import math
from dataclasses import asdict, dataclass
from typing import Any

RANKS = [2**n for n in range(11)]
GRADIENT_BYTES, UPDATE_BYTES = 4, 2


@dataclass(frozen=True)
class Link:
    """What one GPU can send (and receive at the same time), in bytes per second, and the delay of one message in seconds."""

    bandwidth: float
    latency: float
    note: str


LINKS = {
    "nvlink": Link(360e9, 5e-6, "NVLink 4 in one machine: 450 GB/s each way, of which collectives reach about 80%"),
    "infiniband": Link(45e9, 10e-6, "one 400 Gb/s NDR port a GPU, 90% of 50 GB/s"),
    "ethernet": Link(1.4e9, 40e-6, "100 Gb/s shared by 8 GPUs, 90% of 1.56 GB/s"),
}


@dataclass(frozen=True)
class Device:
    """What one GPU computes, as measured."""

    ns_flops: float
    """FLOP per second of Newton-Schulz, counted as the plain iteration."""
    copy_bytes: float
    """Bytes per second, read plus written."""
    source: str


ASSUMED = Device(300e12, 4.0e12, "assumed, no GPU here")


def ns_flops(rows: int, cols: int, steps: int = 5) -> float:
    """The plain iteration: per step X X^T and B X (2 r^2 c each) and A A (2 r^3), for r <= c."""
    rows, cols = sorted((rows, cols))
    return steps * 2 * rows**2 * (2 * cols + rows)


def intensity(rows: int, cols: int, world: int, blocks: int | None = None) -> float:
    """FLOP of Newton-Schulz on one rank per byte it receives in the all-gather, for `blocks` matrices (one a rank)."""
    blocks = blocks or world
    share = math.ceil(blocks / world)
    received = blocks * rows * cols * UPDATE_BYTES * (world - 1) / world
    return share * ns_flops(rows, cols) / received


@dataclass(frozen=True)
class Step:
    """The modelled times of one step, in milliseconds."""

    ranks: int
    reduce: float
    compute: float
    """Momentum and Newton-Schulz of the largest share."""
    gather: float
    """All of the all-gathers, hidden or not."""
    exposed: float
    """What of them is not hidden behind Newton-Schulz."""
    apply: float
    total: float

    @property
    def limit(self) -> str:
        return "compute" if self.compute + self.apply >= self.reduce + self.exposed else "communication"


def model_step(banks: list[tuple[int, int, int]], world: int, link: Link, device: Device) -> Step:
    """One step over `world` ranks; banks are (count, rows, cols), shapes up to transposition already together."""
    hops = math.ceil(math.log2(world)) if world > 1 else 0

    def collective(size: float) -> float:
        return 0.0 if world == 1 else hops * link.latency + size * (world - 1) / world / link.bandwidth

    order = sorted(banks, key=lambda bank: -bank[0] * bank[1] * bank[2])
    numbers = [count * rows * cols for count, rows, cols in order]
    reduce = sum(collective(GRADIENT_BYTES * n) for n in numbers) + (2 * hops * link.latency if world > 1 else 0)
    clock, free, gathers, compute = 0.0, 0.0, 0.0, 0.0
    for (count, rows, cols), n in zip(order, numbers):
        share = math.ceil(count / world)
        # Momentum: 22 bytes of traffic a number (see parbank.optim.kernels), on the share.
        work = share * (ns_flops(rows, cols) / device.ns_flops + 22 * rows * cols / device.copy_bytes)
        clock += work
        compute += work
        gather = collective(UPDATE_BYTES * n)
        free = max(free, clock) + gather  # the link is free again, and this batch is everywhere
        gathers += gather
    exposed = max(0.0, free - clock) if world > 1 else 0.0
    apply = 10 * sum(numbers) / device.copy_bytes
    total = reduce + compute + exposed + apply
    return Step(world, *(1e3 * t for t in (reduce, compute, gathers, exposed, apply, total)))


def merge_shapes(banks: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Banks of one shape up to transposition are one batch."""
    merged: dict[tuple[int, int], int] = {}
    for count, *shape in banks:
        rows, cols = sorted(shape)
        merged[rows, cols] = merged.get((rows, cols), 0) + count
    return [(count, rows, cols) for (rows, cols), count in merged.items()]


def measure_device(banks: list[tuple[int, int, int]]) -> Device:
    """Newton-Schulz at the batches themselves, replayed as a graph, and a copy."""
    import torch
    from harness import copy_rate, measure

    from parbank.optim.coefficients import resolve_coefficients
    from parbank.optim.newton_schulz import iterate, normalize

    triples = resolve_coefficients("quintic", 5)
    inputs = [normalize(torch.randn(shape, device="cuda"), torch.float16) for shape in banks]
    ms = measure(lambda: [iterate(X, triples, graphed=True) for X in inputs], graph=True)
    flops = sum(count * ns_flops(rows, cols) for count, rows, cols in banks)
    return Device(
        flops / (ms / 1e3), copy_rate(), f"measured: Newton-Schulz {ms:.3f} ms on {torch.cuda.get_device_name(0)}"
    )


def report(name: str, banks: list[tuple[int, int, int]], links: list[str], device: Device) -> list[dict[str, Any]]:
    """Prints the tables, and returns their rows."""
    print(
        f"{name}: Newton-Schulz at {device.ns_flops / 1e12:.0f} TFLOP/s, "
        f"copies at {device.copy_bytes / 1e12:.2f} TB/s ({device.source})"
    )
    found = []
    for key in links:
        link = LINKS[key]
        balance = device.ns_flops / link.bandwidth
        print(f"\n{key}: {link.bandwidth / 1e9:.3g} GB/s, {link.latency * 1e6:.0f} us ({link.note})")
        print(f"the all-gather hides behind Newton-Schulz above {balance:,.0f} FLOP per byte; times in ms")
        print(
            f"{'ranks':>6} {'reduce':>9} {'compute':>9} {'gather':>9} {'exposed':>9} {'apply':>9} {'total':>9}  limit"
        )
        for world in RANKS:
            step = model_step(banks, world, link, device)
            cells = " ".join(
                f"{value:9.3f}"
                for value in (step.reduce, step.compute, step.gather, step.exposed, step.apply, step.total)
            )
            print(f"{world:6d} {cells}  {step.limit}")
            found.append({"model": name, "link": key, **asdict(step), "limit": step.limit})
    return found


def main() -> None:
    import harness
    from optimizer_shapes import MODELS  # the same models as benchmarks/optimizer.py

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), default=None, help="default: all of them")
    parser.add_argument("--ns-tflops", type=float, help="rate of Newton-Schulz, instead of measuring it")
    parser.add_argument("--link", default=",".join(LINKS), help="comma-separated: " + ", ".join(LINKS))
    arguments = harness.start(parser)
    print(f"the published figure: {intensity(768, 3072, 8):,.0f} FLOP per byte (8 matrices of 768 x 3072 on 8 ranks)\n")
    rows: list[harness.Row] = []
    for name in [arguments.model] if arguments.model else MODELS:
        banks = merge_shapes(MODELS[name][0])
        device = pick_device(banks, arguments.ns_tflops)
        for step in report(name, banks, arguments.link.split(","), device):
            case = f"{name}, {step['link']}, {step['ranks']} ranks"
            parts = ("reduce", "compute", "gather", "exposed", "apply", "total")
            rows += [harness.Row(case, part, step[part], note=device.source) for part in parts]
        print()
    options = harness.settings_of(arguments)
    measured = ("parbank/optim", "benchmarks/communication.py")
    print(harness.write("communication", rows, out=arguments.out, settings=options, measured=measured))


def pick_device(banks: list[tuple[int, int, int]], given: float | None) -> Device:
    import torch

    if given is not None:
        return Device(given * 1e12, ASSUMED.copy_bytes, "given")
    return measure_device(banks) if torch.cuda.is_available() else ASSUMED


if __name__ == "__main__":
    main()
