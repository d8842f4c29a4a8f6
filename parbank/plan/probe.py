"""What a step costs on this machine: a few steps at three shapes, before the clock starts.

The six rates of `machine.py` are not negative, and are fitted by least squares of relative errors. Shapes between and beyond
the probed ones follow. A probe takes seconds, and is kept in the cache for this machine, these versions and these threads.

On a GPU the times are those of the device. On a CPU they are **CPU time of one thread**: other processes hardly change it, where
a second thread that waits for its core can make a step take twenty times as long. One factor, the gain of several threads, then
sets the level. It is measured while the machine is calm, and assumed while it is busy. So a plan is for the machine without
other processes, and the same whether it is busy or not; `Machine.others` says how busy it is.
"""

import gc
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from parbank.config import parse_json
from parbank.cores import LoadMeter, count_cores
from parbank.files import default_cache, write_json
from parbank.model import GPT, ModelConfig
from parbank.ops.rehearsal import can_rehearse, rehearsal
from parbank.optim.config import OptimConfig
from parbank.optim.parallel_muon import ParallelMuon
from parbank.plan.machine import RATES, Costs, Machine, step_features
from parbank.precision import autocast, training_precision
from parbank.recipes import GOLF_MODEL
from parbank.runtime import Runtime, versions
from parbank.threads import use_threads
from parbank.training.averaging import AverageConfig, Averages
from parbank.training.groups import parameter_groups
from parbank.training.memory import free_memory
from parbank.training.passes import Passes
from parbank.training.threads import is_busy

VERSION = 3
"""Of the file that a probe is kept in: an older one is measured anew."""
LOOK_SECONDS = 0.5
"""How long a plan looks at the load: some time slices."""
USUAL_RATES = (1.9e-3, 2.4e-12, 8.0e-8, 7.0e-9, 2.8e-12, 3.0e-9)
"""CPU seconds of one thread of an AMD EPYC 9005 in bfloat16, in the order of RATES, fitted to 12 shapes of 2 to 6 layers of 64 to
256. Only their ratios are used: a fit stays near them where the timings say little."""
CALM_ERROR, BUSY_ERROR, SPREAD = 0.05, 0.2, 0.7
"""How far timings may be off, as a share, on a calm and on a busy machine, and how far another CPU's ratios may be from the
usual ones. The formula itself is off by a tenth."""
DOUBLING = 1.4
"""How much faster twice the threads are, where it cannot be measured: 213 ms of CPU time a step with one thread, 13,568
tokens/s with two (benchmarks/results/cpu)."""
SUSTAINED = 0.79
"""What whole runs on a CPU have of the speed that a probe's short steps promise: their batches fit no cache. 0.73 to 0.85 for two
shapes, plain and compiled (docs/log/cpu.md)."""


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


def fit_cpu_rates(timings: Sequence[Timing], *, error: float) -> tuple[float, ...]:
    """Rates whose ratios are near the usual ones, by Gauss and Newton on their logarithms.

    The sum of squares is that of relative errors over `error`, and of the logarithms of rate / usual rate, less their mean, over
    SPREAD. Without the second part, noise makes some rates zero, and a vocabulary or a layer looks free.
    """
    features = np.array([timing.features for timing in timings]) / np.array([[t.seconds] for t in timings])
    usual = np.log(USUAL_RATES)
    spread = (np.eye(len(usual)) - 1 / len(usual)) / SPREAD
    logs = usual - math.log(np.median(features @ np.exp(usual)))
    for _ in range(50):
        slopes = np.concatenate([features * np.exp(logs) / error, spread])
        errors = np.concatenate([(features @ np.exp(logs) - 1) / error, spread @ (logs - usual)])
        step = np.linalg.lstsq(slopes, -errors, rcond=None)[0]
        logs = logs + np.clip(step, -0.5, 0.5)
    return tuple(float(rate) for rate in np.exp(logs))


