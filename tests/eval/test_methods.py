"""Sliding and streaming scores: every token once, exactly as the protocol says, the same on any number of ranks."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from parbank.data.dataset import Dataset, open_dataset
from parbank.data.shards import TokenSet
from parbank.errors import ConfigError, DataError, ParbankError
from parbank.eval.methods import make_method
from parbank.eval.methods.streaming import Streaming, even_segment, make_stream_scorer
from parbank.eval.score import Scored, Text, run_scorer
from parbank.eval.windows import plan_windows, score_windows
from parbank.model import GPT
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from tests.distributed import run_distributed_test
from tests.eval.sizes import TOKENIZER
from tests.eval.test_score import make_model
from tests.model.test_stream import plain_logits

CPU = Runtime(device=torch.device("cpu"))


@pytest.fixture(scope="module")
def dataset(text_spec: str) -> Dataset:
    return open_dataset(text_spec, vocab_size=320, say=lambda line: None)


@pytest.fixture(scope="module")
def model() -> GPT:
    return make_model()


@pytest.mark.parametrize(("context", "stride"), [(16, 4), (16, 16), (16, 1), (16, 5), (1, 1)])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 18, 20, 21, 32, 83])
def test_windows_score_every_token_once_with_the_most_context(length: int, context: int, stride: int) -> None:
    check_plan(plan_windows(0, length, context, stride), 0, length, context, stride)


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 64), st.data())
@settings(max_examples=200, deadline=None)
def test_so_do_windows_of_any_stretch(first: int, count: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context))
    check_plan(plan_windows(first, first + count, context, stride), first, first + count, context, stride)


def check_plan(windows: np.ndarray, first: int, last: int, context: int, stride: int) -> None:
    counts = np.zeros(last, dtype=int)
    for number, (start, begin, end) in enumerate(windows):
        counts[begin:end] += 1
        assert 0 <= start <= begin < end
        assert end - start <= context
        assert start in (0, begin - (context - stride)), "as far back as the protocol goes"
        assert end - begin <= (context if first == number == 0 else stride)
    assert (counts[first:] == 1).all()
    assert (counts[:first] == 0).all()


def test_the_plan_is_the_published_one() -> None:
    """Context 2048, stride 64: the first window whole, then 64 tokens each, their windows full."""
    windows = plan_windows(0, 2048 + 10 * 64 + 3, 2048, 64)
    assert windows[0].tolist() == [0, 0, 2048]
    assert windows[1].tolist() == [64, 2048, 2112]
    assert windows[10].tolist() == [640, 2624, 2688]
    assert windows[11].tolist() == [704, 2688, 2691]
    assert len(windows) == 12


def plain_sliding(model: GPT, tokens: np.ndarray, context: int, stride: int) -> np.ndarray:
    """One window at a time, token by token."""
    nats = np.full(len(tokens) - 1, np.nan)
    for target in range(len(tokens) - 1):
        if target < context:
            start, end = 0, min(context, len(tokens) - 1)
        else:
            end = context + ((target - context) // stride + 1) * stride
            start, end = end - context, min(end, len(tokens) - 1)
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens[start:end].astype(np.int64))[None])[0, target - start]
        nats[target] = -float(torch.log_softmax(logits.double(), -1)[int(tokens[target + 1])])
    return nats


@pytest.mark.parametrize("length", [2, 4, 5, 6, 16, 17, 18, 21, 45])
@pytest.mark.parametrize("batch_tokens", [1, 50, None])
def test_sliding_gives_each_token_what_its_window_says(
    model: GPT, dataset: Dataset, length: int, batch_tokens: int | None
) -> None:
    tokens = dataset.val.read(100, length)
    found = score_windows(
        model, TokenSet([tokens]), context=16, stride=4, runtime=CPU, batch_tokens=batch_tokens, progress=shares.append
    )
    np.testing.assert_allclose(found.nats, plain_sliding(model, tokens, 16, 4), rtol=1e-4, atol=1e-4)
    assert found.total(dataset.tokenizer).tokens == length - 1
    assert shares[-1] == 1.0


shares: list[float] = []


@pytest.mark.parametrize("segment", [1, 7, 24, 10_000, None])
def test_streaming_gives_each_token_what_one_banded_pass_says(
    model: GPT, dataset: Dataset, segment: int | None
) -> None:
    tokens = dataset.val.read(0, 90)
    targets = torch.from_numpy(tokens[1:].astype(np.int64))
    logits = plain_logits(model, tokens[:-1].astype(np.int64), 24)
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    found = Streaming(context=24, segment=segment).score(model, TokenSet([tokens]), CPU, shares.append)
    np.testing.assert_allclose(found.nats, expected, rtol=1e-4, atol=1e-4)
    assert shares[-1] == 1.0


def test_a_window_longer_than_the_text_costs_no_more_than_the_text(model: GPT, dataset: Dataset) -> None:
    tokens = TokenSet([dataset.val.read(0, 60)])
    for segment in (13, None):
        long, whole = (
            Streaming(context=context, segment=segment).score(model, tokens, CPU).nats for context in (10**15, 59)
        )
        assert np.array_equal(long, whole)
    adapted = [make_method("ttt", context=context, chunk=20).score(model, tokens, CPU).nats for context in (10**15, 59)]
    assert np.array_equal(*adapted)


@given(st.integers(1, 10**7), st.integers(1, 70_000))
def test_segments_are_even_and_no_longer_than_asked(targets: int, segment: int) -> None:
    length = even_segment(targets, segment)
    assert 1 <= length <= segment
    pieces = math.ceil(targets / length)
    assert pieces == math.ceil(targets / segment)
    assert length * pieces - targets < max(128 * pieces, targets / 32 + 1)
    assert even_segment(1_250_000, 32_768) == 32_768, (
        "a chunk of ttt and a segment of a long text share what is graphed"
    )


def test_the_first_window_is_scored_alike_and_later_ones_are_not(model: GPT, dataset: Dataset) -> None:
    tokens = TokenSet([dataset.val.read(0, 400)])
    chunked, sliding = (score_windows(model, tokens, context=16, stride=s, runtime=CPU).nats for s in (16, 1))
    np.testing.assert_allclose(chunked[:16], sliding[:16], rtol=1e-4, atol=1e-4)
    assert np.abs(chunked[16:] - sliding[16:]).max() > 0.1


def test_padded_batches_score_the_same(model: GPT, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """What graphed scoring does besides compiling: batches and segments padded to one shape."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    tokens = TokenSet([dataset.val.read(0, 200)])
    padded = score_windows(model, tokens, context=16, stride=4, runtime=CPU, batch_tokens=112, graphed=True)
    text = Text.load(tokens, CPU)
    scorer = make_stream_scorer(model, CPU, targets=text.targets, context=16, segment=48, graphed=True)
    stream = run_scorer(scorer, model, text, CPU, shares.append)
    plain = score_windows(model, tokens, context=16, stride=4, runtime=CPU)
    np.testing.assert_allclose(padded.nats, plain.nats, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(stream.nats, Streaming(context=16).score(model, tokens, CPU).nats, rtol=1e-4, atol=1e-4)


def test_pieces_padded_for_a_graph_score_the_same(model: GPT, dataset: Dataset) -> None:
    """As test-time training scores documents: in pieces that end anywhere. The carry must not hold padding."""
    tokens = dataset.val.read(0, 200)
    text = Text.load(TokenSet([tokens]), CPU)
    whole = Streaming(context=24).score(model, TokenSet([tokens]), CPU).nats
    scorer = make_stream_scorer(model, CPU, targets=text.targets, piece=32, context=24, graphed=True)
    nats, ends = text.new_nats(), [32, 37, 69, 101, 102, 134, 150, text.targets]
    for first, last in zip([0, *ends], ends):
        scorer.score(text.upto(last), first, nats, more=last < text.targets)
    np.testing.assert_allclose(nats[:-1].numpy(), whole, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_scored_is_refused(model: GPT, dataset: Dataset) -> None:
    tokens = TokenSet([dataset.val.read(0, 50)])
    with pytest.raises(ConfigError, match=r"stride must lie in 1\.\.16.* 17 tokens would be left out"):
        score_windows(model, tokens, context=16, stride=17, runtime=CPU)
    with pytest.raises(ConfigError, match=r"stride must lie in 1\.\.16.* raise --stride"):
        score_windows(model, tokens, context=16, stride=0, runtime=CPU)
    with pytest.raises(ConfigError, match="at least 1 token, got 0"):
        score_windows(model, tokens, context=0, stride=1, runtime=CPU)
    with pytest.raises(ConfigError, match="segment has at least 1 token, got -1"):
        make_stream_scorer(model, CPU, targets=49, context=4, segment=-1)
    with pytest.raises(ConfigError, match="segment has at least 1 token, got 0"):
        make_stream_scorer(model, CPU, targets=49, piece=10, context=4, segment=0)
    with pytest.raises(DataError, match="scoring needs at least 2"):
        Streaming(context=4).score(model, TokenSet([dataset.val.read(0, 1)]), CPU)
    long = TokenSet([np.zeros(40_000, dtype=np.uint16)])
    with pytest.raises(ConfigError, match="longer than the model's 32768 positions"):
        score_windows(model, long, context=33_000, stride=64, runtime=CPU)
    broken = Scored(dataset.val.read(0, 4), np.array([1, np.nan, 2], dtype=np.float32))
    with pytest.raises(ParbankError, match="not a number from token 2 of 3 on"):
        broken.total(dataset.tokenizer)


def rank_scores(tokens: np.ndarray, isolated: bool) -> list[np.ndarray]:
    world = dist.get_world_size() if dist.is_initialized() else 1
    place = Runtime(device=torch.device("cpu"), rank=dist.get_rank() if world > 1 else 0, world=world)
    model = make_model()
    if isolated:
        model.config = type(model.config)(**{**model.config.__dict__, "isolate_documents": True})
    found = []
    pilot: dict[str, Any] = {"chunk": 8, "rank": 2, "rows": 1, "rates": (0.001, 0.1, 0.01), "pilot": 1, "orders": ()}
    adaptive = make_method("adaptive", context=16, **pilot)
    for length in (9, len(tokens)):  # 9: work for one rank only
        part = TokenSet([tokens[:length]])
        found += [
            score_windows(model, part, context=16, stride=16, runtime=place, batch_tokens=32).nats,
            score_windows(model, part, context=16, stride=4, runtime=place, batch_tokens=50).nats,
            Streaming(context=16, segment=40).score(model, part, place).nats,
            Streaming(context=1, segment=40).score(model, part, place).nats,
            adaptive.score(model, part, place, tokenizer=TOKENIZER).nats,
        ]
    return found


@pytest.mark.parametrize(("world", "isolated"), [(2, False), (3, True)])
def test_ranks_give_the_same_to_the_last_bit(dataset: Dataset, world: int, isolated: bool) -> None:
    tokens = np.concatenate([dataset.val.read(0, 150), dataset.val.read(0, 150)])
    alone = rank_scores(tokens, isolated)
    for ranks in run_distributed_test(rank_scores, world, args=(tokens, isolated)):
        for mine, theirs in zip(alone, ranks):
            assert np.array_equal(mine, theirs)


def count_groups(tokens: np.ndarray) -> int:
    """The process groups that two streaming scores make."""
    place = Runtime(device=torch.device("cpu"), rank=dist.get_rank(), world=dist.get_world_size())
    made, new_group = [], dist.new_group

    def make(ranks: list[int]) -> Any:
        made.append(ranks)
        return new_group(ranks)

    dist.new_group = make
    for _ in range(2):
        Streaming(context=16, segment=20).score(make_model(), TokenSet([tokens]), place)
    return len(made)


def test_scores_share_the_groups_of_the_ring(dataset: Dataset) -> None:
    """Each keeps threads and sockets: with groups of its own for every score, a long process would run out of them."""
    assert run_distributed_test(count_groups, 2, args=(dataset.val.read(0, 100),)) == [2, 2]


def test_the_recipe_that_isolates_documents_sees_nothing_of_the_one_before(dataset: Dataset) -> None:
    config = get_recipe("nano").model
    model = GPT(type(config)(**{**config.__dict__, "isolate_documents": True}))
    model.load_state_dict(make_model().state_dict())
    document = dataset.val.read(0, 60)
    twice = TokenSet([np.concatenate([document, document])])
    for segment in (17, 60, 500):
        nats = Streaming(context=24, segment=segment).score(model, twice, CPU).nats
        np.testing.assert_allclose(nats[:59], nats[60:], rtol=1e-4, atol=1e-4)
