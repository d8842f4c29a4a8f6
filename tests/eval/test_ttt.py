"""Score-first: whatever an adapter does, no token can change what was scored before it; and the weights come back."""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parbank.data.dataset import Dataset, open_dataset
from parbank.data.shards import TokenSet
from parbank.errors import ConfigError
from parbank.eval.adaptation import ADAPTERS
from parbank.eval.adaptation.base import AdaptConfig, plan_steps, restored
from parbank.eval.adaptation.low_rank import LowRankAdapter, LowRankConfig
from parbank.eval.adaptation.sgd import SgdAdapter, SgdConfig
from parbank.eval.methods import make_method
from parbank.eval.methods.streaming import Streaming
from parbank.eval.methods.ttt import ScoreFirst, plan_pieces
from parbank.eval.windows import score_windows
from parbank.model import GPT
from parbank.runtime import Runtime
from tests.distributed import run_distributed_test
from tests.eval.sizes import TOKENIZER
from tests.eval.test_score import make_model

CPU = Runtime(device=torch.device("cpu"))
CONTEXT, STRIDE, CHUNK = 16, 4, 48
BOS = 1
SCORES: dict[str, dict[str, Any]] = {"sliding": {"stride": STRIDE, "batch_tokens": 80}, "streaming": {"segment": 20}}
KINDS = [(a, s) for a in ADAPTERS for s in SCORES]


@pytest.fixture(scope="module")
def tokens(text_spec: str) -> np.ndarray:
    """A text of three documents, one of them short."""
    dataset: Dataset = open_dataset(text_spec, vocab_size=320, say=lambda line: None)
    return np.concatenate([dataset.val.read(0, 150), dataset.val.read(0, 20), dataset.val.read(0, 130)])


def ttt(model: GPT, tokens: np.ndarray, make: Any = None, runtime: Runtime = CPU, **settings: Any) -> np.ndarray:
    """`make` makes another adapter of the model than the one the settings name."""
    usual = {"chunk": CHUNK, "lr": 0.01, "micro_tokens": 32, **SCORES[settings.get("scores", "streaming")]}
    method = make_method("ttt", context=CONTEXT, **{**usual, **settings})
    assert isinstance(method, ScoreFirst)
    given = nullcontext() if make is None else patch.object(type(method.adapt), "make_adapter", _make_of(make))
    with given:
        return method.score(model, TokenSet([tokens]), runtime).nats


def _make_of(make: Callable[[GPT], Any]) -> Callable[..., Any]:
    return lambda config, model, runtime, **settings: make(model)


def weights(model: GPT) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize(("adapter", "scores"), KINDS)
def test_without_learning_the_scores_are_the_plain_ones(tokens: np.ndarray, adapter: str, scores: str) -> None:
    model = make_model()
    found = ttt(model, tokens, adapter=adapter, scores=scores, lr=0.0)
    if scores == "sliding":
        plain = score_windows(model, TokenSet([tokens]), context=CONTEXT, stride=STRIDE, runtime=CPU)
    else:
        plain = Streaming(context=CONTEXT).score(model, TokenSet([tokens]), CPU)
    # windows over documents are counted from each one's start, so they are the plain ones in the first only
    same = 150 if (adapter, scores) == ("low-rank", "sliding") else len(found)
    np.testing.assert_allclose(found[:same], plain.nats[:same], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("adapter", "scores"), KINDS)
def test_the_future_cannot_change_a_score(tokens: np.ndarray, adapter: str, scores: str) -> None:
    """Everything after a token replaced: bit for bit the same up to the end of the chunk before it."""
    model = make_model()
    options: dict[str, Any] = {"adapter": adapter, "scores": scores, "epochs": 1}
    found = ttt(model, tokens, **options)
    plain = ttt(model, tokens, **options, lr=0.0)
    assert np.abs(found - plain).max() > 1e-3, "the test must be able to see adaptation"
    pieces = list(plan_pieces(tokens, CHUNK, BOS if adapter == "low-rank" else None))
    for piece, junk in ((pieces[1], None), (pieces[2], 7), (pieces[3], None)):
        rest = tokens[piece.last + 1 :].copy()
        np.random.default_rng(piece.last).shuffle(rest)
        future = rest if junk is None else np.full_like(rest, junk)
        other = ttt(model, np.concatenate([tokens[: piece.last + 1], future]), **options)
        assert np.array_equal(other[: piece.last], found[: piece.last])
        assert not np.array_equal(other, found)


