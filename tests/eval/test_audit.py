"""The audit finds probabilities that do not sum to 1, and passes every method whose probabilities do."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from parbank import ops
from parbank.data.shards import TokenSet
from parbank.errors import ParbankError
from parbank.eval.adaptation.documents import DocumentReader
from parbank.eval.audit import POSITIONS, SAMPLE, Audit, Audited, audited
from parbank.eval.methods import METHODS as registered
from parbank.eval.methods import adaptive, make_method
from parbank.eval.mixing import audit as mixture
from parbank.eval.mixing.ngrams import NgramCounts, Prediction
from parbank.eval.score import Scored
from parbank.model import GPT
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from tests.eval.sizes import TOKENIZER

PLACE = Runtime(device=torch.device("cpu"))
METHODS: dict[str, dict[str, Any]] = {
    "chunked": {},
    "sliding": {"stride": 16},
    "streaming": {"segment": 100},
    "ttt": {"chunk": 64, "epochs": 1, "lr": 0.05},
    "adaptive": {
        "chunk": 16,
        "lr": 0.01,
        "rank": 8,
        "rows": 2,
        "orders": (1, 2),
        "mix_block": 8,
        "mix_rate": 0.2,
        "allowance": 0.5,
    },
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
    """Random documents, each with a passage that comes twice, so that n-grams take part."""
    rng = np.random.default_rng(1)
    parts = [
        np.concatenate([[1], passage, rng.integers(2, 320, 20), passage]) for passage in rng.integers(2, 320, (4, 39))
    ]
    return TokenSet([np.concatenate(parts).astype(np.uint16)])


def audit_score(name: str, model: GPT, tokens: TokenSet, **settings: Any) -> tuple[Scored, dict[str, Any]]:
    """A score, and what its audit says. A failed audit raises."""
    method = make_method(name, **{"context": 64, "graphed": False, **METHODS[name], **settings})
    with audited(model, PLACE.device, POSITIONS) as audit:
        found = method.score(model, tokens, PLACE, tokenizer=TOKENIZER)
    method.audit(audit, model, found, PLACE, tokenizer=TOKENIZER)
    result = audit.gather(PLACE)
    result.refuse_faults()
    return found, result.describe()


@pytest.mark.parametrize("method", METHODS)
def test_every_method_scores_by_probabilities_and_the_audit_changes_nothing(
    model: GPT, tokens: TokenSet, method: str
) -> None:
    plain = make_method(method, context=64, graphed=False, **METHODS[method]).score(
        model, tokens, PLACE, tokenizer=TOKENIZER
    )
    found, result = audit_score(method, model, tokens)
    assert np.array_equal(found.nats, plain.nats)
    assert result["worst_deviation"] < 1e-4
    assert result["positions"] >= POSITIONS
    assert len(plain.nats) / 100 < plain.audit.positions < result["positions"], (
        "every score is audited, at fewer positions"
    )
    assert plain.audit.deviation < 1e-4
    assert "read_out" not in vars(model), "nothing is left on the model"


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_that_is_too_low_is_refused_in_every_score(
    model: GPT, tokens: TokenSet, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the normaliser left out one token in 500: every score is 0.002 nats better than it may be."""
    honest = ops.softcap_cross_entropy

    def cheap(logits: Tensor, targets: Tensor, softcap: float, *, reduction: str = "mean") -> Tensor:
        return honest(logits, targets, softcap, reduction=reduction) - 0.002

    monkeypatch.setattr(ops, "softcap_cross_entropy", cheap)
    found = make_method(method, context=64, graphed=False, **METHODS[method]).score(
        model, tokens, PLACE, tokenizer=TOKENIZER
    )
    with pytest.raises(ParbankError, match=r"sum to 1 only within 0\.002, which is .* times what rounding explains"):
        found.total(TOKENIZER)
    with pytest.raises(ParbankError, match="the score is refused"):
        audit_score(method, model, tokens)


