"""What communication costs in a training step on several GPUs: a model, not a measurement. It needs no GPU.

    python benchmarks/communication.py [--gpus 16 --network Ethernet --per-machine 8] [--out DIR]

`schedule` lists the work of a rank after backward, in the order of `parbank.optim.step` with a clip: collectives, waits and
kernels. `play` runs that list against two clocks, the GPU's and the link's: a collective runs beside work until the GPU waits for
it. The time that the GPU waits is exposed. tests/integrations/test_communication_trace.py compares the list with real steps
over gloo: operations, bytes and order.

Times of collectives are those of communication_links.py, by NCCL's own constants. Times of computing come from committed
results on one H200. Where there is no result, FLOP at the rate of a large product are a lower bound of the time: then more
communication is exposed than in truth. The model leaves out that collectives and kernels slow each other down, that ranks are
not equally fast, and that small shares run at lower rates.

Writes benchmarks/results/communication: for each model and cluster the exposed time, the bytes sent, the collectives, the memory,
and the tokens with which 5% of a step is exposed.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import harness
from communication_links import CLUSTERS, NETWORKS, Cluster, sent_bytes
from optimizer_shapes import MODELS

from parbank.optim.newton_schulz import count_products

GRADIENT_BYTES, UPDATE_BYTES = 4, 2  # float32 gradients; updates in Newton-Schulz's 16 bits, on a GPU
MOMENTUM_TRAFFIC, APPLY_TRAFFIC, ADAMW_TRAFFIC = 22, 10, 28  # bytes read and written a number (parbank.optim.kernels)
BACKWARD_SHARE = 2 / 3  # of forward + backward: two of the three products
SMALL_SHARE = 0.05  # of a step: communication below it is called small

# --- models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Model:
    """The parameters of a model, and the work of one GPU in a step."""

    banks: Sequence[tuple[int, int, int]]
    """(count, rows, cols): the parameters that Muon takes."""
    rest: Sequence[tuple[int, ...]]
    layers: int
    width: int
    length: int
    """Of a sequence."""
    tokens: int
    """A GPU and step."""

    @cached_property
    def batches(self) -> list[tuple[int, int, int]]:
        """Banks of one shape up to transposition are one batch; the largest comes first."""
        found: dict[tuple[int, int], int] = {}
        for count, *shape in self.banks:
            short, long = sorted(shape)
            found[short, long] = found.get((short, long), 0) + count
        return sorted(((n, *shape) for shape, n in found.items()), key=lambda batch: -math.prod(batch))

    @property
    def matrix_numbers(self) -> int:
        return sum(map(math.prod, self.banks))

    @property
    def rest_numbers(self) -> int:
        return sum(map(math.prod, self.rest))

    @property
    def numbers(self) -> int:
        return self.matrix_numbers + self.rest_numbers


# Embeddings, positions and norms of 1.3B, which the benchmark of the optimizer leaves out.
REST_OF_LARGE = [(50257, 2048), (2048, 2048), *[(2048,)] * 98]
GOLF = Model(
    banks=MODELS["golf"][0], rest=MODELS["golf"][1], layers=11, width=512, length=2048, tokens=98_304
)  # the recipe's batch of 786,432 tokens on 8 GPUs
GPT2 = Model(
    banks=MODELS["GPT-2 small"][0], rest=MODELS["GPT-2 small"][1], layers=12, width=768, length=1024, tokens=65_536
)  # half a million tokens on 8 GPUs
LARGE = Model(
    banks=MODELS["1.3B"][0], rest=REST_OF_LARGE, layers=24, width=2048, length=2048, tokens=16_384
)  # a million tokens on 64 GPUs, as GPT-3 XL was trained
NAMED = {"golf": GOLF, "GPT-2 small": GPT2, "1.3B": LARGE}


def ns_flops(rows: int, cols: int, steps: int = 5) -> float:
    """The plain iteration: per step X X^T and B X (2 r^2 c each) and A A (2 r^3), for r <= c."""
    rows, cols = sorted((rows, cols))
    return steps * 2 * rows**2 * (2 * cols + rows)


def intensity(rows: int, cols: int, ranks: int, blocks: int | None = None) -> float:
    """FLOP of Newton-Schulz on one rank per byte it receives in the all-gather, for `blocks` matrices (one a rank)."""
    blocks = blocks or ranks
    received = blocks * rows * cols * UPDATE_BYTES * (ranks - 1) / ranks
    return math.ceil(blocks / ranks) * ns_flops(rows, cols) / received


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one GPU computes."""

    pass_seconds: float
    """Forward and backward of a step."""
    ns_rate: float
    """FLOP of the plain iteration per second of Newton-Schulz."""
    copy_rate: float
    """Bytes per second, read plus written."""