class Cheat:
    """Keeps all it is given, looks for more behind it, and learns it by heart if it finds any."""

    def __init__(self, model: GPT) -> None:
        self.model, self.seen = model, list[torch.Tensor]()

    def learn(self, tokens: torch.Tensor, progress: float) -> None:
        self.seen.append(tokens)
        assert tokens._base is None, "not a view of something larger"
        assert tokens.untyped_storage().nbytes() == tokens.numel() * tokens.element_size()
        with pytest.raises(RuntimeError):
            torch.as_strided(tokens, (len(tokens) + 1,), (1,))
        with torch.no_grad():  # what it may do: anything to the weights, and to its copy
            self.model.token_embedding.weight.add_(tokens.float().mean() * 1e-4)
        tokens.zero_()

    def reset(self) -> None: ...


@pytest.mark.parametrize("scores", ["sliding", "streaming"])
def test_an_adapter_that_cheats_finds_nothing_to_cheat_with(tokens: np.ndarray, scores: str) -> None:
    model, cheats = make_model(), list[Cheat]()
    before = tokens.copy()

    def make(model: GPT) -> Cheat:
        cheats.append(Cheat(model))
        return cheats[-1]

    found = ttt(model, tokens, make, scores=scores)
    assert np.array_equal(tokens, before), "what it did to its copies stayed there"
    (cheat,) = cheats
    assert [len(seen) for seen in cheat.seen] == [CHUNK + 1] * 6, (
        "299 targets: six whole chunks, and the last is not shown"
    )
    changed = np.concatenate([tokens[: 3 * CHUNK + 1], np.full(len(tokens) - 3 * CHUNK - 1, 9, dtype=np.uint16)])
    assert np.array_equal(ttt(model, changed, make, scores=scores)[: 3 * CHUNK], found[: 3 * CHUNK])


