"""The probe: rates that are not negative and explain what was timed, kept in the cache unless it was disturbed."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from parbank.model import ModelConfig
from parbank.plan import probe
from parbank.plan.machine import RATES, Costs, Machine, step_features
from parbank.plan.probe import BUSY_ERROR, CALM_ERROR, USUAL_RATES, Timing, fit_cpu_rates, fit_rates, look_at
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from parbank.threads import use_threads

PLACE = Runtime(device=torch.device("cpu"))


def test_rates_are_recovered_and_never_negative() -> None:
    rng = np.random.default_rng(0)
    truth = np.array([1e-4, 2e-11, 0.0, 3e-9, 1e-11, 2e-9])
    features = rng.random((20, len(RATES))) / np.array([1e-4, 2e-11, 1e-9, 3e-9, 1e-11, 2e-9])
    found = fit_rates([Timing(tuple(row), float(row @ truth)) for row in features])
    assert np.array(found) == pytest.approx(truth, rel=1e-3, abs=1e-13)
    noisy = fit_rates([Timing(tuple(row), float(row @ truth * rng.uniform(0.8, 1.2))) for row in features])
    assert all(rate >= 0 for rate in noisy)


def test_a_larger_model_takes_longer_and_more_memory() -> None:
    machine = Machine(name="", cuda=True, ranks=1, memory_bytes=24e9, rates=(1e-6, 1e-15, 1e-12, 1e-12, 1e-15, 1e-11))
    costs = Costs.of([get_recipe("demo").model, get_recipe("golf").model])
    seconds = machine.step_seconds(costs, *(np.full(2, value) for value in (2048.0, 65_536.0, 1.0)))
    assert seconds[1] > 5 * seconds[0] > 0
    small, large = machine.most_tokens(costs)
    assert small > large > 65_536, "the golf model in batches of 65,536 fits 24 GB: sprint takes 15 GB for 98,304"
    assert large < 120_000


FEATURES = [
    [x for x in probe._Bench(PLACE, model, length, 32, None)._features(torch.zeros(tokens // length, length + 1))]
    for model, length, tokens in probe.shapes_of(PLACE)
]


def make_timings(rates: tuple[float, ...], noise: float, seed: int) -> list[Timing]:
    """What a CPU of these rates would show, each time off by a factor."""
    rng = np.random.default_rng(seed)
    rows = [row for whole in FEATURES for row in (whole, [2 * x for x in whole[:4]] + whole[4:])]
    rows += [[2.0, 0.0, 0.0, 0.0, whole[4], whole[5] / 3] for whole in FEATURES]
    return [Timing(tuple(row), float(np.dot(rates, row) * math.exp(noise * rng.normal()))) for row in rows]


def test_rates_of_a_cpu_are_never_zero_and_steady_under_noise() -> None:
    """A rate of zero makes a vocabulary or a layer look free: the plan is then noise."""
    truth = tuple(2.5 * rate for rate in USUAL_RATES)
    costs = Costs.of([get_recipe("demo").model, replace(get_recipe("demo").model, width=64, heads=1, kv_heads=1)])
    found = [fit_cpu_rates(make_timings(truth, 0.15, seed), error=BUSY_ERROR) for seed in range(20)]
    assert min(min(np.divide(rates, truth)) for rates in found) > 0.3
    seconds = np.array([step_seconds(rates, costs) for rates in found])
    assert (seconds.std(axis=0) / seconds.mean(axis=0)).max() < 0.15
    assert seconds.mean(axis=0) == pytest.approx(step_seconds(truth, costs), rel=0.1)
    plain = [fit_rates(make_timings(truth, 0.15, seed)) for seed in range(5)]
    assert any(min(rates) == 0 for rates in plain), "without the usual ratios some are zero"


def test_a_cpu_of_other_ratios_is_found_as_it_is_while_calm() -> None:
    other = tuple(factor * rate for factor, rate in zip((1, 4, 0.5, 2, 3, 1.5), USUAL_RATES))
    found = fit_cpu_rates(make_timings(other, 0.0, 0), error=CALM_ERROR)
    costs = Costs.of([get_recipe("demo").model])
    assert step_seconds(found, costs) == pytest.approx(step_seconds(other, costs), rel=0.1)


def step_seconds(rates: tuple[float, ...], costs: Costs) -> np.ndarray:
    machine = Machine(name="", cuda=False, ranks=1, memory_bytes=1e9, rates=rates)
    shape = costs.layers.shape
    return machine.step_seconds(costs, *(np.full(shape, value) for value in (256.0, 2048.0, 1.0)))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """The loads that plans find, one after another; the last one stays. Probes count their calls in their rates."""
    monkeypatch.setenv("PARBANK_CACHE", str(tmp_path))
    monkeypatch.setattr(probe, "count_cores", lambda: 2)
    wanted = [0.0]
    monkeypatch.setattr(probe, "_measure_others", lambda: wanted[0] if len(wanted) == 1 else wanted.pop(0))
    calls: list[int] = []

    def pretend(place: Runtime, say: object) -> dict[str, object]:
        calls.append(1)
        busy = wanted[0] > 1
        return {
            "rates": [float(len(calls))] * len(RATES), "memory_factor": 1.0, "gain": 1.0, "calm": not busy, "others": wanted[0],
        }  # fmt: skip

    monkeypatch.setattr(probe, "_probe", pretend)
    return wanted


def test_a_busy_machine_gets_the_same_plan_again_until_it_is_calm(loads: list[float], tmp_path: Path) -> None:
    with use_threads(2):
        loads[:] = [6.0]
        machines = [look_at(PLACE) for _ in range(3)]
        assert [machine.rates[0] for machine in machines] == [1, 1, 1]
        assert all(machine.others == 6.0 and not machine.calm for machine in machines)
        loads[:] = [0.1]
        calm = [look_at(PLACE) for _ in range(3)]
        assert [machine.rates[0] for machine in calm] == [2, 2, 2], "measured anew, once"
        assert all(machine.others == 0 and machine.calm for machine in calm)
        loads[:] = [3.0]
        assert (look_at(PLACE).rates[0], look_at(PLACE).others, look_at(PLACE).calm) == (2, 3.0, True)
    (kept,) = (tmp_path / "plan").glob("probe-*.json")
    kept.write_text(json.dumps({"rates": [-1.0], "memory_factor": 1}))
    with use_threads(2):
        assert look_at(PLACE).rates[0] == 3, "a file that makes no sense is measured anew"


@pytest.mark.parametrize(
    ("others", "gain", "calm"), [([0.0, 0.0], 1.7, True), ([5.0], 1.4, False), ([0.0, 5.0], 1.4, False)]
)
def test_the_gain_of_threads_is_measured_only_while_the_machine_is_calm(
    others: list[float], gain: float, calm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[0, 5]: another process began while the threads were timed."""
    monkeypatch.setattr(probe, "count_cores", lambda: 2)
    monkeypatch.setattr(probe, "LoadMeter", lambda cores: SimpleNamespace(measure=lambda threads: others.pop(0)))
    monkeypatch.setattr(probe, "_Bench", FakeBench)
    with use_threads(2):
        found = probe._probe(PLACE, lambda line: None)
    assert (found["gain"], found["calm"]) == (pytest.approx(probe.SUSTAINED * gain), calm)
    assert found["others"] == (0.0 if calm else 5.0)