def look_at(place: Runtime, say: Callable[[str], None] = lambda line: None) -> Machine:
    """The machine of this rank, from the cache or by a probe. No other rank takes part. A probe of a busy machine is kept,
    so that the next plan is the same, until one finds the machine calm."""
    path, threads = _path(place), torch.get_num_threads()
    others = 0.0 if place.is_cuda else _measure_others()
    found = _read(path)
    if found is None or not (found["calm"] or _is_busy(others)):
        found = _probe(place, say)
        others = max(others, found.pop("others"))
        with suppress(OSError):  # a cache that cannot be written costs some seconds the next time
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, found)
    return Machine(
        name=_name(place), cuda=place.is_cuda, ranks=place.world, memory_bytes=free_memory(place),
        rates=tuple(rate / found["gain"] for rate in found["rates"]), memory_factor=found["memory_factor"],
        others=others if _is_busy(others) else 0.0, threads=1 if place.is_cuda else threads, calm=found["calm"],
    )  # fmt: skip


def is_known(place: Runtime) -> bool:
    """Whether a probe of this machine is kept."""
    return _read(_path(place)) is not None


def _measure_others() -> float:
    """The cores that other processes want now; 0 where the system does not say."""
    meter = LoadMeter(count_cores())
    time.sleep(LOOK_SECONDS)
    return meter.measure(1) or 0.0


def _is_busy(others: float) -> bool:
    return is_busy(cores=count_cores(), threads=torch.get_num_threads(), others=others)


def _name(place: Runtime) -> str:
    if place.is_cuda:
        return torch.cuda.get_device_name(place.device)
    counts = ((torch.get_num_threads(), "thread"), (count_cores(), "core"))
    threads, cores = (f"{count} {word}{'s' if count > 1 else ''}" for count, word in counts)
    return f"{platform.processor() or platform.machine()}, {threads} of {cores}"


def _path(place: Runtime) -> Path:
    return default_cache() / "plan" / f"probe-{_key(place)}.json"


