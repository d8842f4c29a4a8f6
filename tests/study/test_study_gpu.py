"""Studies on a GPU: pairs of kernels compute the same, runs of one process do not disturb each other."""

from pathlib import Path

import pytest
import torch

from parbank.study.engine import run_study
from parbank.study.kernels import KERNELS, Bench
from parbank.study.kinds.kernels import time_calls, warm_up
from parbank.study.machine import ClockWatch
from parbank.study.ship import make_study
from parbank.study.study import BASE, Job
from tests.study.test_kinds import as_list

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", KERNELS)
def test_a_pair_computes_the_same_and_is_timed(name: str) -> None:
    """Within the rounding of bfloat16, and of FP8 where that is the question."""
    torch._dynamo.reset()
    challenger, incumbent = KERNELS[name](Bench(CUDA, 1))
    tolerance = 0.1 if name == "fp8-mlp" else 0.02
    for a, b in zip(as_list(challenger()), as_list(incumbent()), strict=True):
        error = (a.float() - b.float()).norm() / b.float().norm()
        assert error < tolerance, float(error)
    times = time_calls(warm_up({"challenger": challenger, "incumbent": incumbent}, CUDA), CUDA)
    assert all(0 < milliseconds < 100 for milliseconds in times.values())


def test_runs_of_one_process_are_those_of_processes_of_their_own(text_spec: str, tmp_path: Path) -> None:
    """A run after others, with their graphs freed, gives the score that it gives alone."""
    options = {"recipe": "nano", "data": text_spec, "budget": "20steps", "score_tokens": 4000}
    many = make_study("seeds", seeds=2, arms=["value-residual", "relu-squared"], **options)  # type: ignore[arg-type]
    alone = make_study("seeds", seeds=2, arms=[], **options)  # type: ignore[arg-type]
    first = run_study(many, tmp_path / "many", workers=0, quiet=True)
    second = run_study(alone, tmp_path / "alone", quiet=True)  # in a worker's process
    assert not first.failures
    for seed in range(2):
        values = [report.results[Job(BASE, seed)]["value"] for report in (first, second)]
        assert values[0] == pytest.approx(values[1], rel=1e-3)
        assert first.results[Job(BASE, seed)]["recompilations"] == 0
    assert "neighbours" in first.results[Job(BASE, 0)]


def test_the_card_is_watched() -> None:
    x = torch.randn(4096, 4096, device=CUDA)
    with ClockWatch(CUDA) as watch:
        for _ in range(2000):
            x = (x @ x).tanh()
        torch.cuda.synchronize()
    assert not watch.found or watch.found["clock_mhz"] > 100