class Recorder:
    """Writes down what it is shown, in order, beside the scores there are at that moment."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def learn(self, tokens: torch.Tensor, progress: float) -> None:
        self.events.append((tokens.tolist(), progress))

    def reset(self) -> None:
        self.events.append("reset")


def test_the_adapter_is_shown_each_chunk_after_its_scores_and_never_the_last(tokens: np.ndarray) -> None:
    recorder = Recorder()
    ttt(make_model(), tokens, lambda model: recorder)
    expected = [tokens[start : start + CHUNK + 1].tolist() for start in range(0, 6 * CHUNK, CHUNK)]
    assert [event[0] for event in recorder.events] == expected
    assert [event[1] for event in recorder.events] == [number / 6 for number in range(6)]
    one = Recorder()
    ttt(make_model(), tokens[: 2 * CHUNK + 1], lambda model: one)
    assert len(one.events) == 1, "a text of two chunks: only the first is learnt from"
    documents = Recorder()
    ttt(make_model(), tokens, lambda model: documents, adapter="low-rank")
    kinds = ["reset" if event == "reset" else "learn" for event in documents.events]
    # 150 tokens: three whole chunks of 48 and a rest; 20: none; 129 targets: two and a rest
    assert kinds == ["reset", "learn", "learn", "learn", "reset", "reset", "learn", "learn"]


@pytest.mark.parametrize(("chunk", "bos"), [(7, None), (7, BOS), (1, BOS), (1000, None), (1000, BOS)])
def test_pieces_cover_the_text_once_and_know_nothing_beyond_their_end(
    tokens: np.ndarray, chunk: int, bos: int | None
) -> None:
    pieces = list(plan_pieces(tokens, chunk, bos))
    assert [piece.first for piece in pieces] == [0, *(piece.last for piece in pieces[:-1])]
    assert pieces[-1].last == len(tokens) - 1
    assert not pieces[-1].goes_on
    for number, piece in enumerate(pieces[:-1]):
        assert 1 <= piece.last - piece.first <= chunk
        cut = np.concatenate([tokens[: piece.last + 1], [5, 5]])
        assert list(plan_pieces(cut, chunk, bos))[number] == piece
        if bos is not None:
            assert bos not in tokens[piece.first + 1 : piece.last]
            assert piece.goes_on == (tokens[piece.last] != bos)


@pytest.mark.parametrize(("adapter", "scores"), KINDS)
def test_the_weights_come_back_bit_for_bit(tokens: np.ndarray, adapter: str, scores: str) -> None:
    model = make_model()
    model.token_embedding.weight.requires_grad_(False)
    before = weights(model)
    ttt(model, tokens, adapter=adapter, scores=scores)
    assert equal(weights(model), before)
    assert model.training
    assert [p.requires_grad for p in model.parameters()].count(False) == 1
    assert all(p.grad is None for p in model.parameters())


class Failing(Cheat):
    def learn(self, tokens: torch.Tensor, progress: float) -> None:
        super().learn(tokens, progress)
        if len(self.seen) == 3:
            raise KeyboardInterrupt


def test_they_come_back_after_an_error_too(tokens: np.ndarray) -> None:
    model = make_model()
    before = weights(model)
    with pytest.raises(KeyboardInterrupt):
        ttt(model, tokens, Failing)
    assert equal(weights(model), before)
    with pytest.raises(ConfigError, match=r"--blocks must lie in 0\.\.3"):
        ttt(model, tokens, blocks=(4,))
    assert equal(weights(model), before)


def test_sgd_is_what_the_recipe_says(tokens: np.ndarray) -> None:
    """Two chunks learnt from, against the recipe written out with PyTorch's own parts."""
    model, plain = make_model(), make_model()
    config = SgdConfig(chunk=CHUNK, lr=0.02, micro_tokens=16, sequences=2, epochs=2, clip=0.5)
    adapter = SgdAdapter(model, CPU, config, context=CONTEXT)
    optimizer = torch.optim.SGD(plain.parameters(), momentum=0.9, lr=1.0)
    for progress, rate in ((0.0, 0.02), (0.5, 0.01)):
        piece = torch.from_numpy(tokens[: CHUNK + 1].astype(np.int64))
        adapter.learn(piece, progress)
        optimizer.param_groups[0]["lr"] = rate
        rows = torch.stack([piece[start : start + CONTEXT + 1] for start in (0, 16, 32)])
        for batch in [*rows.split(2)] * 2:
            optimizer.zero_grad()
            plain(batch[:, :-1], batch[:, 1:]).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ADAPTERS.values())
@pytest.mark.parametrize(
    ("settings", "learning", "embeddings"),
    [({}, {0, 1, 2, 3}, True), ({"freeze": 2}, {2, 3}, True), ({"blocks": (1,)}, {1}, False)],
)
def test_only_the_chosen_blocks_learn(
    tokens: np.ndarray, kind: type[AdaptConfig], settings: dict[str, Any], learning: set[int], embeddings: bool
) -> None:
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapter = kind(lr=0.05, **settings).make_adapter(model, CPU, context=CONTEXT, graphed=False)
    adapter.learn(torch.from_numpy(tokens[: CHUNK + 1].astype(np.int64)), 0.0)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    blocks = {int(name.split(".")[1]) for name in changed if name.startswith("blocks.")}
    assert blocks == learning
    assert ("token_embedding.weight" in changed) == (embeddings and kind is SgdConfig)
    assert {name for name in before if f"blocks.{max(learning)}." in name and "query.weight" in name} <= changed