def _key(place: Runtime) -> str:
    about = [_name(place), platform.node(), os.environ.get("OMP_NUM_THREADS", ""), *sorted(versions().items())]
    return hashlib.sha256(json.dumps([VERSION, *about]).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        sound = len(found["rates"]) == len(RATES) and all(rate >= 0 for rate in found["rates"]) and found["gain"] > 0
        kept = {"rates": found["rates"], "calm": bool(found["calm"])}
        return kept | {name: float(found[name]) for name in ("memory_factor", "gain")} if sound else None
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
        # On a CPU the update of a large table takes as long as a layer: one shape has one that fits no cache.
        rows = GOLF_MODEL.bigram_buckets if place.is_cuda or width > 64 else 65_536
        model = replace(
            GOLF_MODEL, layers=layers, width=width, heads=heads, kv_heads=max(1, heads // 2), vocab_size=vocab,
            value_layers=(layers - 1,), value_width=64, xsa_layers=1, bigram_buckets=rows,
        )  # fmt: skip
        found.append((model, length, tokens))
    return found


def _probe(place: Runtime, say: Callable[[str], None]) -> dict[str, Any]:
    """The rates, the memory and the gain of several threads, whether that was measured, and what other processes wanted."""
    say("probing this machine: some steps at a few shapes, once")
    if not place.is_cuda:
        return _probe_cpu(place)
    # The other ranks do not probe: an optimizer of this rank alone must not wait for them.
    alone = dist.new_group([place.rank], use_local_synchronization=True) if place.world > 1 else None
    benches = [_Bench(place, model, length, tokens, alone) for model, length, tokens in shapes_of(place)]
    if can_rehearse():
        with rehearsal(place.device):  # the kernels of all shapes compile at once
            for bench in benches:
                bench.rehearse()
    timings, factors = [], [1.0]
    while benches:
        found, memory = benches.pop(0).measure()
        timings += found
        factors += memory
        _free(place)
    rates = fit_rates(timings)
    return {"rates": rates, "memory_factor": max(factors), "gain": 1.0, "calm": True, "others": 0.0}


def _probe_cpu(place: Runtime) -> dict[str, Any]:
    alone = dist.new_group([place.rank], use_local_synchronization=True) if place.world > 1 else None
    meter, threads = LoadMeter(count_cores()), torch.get_num_threads()
    timings: list[Timing] = []
    with use_threads(1):
        for model, length, tokens in shapes_of(place):
            bench = _Bench(place, model, length, tokens, alone)
            timings += bench.measure()[0]
            _free(place)
    others = meter.measure(1) or 0.0
    calm = not _is_busy(others)
    gain = DOUBLING ** math.log2(threads)
    if calm and threads > 1:
        measured = bench.measure_gain(timings[-2].seconds)
        beside = meter.measure(threads) or 0.0
        calm, others = not _is_busy(beside), max(others, beside)
        gain = min(float(threads), measured) if calm else gain
    rates = fit_cpu_rates(timings, error=CALM_ERROR if calm else BUSY_ERROR)
    return {"rates": rates, "memory_factor": 1.0, "gain": SUSTAINED * gain, "calm": calm, "others": others}


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
        self._averages: Averages | None = None
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
        """The times of steps and of an update, and measured over estimated memory of activations where the device says. On a
        GPU a pass is timed, on a CPU a whole step: there a large table takes its time in passes, too."""
        self._optimizer = self._make_optimizer()
        self._model.zero_grad()
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.normal_(std=0.02)
        if not self._place.is_cuda:
            self._averages = Averages(self._model, AverageConfig())
        timings, factors = [], []
        for batch in self._batches:
            work = partial(self._add if self._place.is_cuda else self._step, batch)
            work()  # gradients come into being
            before = self._allocated(reset=True)
            seconds = _time(self._place, work)
            features = self._features(batch)
            timings.append(Timing((*features[:4], 0.0, 0.0) if self._place.is_cuda else tuple(features), seconds))
            if self._place.is_cuda:
                tokens = batch.numel() - len(batch)
                estimate = tokens * float(self._costs.token_bytes(cuda=True)[0])
                factors.append((self._allocated() - before) / estimate)
        timings.append(self._measure_update())
        return timings, factors

    def _measure_update(self) -> Timing:
        """On a CPU two layers' worth of a step's launches are the update's, and a third of what a parameter costs: the rest is its
        gradient, which is made in a pass and cleared."""
        features = self._features(self._batches[0])
        if self._place.is_cuda:
            return Timing((0.0, 0.0, 0.0, 0.0, *features[4:]), _time(self._place, self._update))
        seconds = _time(self._place, self._update, prepare=partial(self._add, self._batches[0]))
        return Timing((2.0, 0.0, 0.0, 0.0, features[4], features[5] / 3), seconds)

    def measure_gain(self, alone: float) -> float:
        """How much faster all threads are than the `alone` seconds of one thread, in a step of the larger batch."""
        work = partial(self._step, self._batches[1])
        return alone / _time(self._place, work, now=time.perf_counter)

    def _make_optimizer(self) -> ParallelMuon:
        optim = OptimConfig()
        groups = parameter_groups(self._model, optim)
        return ParallelMuon(groups, max_norm=optim.clip, process_group=self._alone, cuda_graph=self._place.is_cuda)

    def _step(self, batch: Tensor) -> None:
        self._add(batch)
        self._update()

    def _add(self, batch: Tensor) -> None:
        self._passes.start(1)
        self._passes.add(batch)

    def _update(self) -> None:
        with nullcontext() if self._place.is_cuda else autocast(self._place.device, self._precision):
            self._optimizer.step()
        if self._averages is not None:
            self._averages.update(1.0)
            self._model.zero_grad(set_to_none=True)

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


def _time(
    place: Runtime,
    work: Callable[[], None],
    prepare: Callable[[], None] = lambda: None,
    now: Callable[[], float] | None = None,
) -> float:
    """The least of several timings, after one or two that warm up: the time on an undisturbed machine. `now`: CPU time of this
    thread on a CPU if not given, where autograd runs in it, too."""
    warm, repeats = (2, 5) if place.is_cuda else (1, 6)
    now = now or (time.perf_counter if place.is_cuda else time.thread_time)
    seconds = []
    for _ in range(warm + repeats):
        prepare()
        started = now()
        work()
        place.synchronize()
        seconds.append(now() - started)
    return min(seconds[warm:])
