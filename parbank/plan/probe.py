"""What a step costs on this machine: a few steps at three shapes, before the clock starts.

    seconds of a step = passes * layers * launch
                      + tokens * (flops * arithmetic + layers * width * traffic + vocab * softmax)
                      + orthogonalisation flops * muon + parameters * update

The six rates are not negative, and are fitted to the probe by least squares of relative errors. Shapes between and beyond the
probed ones follow. A probe takes seconds, and is kept in the cache for this machine, these versions and these threads,
unless other processes disturbed it.
"""

import gc
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from parbank.cores import LoadMeter, count_cores
from parbank.files import default_cache, write_json
from parbank.model import GPT, ModelConfig
from parbank.ops.rehearsal import can_rehearse, rehearsal
from parbank.optim.config import OptimConfig
from parbank.optim.parallel_muon import ParallelMuon
from parbank.plan.laws import Array
from parbank.plan.shapes import count_parameters, count_products, orthogonalisation_flops
from parbank.precision import autocast, training_precision
from parbank.recipes import GOLF_MODEL
from parbank.runtime import Runtime, versions
from parbank.training.groups import parameter_groups
from parbank.training.passes import Passes
from parbank.training.threads import NOT_BUSY

RATES = ("launch", "arithmetic", "traffic", "softmax", "muon", "update")
# Bytes of activations of one token, by layer and channel in bfloat16: `sprint` takes 14.8 GB for 98,304 tokens of
# 11 layers of 512 (benchmarks/results/sprint), 27 bytes with weights and logits; a margin of a fifth.
ACTIVATION_BYTES = 32.0
# Weights, gradients, momenta, averages and copies of one parameter.
PARAMETER_BYTES = 32.0
LOGIT_BYTES = 10.0
# Memory that stays free: of a GPU for CUDA's context and fragments, of a machine for other programs.
USABLE_MEMORY = 0.8
# Seconds of passes that Inductor compiled, over those of plain PyTorch, on a CPU. The probe does not compile: that would take
# longer than the probe. It expects 13,269 tokens/s of the demo's model, where the demo has 19,781 (benchmarks/results/demo).
COMPILED_PASSES = 0.64
# What is left of the sum of the GPUs' rates where several exchange gradients (docs/design/performance.md: 8 ranks).
PARALLEL_EFFICIENCY = 0.9


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts about a machine that a plan uses."""

    name: str
    cuda: bool
    ranks: int
    memory_bytes: float
    """Free for one rank."""
    rates: tuple[float, ...]
    """Seconds, in the order of RATES."""
    memory_factor: float = 1.0
    """Measured over estimated memory of activations."""

    def step_seconds(self, model: "Costs", sequence_length: Array, batch_tokens: Array, passes: Array) -> Array:
        """Seconds of one optimizer step of one rank's share in so many passes."""
        features = step_features(model, sequence_length, batch_tokens / self.ranks, passes, ranks=self.ranks)
        seconds: Array = sum(rate * feature for rate, feature in zip(self.rates, features, strict=True))  # type: ignore[assignment]
        return seconds / (PARALLEL_EFFICIENCY if self.ranks > 1 else 1.0)

    def compiled(self) -> "Machine":
        """The machine as a run whose passes are compiled finds it."""
        passes = RATES.index("muon")
        return replace(self, rates=(*(COMPILED_PASSES * rate for rate in self.rates[:passes]), *self.rates[passes:]))

    def most_tokens(self, model: "Costs") -> Array:
        """The tokens of one pass that fit in memory; below zero where not even the weights do."""
        room = USABLE_MEMORY * self.memory_bytes - PARAMETER_BYTES * model.parameters
        found: Array = room / (self.memory_factor * activation_bytes(model, self.cuda))
        return found


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The quantities that decide a step's time and memory: numbers of one model, or arrays over several."""

    layers: Array
    width: Array
    hidden: Array
    vocab: Array
    products: Array
    """Multiplications of one token outside attention, forward."""
    muon_flops: Array
    parameters: Array

    @classmethod
    def of(cls, models: Sequence[ModelConfig]) -> "Costs":
        rows = [
            (
                c.layers,
                c.width,
                c.hidden,
                c.vocab_size,
                count_products(c),
                orthogonalisation_flops(c),
                count_parameters(c).total,
            )
            for c in models
        ]
        names = ("layers", "width", "hidden", "vocab", "products", "muon_flops", "parameters")
        return cls(**dict(zip(names, np.array(rows, np.float64).T)))


def step_features(model: Costs, length: Array, tokens: Array, passes: Array, *, ranks: int = 1) -> tuple[Array, ...]:
    """The factor of each rate, in the order of RATES. A token attends to half the window on average."""
    return (
        passes * (model.layers + 2),
        tokens * 6 * (model.products + model.layers * model.width * length),
        tokens * model.layers * model.width,
        tokens * model.vocab,
        model.muon_flops / ranks,
        model.parameters,
    )