def test_learning_from_a_text_that_repeats_itself_pays(tokens: np.ndarray) -> None:
    model = make_model()
    again = np.concatenate([tokens[:CHUNK]] * 5)
    for scores in ("sliding", "streaming"):
        plain = ttt(model, again, scores=scores, lr=0.0).sum()
        assert ttt(model, again, scores=scores, lr=0.05).sum() < 0.97 * plain
        one = np.concatenate([tokens[:1], np.tile(tokens[1:13], 16)])  # one document
        plain = ttt(model, one, scores=scores, lr=0.0).sum()
        assert ttt(model, one, scores=scores, adapter="low-rank", lr=0.01, chunk=12).sum() < 0.97 * plain


def test_low_rank_adapters_forget_at_a_document_s_start(tokens: np.ndarray) -> None:
    """The same document twice, documents isolated: the second time is as good as the first, to rounding."""
    model = make_model()
    config = type(model.config)(**{**model.config.__dict__, "isolate_documents": True})
    isolated = GPT(config)
    isolated.load_state_dict(model.state_dict())
    twice = np.concatenate([tokens[:150], tokens[:150]])
    found = ttt(isolated, twice, adapter="low-rank", scores="streaming")
    np.testing.assert_allclose(found[:149], found[150:], rtol=1e-3, atol=1e-3)
    kept = ttt(isolated, twice, adapter="sgd", scores="streaming")
    assert np.abs(kept[:149] - kept[150:]).max() > 1e-2


def test_steps_cover_a_chunk_with_one_width() -> None:
    for count, context, micro, sequences in ((48, 16, 32, 32), (50, 16, 32, 3), (5, 16, 32, 1), (33, 16, 1000, 2)):
        config = SgdConfig(micro_tokens=micro, sequences=sequences)
        steps = plan_steps(torch.arange(count + 1), context, config)
        batches = [batch for step in steps for batch in step]
        assert {batch.shape[1] for batch in batches} == {min(context, count) + 1}
        assert all(sum(map(len, step)) <= sequences for step in steps)
        assert all(batch[:, 1:].numel() <= max(micro, context) for batch in batches)
        assert set(torch.cat([batch[:, 1:].flatten() for batch in batches]).tolist()) == set(range(1, count + 1))