class FakeBench:
    """A machine of the usual rates, timed with one thread."""

    def __init__(self, place: Runtime, model: ModelConfig, length: int, tokens: int, alone: object) -> None:
        self._features = [
            float(x[0]) for x in step_features(Costs.of([model]), *map(np.array, ([length], [tokens], [1])))
        ]

    def measure(self) -> tuple[list[Timing], list[float]]:
        assert torch.get_num_threads() == 1
        seconds = float(np.dot(USUAL_RATES, self._features))
        return [Timing(tuple(self._features), seconds)] * 3, []

    def measure_gain(self, alone: float) -> float:
        assert torch.get_num_threads() == 2
        assert alone == pytest.approx(np.dot(USUAL_RATES, self._features))
        return 1.7


def test_a_real_probe_of_a_cpu_explains_its_own_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the smallest shapes, so that it takes a moment. No time is compared with a clock."""
    small = [(replace(model, bigram_buckets=256), 64, 64) for model, _, _ in probe.shapes_of(PLACE)[:2]]
    monkeypatch.setattr(probe, "shapes_of", lambda place: small)
    before = torch.get_num_threads()
    found = probe._probe(PLACE, lambda line: None)
    assert torch.get_num_threads() == before
    assert len(found["rates"]) == len(RATES)
    assert all(rate > 0 for rate in found["rates"])
    assert found["gain"] > 0


def test_a_step_computes_in_the_thread_whose_time_is_taken() -> None:
    """Autograd and the optimizer must not leave it, or the CPU time of this thread would not be that of the step."""
    model = replace(probe.shapes_of(PLACE)[1][0], bigram_buckets=256)
    with use_threads(1):
        bench = probe._Bench(PLACE, model, 64, 128, None)
        bench.measure()
        shares = []
        for _ in range(5):
            own, whole = time.thread_time(), time.process_time()
            bench._step(bench._batches[1])
            shares.append((time.thread_time() - own) / (time.process_time() - whole))
    assert max(shares) > 0.9, "of some steps nothing else in this process takes a part"


def test_a_name_has_no_plural_of_one() -> None:
    with use_threads(1):
        assert probe._name(PLACE).partition(", ")[2].startswith("1 thread of ")


@pytest.mark.gpu
def test_a_probe_of_a_gpu_measures_memory_and_finds_a_sane_speed() -> None:
    place = Runtime(device=torch.device("cuda", 0))
    found = probe._probe(place, print)
    assert found["calm"]
    assert 0.3 < found["memory_factor"] < 3
    costs = Costs.of([get_recipe("sprint").model])
    machine = Machine(name="", cuda=True, ranks=1, memory_bytes=1e10, rates=tuple(found["rates"]))
    seconds = machine.step_seconds(costs, *(np.full(1, value) for value in (2048.0, 131_072.0, 2.0)))[0]
    assert 1e4 < 131_072 / seconds < 1e8