def read_rates() -> tuple[dict[str, Rates], list[str]]:
    """The rates of each model, and the committed results that they come from."""
    from claims import read_claims

    claims = read_claims()
    step, optimizer, iteration = (claims.newest(name) for name in ("step", "optimizer", "newton_schulz"))
    copy = 1e12 * step.about["rates"]["copy_TB_per_s"]
    product = 1e12 * step.about["rates"]["bf16_product_TFLOP_per_s"]

    def ms(result: Any, case: str, provider: str) -> float:
        return 1e-3 * float(result.values(case, provider)[0])

    def work(model: Model) -> float:
        return float(sum(count * ns_flops(rows, cols) for count, rows, cols in model.batches))

    # The time of attention grows with tokens * length, at golf's rate.
    attention = ms(step, "attention: cudnn_attention", "floor") / _attention_work(GOLF)

    def floor(model: Model) -> float:
        """Products at the best rate, and attention."""
        products = 6 * (model.numbers - math.prod(model.rest[1])) * model.tokens / product  # positions are looked up
        return products + attention * _attention_work(model)

    gpt2_traffic = (MOMENTUM_TRAFFIC + APPLY_TRAFFIC) * GPT2.matrix_numbers / copy
    gpt2_step = ms(optimizer, "GPT-2 small: Muon over 48 matrices", "ParallelMuon, graph, as banks")
    large_work = sum(
        n * 2 * rows**3 * count_products(rows, cols, 5, "gram", kernels=True) for n, rows, cols in LARGE.batches
    )
    rates = {
        "golf": Rates(
            pass_seconds=ms(step, "forward + backward, 98,304 tokens", "ours"),
            ns_rate=work(GOLF) / ms(iteration, "NS, 5 steps, the golf banks", "ours"),
            copy_rate=copy,
        ),
        "GPT-2 small": Rates(pass_seconds=floor(GPT2), ns_rate=work(GPT2) / (gpt2_step - gpt2_traffic), copy_rate=copy),
        "1.3B": Rates(pass_seconds=floor(LARGE), ns_rate=work(LARGE) / (large_work / product), copy_rate=copy),
    }
    return rates, [result.name for result in (step, optimizer, iteration)]


def _attention_work(model: Model) -> float:
    return model.tokens * model.length * model.layers * model.width


# --- a step -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """Starts a collective; the GPU goes on."""

    operation: str
    size: int
    """Bytes, as for `sent_bytes`."""
    label: str


@dataclass(frozen=True)
class Wait:
    """Waits for the collectives of a label."""

    label: str


@dataclass(frozen=True)
class Work:
    """Keeps the GPU busy."""

    name: str
    seconds: float


Event = Collective | Wait | Work


def schedule(
    model: Model, ranks: int, rates: Rates, update_bytes: int = UPDATE_BYTES, merged: bool = False
) -> list[Event]:
    """The optimizer's step on the rank with the largest shares. `merged`: with `opt.ranks.merged`, one all-reduce for
    all matrices of a batch that do not divide evenly, instead of one operation each."""
    events = [_sum_small(model), *_reduce_batches(model, ranks), *_update(model, ranks, rates, update_bytes)]
    return list(_merge(events)) if merged else events


def schedule_trainer(model: Model, ranks: int, rates: Rates, update_bytes: int = UPDATE_BYTES) -> list[Event]:
    """A step of `parbank train`, without its passes. Hosts agree on the clock before the passes and on the data after them,
    through host memory and while the GPU computes. Nothing waits for the mean loss."""
    clock, data = Collective("all_reduce", 5 * 8, "clock"), Collective("all_reduce", 8, "data")
    step = schedule(model, ranks, rates, update_bytes)
    return [clock, data, *step, Collective("all_reduce", 4, "loss")]


def schedule_overlapped(model: Model, ranks: int, rates: Rates) -> list[Event]:
    """Backward and the step, with each matrix on its way as soon as it has its gradient: `with opt.reducing()`, for weights
    that are separate parameters."""
    blocks = [rows * cols for count, rows, cols in model.batches for _ in range(count)]
    part = rates.pass_seconds * BACKWARD_SHARE / len(blocks)
    backward: list[Event] = []
    for size in blocks:
        backward += [Work("backward", part), Collective("reduce", GRADIENT_BYTES * size, "gradients")]
    return [*backward, _sum_small(model), *_update(model, ranks, rates, UPDATE_BYTES)]


