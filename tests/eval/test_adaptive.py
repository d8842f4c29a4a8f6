"""Adaptive scores: probabilities that sum to 1, no token scored after it was learnt from, and no document that loses."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from parbank.data.shards import TokenSet
from parbank.errors import ConfigError
from parbank.eval.adaptation.documents import DocumentReader, DocumentSpan, find_documents, group_documents
from parbank.eval.adaptation.factors import DocumentFactors
from parbank.eval.audit import POSITIONS, audited
from parbank.eval.methods import adaptive as adaptive_module
from parbank.eval.methods import make_method
from parbank.eval.methods.adaptive import _find_best
from parbank.eval.methods.base import place_in_document
from parbank.eval.methods.streaming import Streaming
from parbank.eval.mixing.bayes import mix_bayes
from parbank.eval.mixing.online import SPAN, MixConfig, classify_lead, mix_online
from parbank.eval.result import refuse_unlike
from parbank.eval.score import Text
from parbank.model import GPT, ModelConfig
from parbank.runtime import Runtime
from tests.eval.sizes import TOKENIZER

CPU = Runtime(device=torch.device("cpu"))
VOCAB, BOS, CONTEXT = 13, 1, 24
SETTINGS: dict[str, dict[str, Any]] = {
    "factors": {"orders": (), "temperatures": (1.0,)},
    "factors and temperatures": {"orders": ()},
    "n-grams": {"rank": 0},
    "n-grams of the document": {"rank": 0, "scopes": ("document",)},
    "everything": {},
    "a rate that two documents choose": {"orders": (), "lr": None, "rates": (0.02, 0.05), "pilot": 2},
    "a start that one document teaches": {"orders": (), "temperatures": (1.0,), "pilot": 1, "warm": 2.0},
}


def make_model(std: float = 0.3) -> GPT:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "rope_dims": 4}
    model = GPT(ModelConfig(vocab_size=VOCAB, bos_id=BOS, bigram_buckets=16, bigram_width=8, smear=True, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=std)
    return model


def make_tokens() -> np.ndarray:
    """Documents that repeat themselves and each other, some of them shorter than a chunk."""
    rng = np.random.default_rng(0)
    phrase = rng.integers(2, VOCAB, 9)
    lengths = (45, 3, 70, 1, 20)
    documents = [np.concatenate([[BOS], rng.permutation(np.tile(phrase, 8)[:n]), phrase]) for n in lengths]
    return np.concatenate(documents).astype(np.uint16)


def score(tokens: np.ndarray, model: GPT | None = None, **settings: Any) -> np.ndarray:
    usual = {
        "context": CONTEXT,
        "chunk": 8,
        "lr": 0.02,
        "rows": 2,
        "orders": (2, 3, 4, 8),
        "mix_block": 8,
        "mix_rate": 0.1,
        "allowance": 0.5,  # the texts are short: by the default, the adaptive prediction would hardly count
    }
    method = make_method("adaptive", **{**usual, **settings})
    return method.score(model or make_model(), TokenSet([tokens]), CPU, tokenizer=TOKENIZER).nats


def plain(tokens: np.ndarray, model: GPT | None = None) -> np.ndarray:
    return Streaming(context=CONTEXT).score(model or make_model(), TokenSet([tokens]), CPU).nats


@pytest.mark.parametrize("name", SETTINGS)
def test_probabilities_sum_to_1_over_the_vocabulary(name: str) -> None:
    """By the definition: the last token of a text is replaced by every other, and each is scored."""
    tokens = make_tokens()[55:145]  # it ends inside a phrase that came before, so n-grams take part
    total = 0.0
    for token in range(VOCAB):
        text = np.concatenate([tokens, [token]]).astype(np.uint16)
        found = score(text, **SETTINGS[name])
        total += float(np.exp(-found[-1].astype(np.float64)))
    assert abs(found[-1] - plain(text)[-1]) > 1e-3
    assert total == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_token_changes_no_score_before_its_own(name: str) -> None:
    tokens = make_tokens()
    found = score(tokens, **SETTINGS[name])
    assert np.abs(found - plain(tokens)).max() > 1e-2, "the test must be able to see adaptation"
    for place in (20, 53, 100):
        other = tokens.copy()
        other[place] = 2 + (other[place] + 7) % (VOCAB - 2)
        changed = np.abs(score(other, **SETTINGS[name]) - found)
        assert changed[: place - 1].max() < 1e-5, "targets before it: token t is target t - 1"
        assert changed[place - 1] > 1e-3


def test_the_factors_score_a_chunk_before_they_learn_from_it() -> None:
    """The first chunk of every document is scored by the model as it came; and the next one is not."""
    tokens, model = make_tokens(), make_model().eval().requires_grad_(False)
    ids = torch.from_numpy(tokens.astype(np.int64))
    found = {}
    for lr in (0.0, 0.02):
        reader = DocumentReader(model, CPU, rows=2, rank=4, chunk=8, window=CONTEXT, decay=100, graphed=False)
        nats = torch.zeros(len(tokens))
        for group in group_documents(find_documents(tokens, BOS), 2):
            for places, part in reader.read(ids, group, [lr]):
                nats[places] = part[..., 0]
        found[lr] = nats[:-1].numpy()
    place = place_in_document(tokens, BOS)
    assert np.array_equal(found[0.02][place < 8], found[0.0][place < 8])
    assert np.abs(found[0.02] - found[0.0])[(place >= 8) & (place < 16)].max() > 1e-3
    for document in find_documents(tokens, BOS):  # without learning: each document alone, streamed
        alone = TokenSet([tokens[document.first : document.last + 1]])
        expected = Streaming(context=CONTEXT).score(model, alone, CPU).nats
        np.testing.assert_allclose(found[0.0][document.first : document.last], expected, rtol=1e-4, atol=1e-4)


def test_documents_learn_apart_from_each_other() -> None:
    """A document's factors are the same, whatever is read beside it and in whatever order."""
    tokens = make_tokens()
    starts = [*np.flatnonzero(tokens == BOS), len(tokens)]
    parts = [tokens[a:b] for a, b in itertools.pairwise(starts)]
    turned = np.concatenate(parts[::-1])
    method: Any = make_method("adaptive", context=CONTEXT, chunk=8, lr=0.02, rows=2)
    found = []
    for text in (tokens, turned):
        loaded = Text.load(TokenSet([text]), CPU)
        found.append(method.read_documents(make_model(), loaded, CPU, lambda share: None))
    by_document = [np.split(nats, np.flatnonzero(text == BOS)[1:]) for nats, text in zip(found, (tokens, turned))]
    for mine, other in zip(by_document[0][1:-1], by_document[1][::-1][1:-1]):  # the last target differs at the ends
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pilot", [1, 3, 5, 9])
def test_the_first_documents_choose_the_rate_of_all_others(pilot: int) -> None:
    tokens, rates = make_tokens(), (0.001, 0.05, 0.02)
    shape: dict[str, Any] = {"context": CONTEXT, "chunk": 8, "rows": 2, "warm": 0.0}
    text, temperatures = Text.load(TokenSet([tokens]), CPU), (1.0, 1.1)

    def read(**settings: Any) -> np.ndarray:
        method: Any = make_method("adaptive", temperatures=temperatures, **shape, **settings)
        return np.asarray(method.read_documents(make_model(), text, CPU, lambda share: None))

    found = read(rates=rates, pilot=pilot).reshape(-1, len(rates), 2)
    alone = [read(lr=rate) for rate in rates]
    documents = find_documents(tokens, BOS)
    known = documents[pilot].first if pilot < len(documents) else len(found)
    costs = [nats[:known].astype(np.float64).sum(0).min() for nats in alone]
    assert sorted(costs)[0] < sorted(costs)[1] - 1e-3, "one of them is better"
    for number, nats in enumerate(alone):
        np.testing.assert_allclose(found[:known, number], nats[:known], rtol=1e-4, atol=1e-4)
        best = alone[int(np.argmin(costs))]
        np.testing.assert_allclose(found[known:, number], best[known:], rtol=1e-4, atol=1e-4)


