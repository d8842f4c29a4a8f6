"""Training computes what it computed when the losses were recorded: golden.py says how, and how to record them anew."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.training.golden import BOS, RECORDED, STEPS, VOCAB, configs, make_tokens, train

# CPUs and PyTorch versions sum in other orders. Without vector instructions (ATEN_CPU_CAPABILITY=default) the losses here
# differ by 2e-6; a change of the mathematics shows in the first digits within 30 steps.
TOLERANCE = 1e-4


def recorded() -> dict[str, list[float]]:
    return json.loads(RECORDED.read_text(encoding="utf-8"))["losses"]


@pytest.mark.parametrize("name", configs())
def test_losses_are_the_recorded_ones(name: str, tmp_path: Path) -> None:
    assert train(configs()[name], tmp_path) == pytest.approx(recorded()[name], rel=TOLERANCE), (
        "if this was meant, record the losses anew: python -m tests.training.golden"
    )


def test_the_record_is_worth_comparing_with() -> None:
    losses = recorded()
    assert losses.keys() == configs().keys()
    for values in losses.values():
        assert len(values) == STEPS
        assert values[0] == pytest.approx(np.log(VOCAB), rel=0.02), "uniform over the vocabulary at the start"
        assert values[-1] < values[0] - 0.5, "a run that learns nothing would hide most changes"


def test_the_text_has_what_the_options_need() -> None:
    tokens = make_tokens(12_000)
    assert tokens[0] == BOS
    assert int(tokens.max()) < VOCAB
    assert 12_000 / 100 < np.count_nonzero(tokens == BOS) < 12_000 / 40
    assert len(tokens) < STEPS * 512, "the second epoch's order should count, too"