def _merge(events: Sequence[Event]) -> Iterator[Event]:
    """Neighbouring operations on one matrix each become one all-reduce. For updates, zeros are the other ranks' terms."""
    for event, run in groupby(events):
        if isinstance(event, Collective) and event.operation in ("reduce", "broadcast"):
            yield Collective("all_reduce", event.size * len(list(run)), event.label)
        else:
            yield from run


def _sum_small(model: Model) -> Event:
    """Gradients of everything that is no matrix, and a flag for each parameter."""
    numbers = model.rest_numbers + len(model.banks) + len(model.rest)
    return Collective("all_reduce", GRADIENT_BYTES * numbers, "small")


def _reduce_batches(model: Model, ranks: int) -> Iterator[Event]:
    for count, rows, cols in model.batches:
        even, left = divmod(count, ranks)
        size = GRADIENT_BYTES * rows * cols
        if even:
            yield Collective("reduce_scatter", even * ranks * size, "gradients")
        yield from [Collective("reduce", size, "gradients")] * left


def _update(model: Model, ranks: int, rates: Rates, update_bytes: int) -> Iterator[Event]:
    yield from (Wait("small"), Wait("gradients"), Collective("all_reduce", 4, "norm"), Wait("norm"))
    before: tuple[str, int] | None = None
    for count, rows, cols in model.batches:
        even, left = divmod(count, ranks)
        share = math.ceil(count / ranks) * rows * cols
        flops = math.ceil(count / ranks) * ns_flops(rows, cols)
        yield Work("orthogonalize", flops / rates.ns_rate + MOMENTUM_TRAFFIC * share / rates.copy_rate)
        label = f"updates {rows}x{cols}"
        size = update_bytes * rows * cols
        if even:
            yield Collective("all_gather", even * ranks * size, label)
        yield from [Collective("broadcast", size, label)] * left
        if before is not None:  # one batch in flight
            yield from _apply(*before, rates)
        before = label, count * rows * cols
    yield Work("adamw", ADAMW_TRAFFIC * model.rest_numbers / rates.copy_rate)
    assert before is not None
    yield from _apply(*before, rates)


def _apply(label: str, numbers: int, rates: Rates) -> Iterator[Event]:
    yield Wait(label)
    yield Work("apply", APPLY_TRAFFIC * numbers / rates.copy_rate)


@dataclass(frozen=True, kw_only=True)
class Played:
    """The seconds of a schedule."""

    total: float
    exposed: dict[str, float]
    """By label: how long the GPU waited for its collectives."""

    @property
    def all_exposed(self) -> float:
        return sum(self.exposed.values())


def play(events: Sequence[Event], cluster: Cluster) -> Played:
    """Runs the events: the link carries one collective after the other, as NCCL does on one communicator."""
    gpu = link = 0.0
    arrived: dict[str, float] = {}
    exposed: dict[str, float] = {}
    for event in events:
        if isinstance(event, Work):
            gpu += event.seconds
        elif isinstance(event, Collective):
            held, late = cluster.time(event.operation, event.size)
            link = max(link, gpu) + held
            arrived[event.label] = max(arrived.get(event.label, 0.0), link + late)
        else:
            waited = max(0.0, arrived.get(event.label, 0.0) - gpu)
            exposed[event.label] = waited
            gpu += waited
    return Played(total=gpu, exposed=exposed)


# --- memory -----------------------------------------------------------------------------------------------------------

CARDS = {"H100": 80e9, "H200": 141e9}
CARD_SHARE = 0.5  # for weights, gradients and state; activations get the rest


def memory_replicated(model: Model, ranks: int) -> float:
    """Bytes a rank holds with ParallelMuon: float32 weights and gradients, its share of the momentum, AdamW's two moments,
    and the updates of two batches."""
    momentum = 4 * sum(math.ceil(count / ranks) * rows * cols for count, rows, cols in model.batches)
    updates = UPDATE_BYTES * sum(math.prod(batch) for batch in model.batches[:2])
    return 8 * model.numbers + momentum + 8 * model.rest_numbers + updates


def memory_sharded(model: Model, ranks: int) -> float:
    """Bytes a rank holds with FSDP2: everything cut, and two layers whole, weights in 16 bits and gradients in 32."""
    state = 4 * model.matrix_numbers + 8 * model.rest_numbers
    return (8 * model.numbers + state) / ranks + 2 * 6 * model.matrix_numbers / model.layers


def sent_sharded(model: Model, ranks: int) -> float:
    """Bytes a rank sends with FSDP2: it gathers 16-bit weights for forward and again for backward, scatters float32 gradients,
    and its rows of each update go to their owner and back."""
    return (2 + 2 + 4) * model.numbers * (ranks - 1) / ranks + 2 * UPDATE_BYTES * model.matrix_numbers / ranks