def test_later_documents_start_from_what_earlier_phases_taught() -> None:
    """The first chunk of a document shows where its factors start: nothing in it has been learnt from yet."""
    tokens = make_tokens()
    text, place = Text.load(TokenSet([tokens]), CPU), place_in_document(tokens, BOS)
    number = np.cumsum(tokens[:-1] == BOS) - 1

    def read(warm: float, own: Text = text, pilot: int = 1) -> np.ndarray:
        shape: dict[str, Any] = {"context": CONTEXT, "chunk": 8, "rows": 2, "temperatures": (1.0,)}
        method: Any = make_method("adaptive", **shape, rates=(0.001, 0.02), pilot=pilot, warm=warm)
        return np.asarray(method.read_documents(make_model(), own, CPU, lambda share: None))

    cold, warm = read(0.0), read(1.0)
    assert np.array_equal(warm[number == 0], cold[number == 0]), "the first phase has no teacher"
    starts = place < 8
    assert np.abs(warm - cold)[starts & (number == 1)].max() > 1e-3
    changed = tokens.copy()
    changed[np.flatnonzero(tokens == BOS)[1] + 5] = 2  # in the first document of the second phase, which has two
    other = read(1.0, Text.load(TokenSet([changed]), CPU))
    moved = np.abs(other - warm).max(1)
    assert moved[number == 2].max() < 1e-5, "documents of one phase see nothing of each other"
    assert moved[number == 3].max() > 1e-5, "those of the next phase do"
    assert np.array_equal(read(1.0, pilot=5), read(0.0, pilot=5)), "one phase alone"


