"""The audit finds probabilities that do not sum to 1, and passes every method whose probabilities do."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from parbank import ops
from parbank.data.shards import TokenSet
from parbank.errors import ParbankError
from parbank.eval.audit import POSITIONS, audited
from parbank.eval.methods import make_method
from parbank.model import GPT
from parbank.recipes import get_recipe
from parbank.runtime import Runtime

PLACE = Runtime(device=torch.device("cpu"))
METHODS = {
    "chunked": {},
    "sliding": {"stride": 16},
    "streaming": {"segment": 100},
    "ttt": {"chunk": 64, "epochs": 1, "lr": 0.05},
}


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(3)
    found = GPT(get_recipe("nano").model)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return found


@pytest.fixture
def tokens() -> TokenSet:
    return TokenSet([np.random.default_rng(1).integers(2, 320, 400).astype(np.uint16)])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_scores_by_probabilities_and_the_audit_changes_nothing(
    model: GPT, tokens: TokenSet, method: str
) -> None:
    scoring = make_method(method, context=64, graphed=False, **METHODS[method])
    plain = scoring.score(model, tokens, PLACE)
    with audited(model) as audit:
        found = scoring.score(model, tokens, PLACE)
    assert np.array_equal(found.nats, plain.nats)
    result = audit.finish(PLACE)
    assert result["worst_deviation"] < 1e-4
    assert POSITIONS <= result["positions"] < 400
    assert "read_out" not in vars(model), "nothing is left on the model"


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_that_is_too_low_is_found(
    model: GPT, tokens: TokenSet, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the normaliser left out one token in a hundred: every score is 0.01 nats better than it may be."""
    honest = ops.softcap_cross_entropy

    def cheap(logits: Tensor, targets: Tensor, softcap: float, *, reduction: str = "mean") -> Tensor:
        return honest(logits, targets, softcap, reduction=reduction) - 0.01

    monkeypatch.setattr(ops, "softcap_cross_entropy", cheap)
    with audited(model) as audit:
        make_method(method, context=64, graphed=False, **METHODS[method]).score(model, tokens, PLACE)
    with pytest.raises(ParbankError, match=r"sum to 1 only within 0\.0101"):
        audit.finish(PLACE)


def test_a_score_that_is_not_a_number_does_not_pass(model: GPT) -> None:
    with audited(model) as audit:
        audit.check(torch.zeros(1, 4), torch.tensor([2]), torch.tensor([math.nan]), torch.float32)
    with pytest.raises(ParbankError, match="within inf"):
        audit.finish(PLACE)