def largest_replicated(card: float, ranks: int) -> float:
    """Numbers of the largest model that fits, in matrices alone: 4 + 4 bytes on every rank, and 4 cut into shares."""
    return CARD_SHARE * card / (8 + 4 / ranks)


# --- results ----------------------------------------------------------------------------------------------------------


def describe(name: str, model: Model, cluster: Cluster, rates: Rates) -> list[harness.Row]:
    """All rows of a model on a cluster."""
    events = schedule(model, cluster.ranks, rates)
    played = play(events, cluster)
    step = rates.pass_seconds + played.total
    merged = play(schedule(model, cluster.ranks, rates, merged=True), cluster)
    overlapped = play(schedule_overlapped(model, cluster.ranks, rates), cluster)

    def row(quantity: str, value: float, unit: str) -> harness.Row:
        return harness.Row(f"{name}: {quantity}", cluster.name, value, unit)

    collectives = [event for event in events if isinstance(event, Collective)]

    def sent(*operations: str) -> float:
        chosen = [event for event in collectives if event.operation in operations]
        return sum(sent_bytes(event.operation, event.size, cluster.ranks) for event in chosen) / 1e6

    updates = sum(seconds for label, seconds in played.exposed.items() if label.startswith("updates"))
    exposed = played.all_exposed
    work = sum(event.seconds for event in events if isinstance(event, Work))
    # exposed / (tokens * seconds a token + work + exposed) = SMALL_SHARE
    tokens = (exposed / SMALL_SHARE - work - exposed) * model.tokens / rates.pass_seconds
    return [
        row("forward + backward", 1e3 * rates.pass_seconds, "ms"),
        row("optimizer's own work", 1e3 * work, "ms"),
        row("waits for small gradients", 1e3 * played.exposed["small"], "ms"),
        row("waits for matrices' gradients", 1e3 * played.exposed["gradients"], "ms"),
        row("waits for the norm", 1e3 * played.exposed["norm"], "ms"),
        row("waits for updates", 1e3 * updates, "ms"),
        row("exposed", 1e3 * exposed, "ms"),
        row("exposed share", 100 * exposed / step, "%"),
        row("exposed, reduced during backward", 1e3 * overlapped.all_exposed, "ms"),
        row("exposed, remaining matrices in one all-reduce", 1e3 * merged.all_exposed, "ms"),
        row("tokens a GPU for 5%", max(0.0, tokens), "tokens"),
        row("sent: gradients of matrices", sent("reduce_scatter", "reduce"), "MB"),
        row("sent: updates", sent("all_gather", "broadcast"), "MB"),
        row("sent: small gradients and scalars", sent("all_reduce"), "MB"),
        row("sent, FSDP2", sent_sharded(model, cluster.ranks) / 1e6, "MB"),
        row("collectives", len(collectives), "a step"),
        row("memory, ParallelMuon", memory_replicated(model, cluster.ranks) / 1e9, "GB"),
        row("memory, FSDP2", memory_sharded(model, cluster.ranks) / 1e9, "GB"),
    ]


def make_rows(clusters: Sequence[Cluster], rates: dict[str, Rates]) -> list[harness.Row]:
    rows = [
        row
        for name, model in NAMED.items()
        for cluster in clusters
        for row in describe(name, model, cluster, rates[name])
    ]
    for card, size in CARDS.items():
        for cluster in clusters:
            largest = largest_replicated(size, cluster.ranks) / 1e9
            rows.append(harness.Row(f"largest model, {card}", cluster.name, largest, "billion"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, help="one cluster of so many GPUs; default: the table of the docs")
    parser.add_argument("--per-machine", type=int, default=8, help="GPUs a machine, joined by NVLink")
    parser.add_argument("--network", choices=list(NETWORKS), default="InfiniBand", help="between machines")
    arguments = harness.start(parser)
    clusters: Sequence[Cluster] = CLUSTERS
    if arguments.gpus:
        clusters = [Cluster(ranks=arguments.gpus, per_machine=arguments.per_machine, network=arguments.network)]
    rates, sources = read_rates()
    rows = make_rows(clusters, rates)
    measured = [f"parbank/optim/{name}.py" for name in ("communication", "collect", "layout", "parallel_muon", "step")]
    path: Path = harness.write(
        "communication",
        rows,
        out=arguments.out,
        settings=harness.settings_of(arguments),
        measured=[*measured, "benchmarks/communication.py", "benchmarks/communication_links.py"],
        extra={"modelled": True, "compute_from": sources},
    )
    print(path.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