@pytest.mark.parametrize("warm", [0.0, 1.0])
def test_the_documents_read_together_change_rounding_only(warm: float) -> None:
    """Also where later documents start: nobody's last chunk teaches more, or less, for what is read beside it."""
    text, found = Text.load(TokenSet([make_tokens()]), CPU), []
    for rows in (1, 2, 64):
        shape: dict[str, Any] = {"context": CONTEXT, "chunk": 8, "rows": rows, "temperatures": (1.0,)}
        method: Any = make_method("adaptive", **shape, rates=(0.01, 0.02), pilot=2, warm=warm)
        found.append(method.read_documents(make_model(), text, CPU, lambda share: None))
    for other in found[1:]:
        np.testing.assert_allclose(found[0], other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 11, 100])
def test_phases_double_and_leave_no_document_out(count: int) -> None:
    documents = [DocumentSpan(10 * number, 10 * number + 10) for number in range(count)]
    method: Any = make_method("adaptive", context=CONTEXT, pilot=2)
    first, *later = method.find_phases(documents, 3)
    assert [(d.first, d.rate) for d in first] == [(d.first, rate) for d in documents[:2] for rate in range(3)]
    assert [d for phase in later for d in phase] == documents[2:]
    assert [len(phase) for phase in later[:-1]] == [4, 8, 16, 32, 64][: max(len(later) - 1, 0)]
    cold: Any = make_method("adaptive", context=CONTEXT, pilot=2, warm=0.0)
    assert len(cold.find_phases(documents, 3)) == 1 + (count > 2)


def test_a_start_is_the_mean_of_sound_ends() -> None:
    factors = DocumentFactors({"a.key.0": (3, 5)}, rows=4, rank=2, device=CPU.device)
    left = torch.arange(24.0).view(4, 3, 2)
    factors.left["a.key.0"].copy_(left)
    factors._square["a.key.0"].fill_(0.5)
    factors._square["a.key.0"][2, 0, 0] = math.inf  # the last gradient overflowed when it was squared
    factors.left["a.key.0"][3, 0, 0] = math.nan
    rows, steps = torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0])
    ends = factors.sum_ends(rows, steps)
    assert len(ends) == factors.end_size
    assert ends[0] == 2
    assert factors.sum_ends(rows[:0], steps[:0])[0] == 0
    factors.start_from(torch.zeros(factors.end_size), 1.0)
    assert not factors.warm, "nothing was learnt"
    factors.start_from(ends, 0.5)
    factors.reset()
    torch.testing.assert_close(factors.left["a.key.0"][2], 0.5 * (left[0] + left[1]) / 2)
    square = (0.5 / 0.01 + 0.5 / (1 - 0.99**2)) / 2  # means over one step and two, which started from zero
    torch.testing.assert_close(factors._square["a.key.0"], torch.full((4, 3, 2), square))