def activation_bytes(model: Costs, cuda: bool) -> Array:
    """Memory of one token: float32 on a CPU takes twice that of bfloat16."""
    channels = model.layers * (model.width + model.hidden) / 4
    found: Array = (1 if cuda else 2) * ACTIVATION_BYTES * channels + LOGIT_BYTES * model.vocab
    return found


@dataclass(frozen=True)
class Timing:
    """One measurement: the features of a step and its seconds."""

    features: tuple[float, ...]
    seconds: float


def fit_rates(timings: Sequence[Timing]) -> tuple[float, ...]:
    """Rates that are not negative, by coordinate descent on squared relative errors."""
    features = np.array([timing.features for timing in timings]) / np.array([[t.seconds] for t in timings])
    scale = np.maximum(features.max(axis=0), 1e-300)
    features = features / scale
    rates = np.zeros(len(RATES))
    errors = np.ones(len(timings))  # 1 - features @ rates
    for _ in range(5000):
        for index, column in enumerate(features.T):
            norm = column @ column
            new = max(0.0, rates[index] + column @ errors / norm) if norm else 0.0
            errors -= column * (new - rates[index])
            rates[index] = new
    return tuple(float(rate) for rate in rates / scale)


def look_at(place: Runtime, say: Callable[[str], None] = lambda line: None) -> Machine:
    """The machine of this rank, from the cache or by a probe. No other rank takes part."""
    path = _path(place)
    found = _read(path)
    if found is None:
        found, calm = _probe(place, say)
        if calm:
            with suppress(OSError):  # a cache that cannot be written costs some seconds the next time
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, found)
    return Machine(
        name=_name(place), cuda=place.is_cuda, ranks=place.world, memory_bytes=free_memory(place),
        rates=tuple(found["rates"]), memory_factor=found["memory_factor"],
    )  # fmt: skip


def is_known(place: Runtime) -> bool:
    """Whether a probe of this machine is kept."""
    return _read(_path(place)) is not None


def free_memory(place: Runtime) -> float:
    """Bytes that one rank may use now."""
    if place.is_cuda:
        return float(torch.cuda.mem_get_info(place.device)[0])
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
        return 1024.0 * int(kilobytes) / place.world
    return 4e9 / place.world