def test_a_low_rank_adapter_that_was_reset_is_a_new_one(tokens: np.ndarray) -> None:
    """Bit for bit, and in the same memory: a CUDA graph would go on with the old."""
    config = LowRankConfig(lr=0.01)
    first, second = (torch.from_numpy(tokens[n : n + CHUNK + 1].astype(np.int64)) for n in (0, CHUNK))
    used, new = make_model(), make_model()
    before = weights(used)
    adapter = LowRankAdapter(used, CPU, config, context=CONTEXT)
    places = [p.data_ptr() for p in adapter._parameters]
    adapter.learn(first, 0.0)
    assert not equal(weights(used), before)
    adapter.reset()
    assert equal(weights(used), before)
    adapter.learn(second, 0.0)
    LowRankAdapter(new, CPU, config, context=CONTEXT).learn(second, 0.0)
    assert equal(weights(used), weights(new))
    assert [p.data_ptr() for p in adapter._parameters] == places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_low_rank_adapter_learns_as_by_adam_in_any_default_dtype(tokens: np.ndarray, dtype: torch.dtype) -> None:
    """Bit for bit. A count of steps in bfloat16 would end at 256, and a fused step takes float32 only."""
    config = LowRankConfig(lr=0.01, epochs=2)
    text = torch.from_numpy(tokens[: CHUNK + 1].astype(np.int64))
    mine, theirs = make_model(), make_model()
    torch.set_default_dtype(dtype)
    try:
        adapter, other = (LowRankAdapter(model, CPU, config, context=CONTEXT) for model in (mine, theirs))
        for counter in adapter._steps:
            counter.fill_(256)
        optimizer = torch.optim.Adam(other._parameters, lr=config.lr)
        for parameter in other._parameters:
            zeros = torch.zeros_like(parameter)
            optimizer.state[parameter] = {"step": torch.tensor(256.0, dtype=torch.float32), "exp_avg": zeros}
            optimizer.state[parameter]["exp_avg_sq"] = zeros.clone()
        other._update = lambda grads: optimizer.step()  # type: ignore[method-assign]
        for one in (adapter, other):
            one.learn(text, 0.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert equal(weights(mine), weights(theirs))


def test_learning_imports_no_compiler() -> None:
    """The import takes seconds, and every class of torch.optim imports it when it is made."""
    code = f"""
import sys
import numpy as np, torch
from parbank.data.shards import TokenSet
from parbank.eval.methods import make_method
from parbank.model import GPT, ModelConfig
from parbank.runtime import Runtime
model = GPT(ModelConfig(vocab_size=32, layers=1, width=16, heads=2, kv_heads=1, rope_dims=4))
tokens = TokenSet([np.arange(100, dtype=np.uint16) % 32])
for adapter in {list(ADAPTERS)}:
    method = make_method("ttt", context=16, chunk=32, adapter=adapter, scores="streaming", segment=20)
    method.score(model, tokens, Runtime(device=torch.device("cpu")))
loaded = [name for name in ("torch._dynamo", "sympy") if name in sys.modules]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("kind", ADAPTERS.values())
def test_an_adapter_is_gone_when_it_is_dropped(tokens: np.ndarray, kind: type[AdaptConfig]) -> None:
    """And so are its graphs, which hold the memory of a whole pass: no cycle keeps them for the garbage collector."""
    adapter: Any = kind(lr=0.01).make_adapter(make_model(), CPU, context=CONTEXT, graphed=False)
    adapter.learn(torch.from_numpy(tokens[: CHUNK + 1].astype(np.int64)), 0.0)
    alive = weakref.ref(adapter), weakref.ref(adapter._graphs)
    gc.disable()
    try:
        del adapter
        assert [reference() for reference in alive] == [None, None]
    finally:
        gc.enable()


def test_settings_that_cannot_be_run_are_refused() -> None:
    for settings, message in (
        ({"lr": -1.0}, "--lr must be 0 or more"),
        ({"lr": float("inf")}, "--lr must be 0 or more and finite, got inf"),
        ({"epochs": 0}, "--epochs must be at least 1"),
        ({"chunk": 0}, "--chunk must be at least 1"),
        ({"freeze": 1, "blocks": (2,)}, "give one of them"),
        ({"clip": -0.1}, "--clip must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            SgdConfig(**settings)
    with pytest.raises(ConfigError, match="--rank must be at least 1, got 0"):
        LowRankConfig(rank=0)
    with pytest.raises(ConfigError, match=r"--momentum must lie in \[0, 1\), got 1.0"):
        SgdConfig(momentum=1.0)
    with restored(make_model()), pytest.raises(ConfigError, match=r"--freeze must lie in 0\.\.4"):
        SgdAdapter(make_model(), CPU, SgdConfig(freeze=5), context=CONTEXT)


def rank_ttt(tokens: np.ndarray) -> list[np.ndarray]:
    world = dist.get_world_size() if dist.is_initialized() else 1
    place = Runtime(device=torch.device("cpu"), rank=dist.get_rank() if world > 1 else 0, world=world)
    found = [ttt(make_model(), tokens, runtime=place, adapter=a, scores=s) for a, s in KINDS]
    adaptive = make_method("adaptive", context=CONTEXT, chunk=32, rank=2, rows=1, segment=20, allowance=0.5)
    return [*found, adaptive.score(make_model(), TokenSet([tokens]), place, tokenizer=TOKENIZER).nats]


def test_two_ranks_adapt_to_the_same_last_bit(tokens: np.ndarray) -> None:
    alone = rank_ttt(tokens)
    for ranks in run_distributed_test(rank_ttt, 2, args=(tokens,)):
        for mine, theirs in zip(alone, ranks):
            assert np.array_equal(mine, theirs)