def test_a_document_that_is_over_keeps_its_factors() -> None:
    factors = DocumentFactors({"a.key.0": (3, 5)}, rows=2, rank=2, device=CPU.device)
    grads, rate = {"a.key.0": torch.ones(2, 3, 2)}, torch.ones(2, 1, 1)
    factors.step(grads, rate, torch.ones(()), torch.ones(2, 1, 1))
    before, left = factors._square["a.key.0"].clone(), factors.left["a.key.0"].clone()
    none = {"a.key.0": torch.tensor([0.0, 1.0])[:, None, None].expand(2, 3, 2)}
    factors.step(none, rate, torch.full((), 2.0), torch.tensor([0.0, 1.0])[:, None, None])
    assert torch.equal(factors._square["a.key.0"][0], before[0])
    assert (factors._square["a.key.0"][1] > before[1]).all()
    assert torch.equal(factors.left["a.key.0"][0], left[0])


def test_a_rate_at_which_factors_overflow_is_never_the_best() -> None:
    nats = torch.tensor([[[math.nan, math.nan], [3.0, 4.0], [2.5, 9.0]]]).repeat(5, 1, 1)
    assert _find_best(nats) == 2
    nats[2, 2] = math.inf
    assert _find_best(nats) == 1


def test_tokens_weighed_together_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, rng = make_tokens(), np.random.default_rng(0)
    alone, adapted = (rng.exponential(2.0, shape) for shape in (len(tokens) - 1, (len(tokens) - 1, 6)))
    method: Any = make_method("adaptive", context=CONTEXT, orders=())
    whole = method.mix(tokens, BOS, np.ones(len(alone)), alone, adapted, {})
    monkeypatch.setattr(adaptive_module, "TOGETHER", 7)
    parts = method.mix(tokens, BOS, np.ones(len(alone)), alone, adapted, {})
    np.testing.assert_allclose(parts, whole, rtol=1e-12, atol=1e-12)


def test_a_share_of_the_plain_model_is_one_of_the_predictions() -> None:
    """Two that are wrong by turns: alone, each costs 6 nats every second token, and together at most log 4 each."""
    tokens = make_tokens()
    turns = np.arange(len(tokens) - 1) % 2 * 6.0
    method: Any = make_method("adaptive", context=CONTEXT, orders=(), allowance=1e9, prior=1e-9)
    found = method.mix(tokens, BOS, np.ones(len(turns)), turns, 6 - turns[:, None], {})
    assert found.sum() < 0.35 * turns.sum()


def test_factors_that_wreck_the_model_cost_next_to_nothing() -> None:
    """They are perfect in the first document, so Bayes' mixture trusts them, and wrong in all later ones."""
    tokens, alone = make_tokens(), plain(make_tokens())
    starts = np.flatnonzero(tokens[:-1] == BOS)
    lured = np.where(np.arange(len(alone)) < starts[1], 0.01, 20.0)
    sizes = TOKENIZER.count_bytes(tokens[1:], tokens[:-1])
    losses = {}
    for settings in ({}, {"allowance": 1e9}, {"allowance": 1e9, "prior": 1e-9}):
        method: Any = make_method("adaptive", context=CONTEXT, orders=(), **settings)
        found = method.mix(tokens, BOS, sizes, alone, lured[:, None], {})
        losses[len(settings)] = np.add.reduceat(found - alone, starts) / np.log(2)
    assert losses[2].max() > 3, "without the guard"
    assert 0.9 < losses[1].max() <= 1 + 1e-6, "half of the weight at once, as the guard was before: one bit"
    assert (losses[0] <= 0.002 * np.add.reduceat(sizes, starts) + 1e-9).all()
    assert losses[0][0] < -20, "it pays where it helps"