def _name(place: Runtime) -> str:
    if place.is_cuda:
        return torch.cuda.get_device_name(place.device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads of {count_cores()} cores"


def _path(place: Runtime) -> Path:
    return default_cache() / "plan" / f"probe-{_key(place)}.json"


def _key(place: Runtime) -> str:
    about = [_name(place), platform.node(), os.environ.get("OMP_NUM_THREADS", ""), *sorted(versions().items())]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        sound = len(found["rates"]) == len(RATES) and all(rate >= 0 for rate in found["rates"])
        return {"rates": found["rates"], "memory_factor": float(found["memory_factor"])} if sound else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def shapes_of(place: Runtime) -> list[tuple[ModelConfig, int, int]]:
    """Models, sequence lengths and micro-batches to probe. They differ in every feature, so that the rates can be told
    apart."""
    if place.is_cuda:
        sizes = ((4, 256, 8192, 2048, 16_384), (8, 512, 4096, 2048, 65_536), (11, 768, 1024, 2048, 32_768))
    else:
        sizes = ((2, 64, 2048, 256, 512), (2, 128, 320, 256, 1024), (3, 192, 1024, 256, 512))
    found = []
    for layers, width, vocab, length, tokens in sizes:
        heads = width // 64
        model = replace(
            GOLF_MODEL, layers=layers, width=width, heads=heads, kv_heads=max(1, heads // 2), vocab_size=vocab,
            value_layers=(layers - 1,), value_width=64, xsa_layers=1,
        )  # fmt: skip
        found.append((model, length, tokens))
    return found


def _probe(place: Runtime, say: Callable[[str], None]) -> tuple[dict[str, Any], bool]:
    """The rates, and whether nothing disturbed them."""
    say("probing this machine: some steps at a few shapes, once")
    meter = LoadMeter(count_cores()) if not place.is_cuda else None
    # The other ranks do not probe: an optimizer of this rank alone must not wait for them.
    alone = dist.new_group([place.rank], use_local_synchronization=True) if place.world > 1 else None
    benches = [_Bench(place, model, length, tokens, alone) for model, length, tokens in shapes_of(place)]
    if place.is_cuda and can_rehearse():
        with rehearsal(place.device):  # the kernels of all shapes compile at once
            for bench in benches:
                bench.rehearse()
    timings, factors = [], [1.0]
    while benches:
        found, memory = benches.pop(0).measure()
        timings += found
        factors += memory
        _free(place)
    others = meter.measure(torch.get_num_threads()) if meter is not None else 0.0
    calm = others is None or others < NOT_BUSY
    if not calm:
        say(f"note: other processes want {others:.1f} cores, so the probe is too slow; it is not kept")
    return {"rates": fit_rates(timings), "memory_factor": max(factors)}, calm


def rehearse_shape(shape: int, device: str, threads: int) -> None:
    """Compiles and keeps the kernels of one shape: the work of a process of `parbank.plan.apart`."""
    place = Runtime(device=torch.device(device))
    torch.cuda.set_device(place.device)
    bench = _Bench(place, *shapes_of(place)[shape], alone=None)
    with rehearsal(place.device, threads):
        bench.rehearse()


class _Bench:
    """A model of one shape, its optimizer, and batches of one and two micro-batches: random tokens and weights."""

    def __init__(self, place: Runtime, model: ModelConfig, length: int, tokens: int, alone: Any) -> None:
        self._place, self._length, self._alone, self._costs = place, length, alone, Costs.of([model])
        with torch.device("meta"):  # orthogonal weights would take seconds
            self._model = GPT(model)
        self._model.allocate(place.device)
        self._optimizer = self._make_optimizer()
        self._precision = training_precision("auto", place.device)
        self._passes = Passes(self._model, self._model, place.device, 1, graph=True, precision=self._precision)
        rows = max(1, tokens // length)
        self._batches = [
            torch.randint(model.vocab_size, (count, length + 1), device=place.device) for count in (rows, 2 * rows)
        ]

    def rehearse(self) -> None:
        """Requests every kernel; see `parbank.ops.rehearsal`. Weights and state are garbage afterwards."""
        self._passes.rehearse(self._batches[0])  # the other batch has the same kernels
        self._update()

    def measure(self) -> tuple[list[Timing], list[float]]:
        """The times of passes and of an update, and measured over estimated memory of activations where the device says."""
        self._optimizer = self._make_optimizer()
        self._model.zero_grad()
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.normal_(std=0.02)
        timings, factors = [], []
        for batch in self._batches:
            self._add(batch)  # gradients come into being
            before = self._allocated(reset=True)
            seconds = _time(self._place, partial(self._add, batch))
            features = self._features(batch)
            timings.append(Timing((*features[:4], 0.0, 0.0), seconds))
            if self._place.is_cuda:
                tokens = batch.numel() - len(batch)
                estimate = tokens * float(activation_bytes(self._costs, cuda=True)[0])
                factors.append((self._allocated() - before) / estimate)
        features = self._features(self._batches[0])
        timings.append(Timing((0.0, 0.0, 0.0, 0.0, *features[4:]), _time(self._place, self._update)))
        return timings, factors

    def _make_optimizer(self) -> ParallelMuon:
        optim = OptimConfig()
        groups = parameter_groups(self._model, optim)
        return ParallelMuon(groups, max_norm=optim.clip, process_group=self._alone, cuda_graph=self._place.is_cuda)

    def _add(self, batch: Tensor) -> None:
        self._passes.start(1)
        self._passes.add(batch)

    def _update(self) -> None:
        with nullcontext() if self._place.is_cuda else autocast(self._place.device, self._precision):
            self._optimizer.step()

    def _features(self, batch: Tensor) -> list[float]:
        sizes = (self._length, batch.numel() - len(batch), 1)
        return [float(x[0]) for x in step_features(self._costs, *(np.full(1, float(size)) for size in sizes))]

    def _allocated(self, reset: bool = False) -> int:
        """The most bytes since the last reset."""
        if not self._place.is_cuda:
            return 0
        torch.cuda.synchronize(self._place.device)
        if reset:
            torch.cuda.reset_peak_memory_stats(self._place.device)
        return torch.cuda.max_memory_allocated(self._place.device)


def _free(place: Runtime) -> None:
    """Gives back the memory of a probed shape, so that the next one, and the run, find it free."""
    gc.collect()
    if place.is_cuda:
        torch.cuda.empty_cache()


def _time(place: Runtime, work: Callable[[], None]) -> float:
    """The least of several timings, after one or two that warm up: the time on an undisturbed machine."""
    warm, repeats = (2, 5) if place.is_cuda else (1, 2)
    seconds = []
    for _ in range(warm + repeats):
        started = time.perf_counter()
        work()
        place.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[warm:])


def describe_machine(machine: Machine) -> dict[str, Any]:
    """For --json."""
    return asdict(machine) | {"rates": dict(zip(RATES, machine.rates))}
