"""The probe: rates that are not negative and explain what was timed, kept in the cache unless it was disturbed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from parbank.plan import probe
from parbank.plan.probe import RATES, Costs, Machine, Timing, fit_rates, look_at, step_features
from parbank.recipes import get_recipe
from parbank.runtime import Runtime

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


def test_a_probe_is_kept_unless_it_was_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARBANK_CACHE", str(tmp_path))
    calls: list[int] = []

    def pretend(place: Runtime, say: object) -> tuple[dict[str, object], bool]:
        calls.append(1)
        return {"rates": [float(len(calls))] * len(RATES), "memory_factor": 1.0}, len(calls) > 1

    monkeypatch.setattr(probe, "_probe", pretend)
    assert [look_at(PLACE).rates[0] for _ in range(4)] == [1, 2, 2, 2]
    (kept,) = (tmp_path / "plan").glob("probe-*.json")
    kept.write_text(json.dumps({"rates": [-1.0], "memory_factor": 1}))
    assert look_at(PLACE).rates[0] == 3, "a file that makes no sense is measured anew"


def test_a_real_probe_explains_its_own_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the smallest shapes, so that it takes a moment. No time is compared with a clock."""
    small = [(model, length, 64) for model, length, _ in probe.shapes_of(PLACE)[:2]]
    monkeypatch.setattr(probe, "shapes_of", lambda place: [(model, 64, count) for model, _, count in small])
    found, _ = probe._probe(PLACE, lambda line: None)
    assert len(found["rates"]) == len(RATES)
    assert all(rate >= 0 for rate in found["rates"])
    model = small[0][0]
    features = step_features(Costs.of([model]), *(np.full(1, value) for value in (64.0, 64.0, 1.0)))
    assert sum(rate * feature[0] for rate, feature in zip(found["rates"], features)) > 0


def test_free_memory_is_read() -> None:
    assert 1e7 < probe.free_memory(PLACE) < 1e14
    assert probe.free_memory(Runtime(device=torch.device("cpu"), world=2)) < 0.75 * probe.free_memory(PLACE)


@pytest.mark.gpu
def test_a_probe_of_a_gpu_measures_memory_and_finds_a_sane_speed() -> None:
    place = Runtime(device=torch.device("cuda", 0))
    found, calm = probe._probe(place, print)
    assert calm
    assert 0.3 < found["memory_factor"] < 3
    costs = Costs.of([get_recipe("sprint").model])
    machine = Machine(name="", cuda=True, ranks=1, memory_bytes=1e10, rates=tuple(found["rates"]))
    seconds = machine.step_seconds(costs, *(np.full(1, value) for value in (2048.0, 131_072.0, 2.0)))[0]
    assert 1e4 < 131_072 / seconds < 1e8