@pytest.mark.parametrize("nothing", [np.nan, np.inf, -np.inf])
def test_factors_that_overflow_leave_the_plain_score(nothing: float) -> None:
    tokens, alone = make_tokens(), plain(make_tokens())
    starts = np.flatnonzero(tokens[:-1] == BOS)
    adapted = np.column_stack([alone - 0.1, alone - 0.1])
    adapted[starts[1] + 5 : starts[2]] = nothing  # an overflow ends with its document
    adapted[starts[3] :, 0] = nothing
    sizes = TOKENIZER.count_bytes(tokens[1:], tokens[:-1])
    method: Any = make_method("adaptive", context=CONTEXT, orders=(2, 3))
    found = method.mix(tokens, BOS, sizes, alone, adapted, method.count_ngrams(tokens, BOS))
    assert np.isfinite(found).all()
    lost = np.add.reduceat(found - alone, starts) / np.log(2)
    assert (lost <= 0.002 * np.add.reduceat(sizes, starts) + 1e-9).all()


def test_learning_from_a_text_that_repeats_itself_pays() -> None:
    tokens = np.concatenate([[BOS], np.tile(np.random.default_rng(3).integers(2, VOCAB, 30), 6)]).astype(np.uint16)
    alone = plain(tokens).sum()
    for name in ("factors", "n-grams"):
        assert score(tokens, **SETTINGS[name]).sum() < 0.9 * alone


def test_every_temperature_divides_the_logits_of_the_same_pass() -> None:
    """Against PyTorch's own cross entropy of the model's logits over a document shorter than a chunk."""
    tokens, model = make_tokens()[:7], make_model().eval().requires_grad_(False)
    ids, temperatures = torch.from_numpy(tokens.astype(np.int64)), (0.5, 1.0, 2.0)
    shape: dict[str, Any] = {"rows": 1, "rank": 2, "chunk": 8, "window": CONTEXT, "decay": 100}
    reader = DocumentReader(model, CPU, temperatures=temperatures, graphed=False, **shape)
    ((places, nats),) = reader.read(ids, find_documents(tokens, BOS), [0.02])
    logits = model.read_out(model.features(ids[None, :-1]), None)[0]
    for number, temperature in enumerate(temperatures):
        expected = torch.nn.functional.cross_entropy(logits / temperature, ids[1:], reduction="none")
        np.testing.assert_allclose(nats[0, :6, number], expected, rtol=1e-4, atol=1e-5)
    assert places[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 6]


def test_the_text_before_a_token_weighs_its_predictions() -> None:
    rng = np.random.default_rng(0)
    nats = rng.exponential(1.0, (200, 3)) * [1.0, 0.7, 1.3]
    found = mix_bayes([nats])
    assert found[0] == pytest.approx(-np.log(np.exp(-nats[0]).mean())), "even weights at first"
    weights = np.exp(-nats[:50].sum(0))
    expected = -np.log((weights / weights.sum()) @ np.exp(-nats[50]))
    assert found[50] == pytest.approx(expected), "Bayes: weights from the tokens before, and none from the token itself"
    assert nats.sum(0).min() <= found.sum() <= nats.sum(0).min() + np.log(3)
    np.testing.assert_allclose(mix_bayes([nats[:1], nats[1:70], nats[70:]]), found, rtol=1e-12, atol=1e-12)


def test_the_mixture_s_weights_learn_after_their_block() -> None:
    """The swap of scoring and learning would change the first block."""
    rng = np.random.default_rng(0)
    nats = rng.exponential(1.0, (64, 2)) * [1.0, 0.2]
    contexts = np.zeros(64, dtype=np.int64)
    found = mix_online(nats, [contexts], (0.5, 0.5), MixConfig(rate=0.5, block=16))
    first = -np.log(np.exp(-nats[:16]).mean(-1))
    np.testing.assert_allclose(found[:16], first)
    assert found[16:].sum() < -np.log(np.exp(-nats[16:]).mean(-1)).sum()
    np.testing.assert_allclose(found[-16:], nats[-16:, 1], atol=0.15)  # the weight has gone to the better one