@pytest.mark.parametrize("method", METHODS)
def test_passes_that_are_cheaper_than_their_sample_are_refused(
    model: GPT, tokens: TokenSet, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a kernel were wrong for many rows, and right for the few of the sample."""
    honest = ops.softcap_cross_entropy

    def cheap(logits: Tensor, targets: Tensor, softcap: float, *, reduction: str = "mean") -> Tensor:
        return honest(logits, targets, softcap, reduction=reduction) - 0.01 * (targets.numel() > SAMPLE)

    monkeypatch.setattr(ops, "softcap_cross_entropy", cheap)
    found = make_method(method, context=64, graphed=False, **METHODS[method]).score(
        model, tokens, PLACE, tokenizer=TOKENIZER
    )
    said = r"cost 0\.0\d+ nats less on average than the same positions computed again"
    with pytest.raises(ParbankError, match="sum to 1 only within" if method == "adaptive" else said):
        found.total(TOKENIZER)


def test_every_method_is_audited() -> None:
    assert set(METHODS) == set(registered)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rank": 0},
        {"orders": ()},
        {"orders": (0, 3)},
        {"scopes": ("text",)},
        {"temperatures": (1.0,)},
        {"lr": None, "rates": (0.0, 0.1), "pilot": 2},
    ],
)
def test_every_part_of_a_mixture_is_summed(model: GPT, tokens: TokenSet, settings: dict[str, Any]) -> None:
    method = make_method("adaptive", **{"context": 64, "graphed": False, **METHODS["adaptive"], **settings})
    with audited(model, PLACE.device) as audit:
        found = method.score(model, tokens, PLACE, tokenizer=TOKENIZER)
    passes = audit.gather(PLACE).positions
    method.audit(audit, model, found, PLACE, tokenizer=TOKENIZER)
    result = audit.gather(PLACE)
    assert result.positions == passes + mixture.THOROUGH[1]
    assert result.deviation < 1e-4
    assert "read_out" not in vars(model), "nothing is left on the model"


def too_few_kinds(predict: Callable[..., Prediction]) -> Callable[..., Prediction]:
    """n-grams that give away less for unseen tokens than they take off the seen ones."""

    def wrong(base: np.ndarray, counts: Iterable[NgramCounts], **settings: float) -> Prediction:
        more = (replace(found, pair=np.where(found.pair > 0, found.pair + 1, 0)) for found in counts)
        return predict(base, more, **settings)

    return wrong


def cheaper(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda *values, **settings: function(*values, **settings) - 0.01


def temper_wrongly(self: DocumentReader, x: Tensor, targets: Tensor, nats: Tensor) -> Tensor:
    """Forgets that the normaliser of a temperature is another one."""
    return torch.stack([nats / t for t in self._temperatures], -1)


@pytest.mark.parametrize(
    ("name", "fault"),
    [("mix_bayes", cheaper), ("mix_online", cheaper), ("guard", cheaper), ("predict", too_few_kinds)],
)
def test_a_fault_of_the_mixture_is_found(
    model: GPT, tokens: TokenSet, monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(adaptive, name, fault(getattr(adaptive, name)))
    with pytest.raises(ParbankError, match="sum to 1 only within"):
        audit_score("adaptive", model, tokens)


def test_a_wrong_temperature_is_found(model: GPT, tokens: TokenSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DocumentReader, "_temper", temper_wrongly)
    with pytest.raises(ParbankError, match="sum to 1 only within"):
        audit_score("adaptive", model, tokens)


def check(nats: list[float], passed: list[float], dtype: torch.dtype = torch.bfloat16) -> Audited:
    """The audit of positions whose right nats are log(4)."""
    audit, count = Audit(PLACE.device), len(nats)
    targets, numbers = torch.zeros(count, dtype=torch.int64), map(torch.tensor, (nats, passed))
    audit.check(torch.full((count, 4), 10.0), targets, *numbers, count, dtype)
    return audit.gather(PLACE)


def test_rounding_goes_both_ways_and_a_gain_does_not() -> None:
    right = math.log(4)
    noise = [right + (0.1 if number % 2 else -0.1) for number in range(100)]
    check([right] * 100, noise).refuse_faults()
    with pytest.raises(ParbankError, match=r"cost 0\.1 nats less on average.*rounding explains 0\.041"):
        check([right] * 100, [right - 0.1] * 100).refuse_faults()
    few = check([right] * 4, [right, right, right, right - 0.1])
    few.refuse_faults()
    with pytest.raises(ParbankError, match=r"rounding explains 0\.00105"):
        check([right] * 4, [right, right, right, right - 0.1], torch.float32).refuse_faults()
    with pytest.raises(ParbankError, match="nats less on average"):
        few.join(check([right] * 100, [right - 0.1] * 100)).refuse_faults()


def test_a_sample_that_is_not_a_number_does_not_pass() -> None:
    with pytest.raises(ParbankError, match="within inf"):
        check([math.nan], [math.log(4)]).refuse_faults()


def test_numbers_that_are_no_costs_have_no_total() -> None:
    tokens = np.array([1, 2, 3], dtype=np.uint16)
    Scored(tokens, np.array([1.0, -1e-6], dtype=np.float32)).total(TOKENIZER)
    for nats, said in (
        (math.nan, "not a number from token 2 of 2"),
        (math.inf, "not a number"),
        (-0.01, "costs -0.01 nats"),
    ):
        with pytest.raises(ParbankError, match=said):
            Scored(tokens, np.array([1.0, nats], dtype=np.float32)).total(TOKENIZER)