def test_a_lead_is_that_of_the_tokens_before() -> None:
    gains = np.random.default_rng(0).normal(0, 1, 100)
    found = classify_lead(gains)
    assert found[0] == classify_lead(np.zeros(1))[0], "nothing came before the first token"
    for place in (1, SPAN, 70):
        own = found[place]
        assert own == np.digitize(gains[max(place - SPAN, 0) : place].sum(), (-2.0, -0.5, 0.5, 2.0, 6.0))
        other = np.where(np.arange(100) < place, gains, 50.0)
        assert classify_lead(other)[place] == own, "no token from its own on counts"
    assert len(set(found.tolist())) == 6


def test_the_audit_watches_both_passes_and_changes_nothing() -> None:
    model, tokens = make_model(), TokenSet([make_tokens()])
    method = make_method("adaptive", context=CONTEXT, chunk=8, rows=2, graphed=False)
    alone = method.score(model, tokens, CPU, tokenizer=TOKENIZER).nats
    with audited(model, CPU.device, POSITIONS) as audit:
        assert np.array_equal(method.score(model, tokens, CPU, tokenizer=TOKENIZER).nats, alone)
    found = audit.gather(CPU)
    assert found.deviation < 1e-4
    assert found.positions > 16 * 10, "each chunk of factors is checked, and the streaming pass"


def test_an_adaptive_score_carries_its_settings_and_compares_with_no_other() -> None:
    adaptive, other = (make_method("adaptive", context=CONTEXT, lr=lr).describe() for lr in (0.001, 0.002))
    assert adaptive["adapt"]["documents"] == "in the order of the text"
    for name in (
        "lr",
        "rates",
        "pilot",
        "rank",
        "chunk",
        "temperatures",
        "orders",
        "discount",
        "strength",
        "mix_rate",
        "prior",
        "allowance",
    ):
        assert name in adaptive["adapt"]
    assert "rows" not in adaptive["adapt"], "rounding only"
    with pytest.raises(ConfigError, match="do not compare"):
        refuse_unlike(adaptive, make_method("streaming", context=CONTEXT).describe(), "the other")
    with pytest.raises(ConfigError, match=r"how the model adapts \(lr\)"):
        refuse_unlike(adaptive, other, "the other")
    older = adaptive | {"adapt": {name: value for name, value in adaptive["adapt"].items() if name != "allowance"}}
    with pytest.raises(ConfigError, match=r"how the model adapts \(allowance\) is 0.002 here and None in the older"):
        refuse_unlike(adaptive, older, "the older")


def test_the_weights_come_back() -> None:
    model = make_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    method = make_method("adaptive", context=CONTEXT, chunk=8)
    method.score(model, TokenSet([make_tokens()]), CPU, tokenizer=TOKENIZER)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk": 0}, "--chunk must be at least 1"),
        ({"rank": -1}, "--rank must be 0"),
        ({"prior": 1.0}, "prior must lie between 0 and 1"),
        ({"allowance": 0.0}, "allowance must be positive and finite"),
        ({"scopes": ("line",)}, "scopes must be of document, text, got line"),
        ({"discount": 1.5}, "discount must lie in 0..1"),
        ({"temperatures": (1.0, 0.0)}, r"temperatures must be numbers in 0.01..100, at least one, got \[1.0, 0.0\]"),
        ({"temperatures": ()}, "temperatures must be numbers in 0.01..100, at least one"),
        ({"rates": ()}, "rates must lie in 0..1"),
        ({"rates": (0.1, 2.0)}, r"rates must lie in 0..1, got \[0.1, 2.0\]"),
        ({"pilot": 0}, "--pilot must be at least 1"),
        ({"lr": 1e300}, r"--lr must lie in 0..1, got 1e\+300"),
    ],
)
def test_settings_that_cannot_be_run_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_method("adaptive", **settings)


def test_the_text_s_tokenizer_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="pass tokenizer=, the text's own"):
        make_method("adaptive", context=CONTEXT).score(make_model(), TokenSet([make_tokens()]), CPU)
