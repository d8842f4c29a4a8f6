"""The streaming engine against a plain implementation that recomputes everything: one pass, one banded mask."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parbank.model import GPT, ModelConfig
from parbank.model.attention import Context
from parbank.model.stream import Reach, Segment, Stream, _attend_flash, attend_window, find_runs
from parbank.ops import causal_attention, flash
from tests.model.test_gpt import EVERYTHING, OPTIONS, random_model

LENGTH = 41
BOS = 1


def text(config: ModelConfig, length: int = LENGTH, seed: int = 0) -> np.ndarray:
    """Documents of all sorts: an empty one, one that is longer than any window here, one that ends with the text."""
    tokens = np.random.default_rng(seed).integers(2, config.vocab_size, length)
    tokens[[place for place in (0, 12, 13, 20, length - 1) if place < length]] = BOS
    return tokens


def cut(tokens: np.ndarray, start: int, end: int, length: int = 0) -> Segment:
    documents = np.flatnonzero(tokens == BOS)
    return Segment.cut(torch.from_numpy(tokens), start, end, length=length, documents=documents)


def read(stream: Stream, tokens: np.ndarray, start: int, end: int, *rest: torch.Tensor, **options: int) -> torch.Tensor:
    """The next segment, on the model's device."""
    ids = torch.from_numpy(tokens).to(next(stream.model.parameters()).device)
    return stream.read(ids, start, end, *rest, documents=np.flatnonzero(tokens == BOS), **options)


@torch.no_grad()
def plain_logits(model: GPT, tokens: np.ndarray, window: int) -> torch.Tensor:
    """The definition: the whole text through `GPT.features`' own attention, under a mask of last-`window`-tokens."""
    ids = torch.from_numpy(tokens)[None]
    place = torch.arange(len(tokens))
    band = (place[:, None] >= place) & (place[:, None] - place < window)
    if model.config.isolate_documents:
        document = (ids[0] == BOS).cumsum(0)
        band &= document[:, None] == document

    def banded(layer: torch.nn.Module, arguments: tuple[object, ...]) -> tuple[object, ...]:
        x, weights, context, *rest = arguments
        assert isinstance(context, Context)
        return (x, weights, replace(context, mask=band[None, None]), *rest)

    hooks = [block.attention.register_forward_pre_hook(banded) for block in model.blocks]
    try:
        return model(ids)[0]
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def stream_logits(model: GPT, tokens: np.ndarray, window: int, lengths: list[int], padded_to: int = 0) -> torch.Tensor:
    """The same in segments of these lengths, over and over, each padded to one length if that is given."""
    stream, found, start = Stream(model, window), [], 0
    while start < len(tokens):
        end = min(len(tokens), start + lengths[len(found) % len(lengths)])
        found.append(read(stream, tokens, start, end, length=padded_to)[: end - start])
        start = end
    return torch.cat(found)


@pytest.mark.parametrize("name", OPTIONS)
def test_streaming_equals_one_pass_under_a_banded_mask(name: str) -> None:
    """Segments of 1, 7, the window, and the whole text; float64, so that nothing hides behind rounding."""
    config = OPTIONS[name]
    model, tokens = random_model(config).double(), text(config)
    for window in (1, 5, LENGTH + 3):
        expected = plain_logits(model, tokens, window)
        for length in {1 if window == 5 else LENGTH, 7, window if window > 1 else 7, LENGTH}:
            found = stream_logits(model, tokens, window, [length])
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    unlimited = plain_logits(model, tokens, LENGTH)
    torch.testing.assert_close(model(torch.from_numpy(tokens)[None])[0], unlimited)
    assert not torch.allclose(unlimited, plain_logits(model, tokens, 2)), "the window must matter"


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_any_cut_of_any_text_gives_the_same(data: st.DataObject) -> None:
    isolated = data.draw(st.booleans())
    config = replace(EVERYTHING, isolate_documents=isolated, layers=3, value_layers=(1,))
    length = data.draw(st.integers(1, 60))
    tokens = np.array(data.draw(st.lists(st.sampled_from([1, 5, 9, 33]), min_size=length, max_size=length)))
    tokens[0] = BOS
    window = data.draw(st.integers(1, 70))
    cuts = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
    padded_to = data.draw(st.sampled_from([0, 30, 33]))
    model = random_model(config).double()
    expected = plain_logits(model, tokens, window)
    found = stream_logits(model, tokens, window, cuts, padded_to)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window", [1, 5, 9, 60])
def test_a_padded_segment_carries_on_its_own_tokens_only(window: int) -> None:
    """A document's last piece is padded on a GPU, and the next document is read after it."""
    model, tokens = random_model(EVERYTHING).double(), text(EVERYTHING)
    expected = plain_logits(model, tokens, window)
    found = stream_logits(model, tokens, window, [8, 3, 8, 1], padded_to=8)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_far_into_a_text_rotation_is_as_good_as_at_its_start() -> None:
    """The same tokens at the start and ten million tokens on, each with nothing before them."""
    config = replace(EVERYTHING, smear=False, bigram_buckets=0, isolate_documents=True)
    model, tokens = random_model(config), text(config)
    segment = cut(tokens, 0, LENGTH)
    with torch.no_grad():
        near = Stream(model, 8)._read_segment(segment)
        found = Stream(model, 8)._read_segment(replace(segment, start=10_000_000, document=10_000_000))
    torch.testing.assert_close(found, near, rtol=2e-4, atol=2e-4)


def test_padding_and_what_stands_for_nothing_change_nothing() -> None:
    model, tokens = random_model(EVERYTHING), text(EVERYTHING)
    with torch.no_grad():
        exact = read(Stream(model, 8), tokens, 0, 20)
        padded = read(Stream(model, 8), tokens, 0, 20, length=32)
        junk = replace(cut(tokens, 0, 20), before=torch.tensor([7, 9]))
        assert torch.equal(Stream(model, 8)._read_segment(junk), exact)
        last = read(Stream(model, 8), tokens, 0, 20, last=True)
    torch.testing.assert_close(padded[:20], exact)
    torch.testing.assert_close(last[0], exact[-1])


def test_the_losses_are_those_of_the_logits() -> None:
    model, tokens = random_model(EVERYTHING), text(EVERYTHING)
    targets = torch.from_numpy(np.roll(tokens, -1))
    targets[5] = -100
    with torch.no_grad():
        logits = read(Stream(model, 8), tokens, 0, LENGTH)
        losses = read(Stream(model, 8), tokens, 0, LENGTH, targets)
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)


def test_a_reach_without_runs_never_takes_the_varlen_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adaptation reads many rows with one lower end, and differentiates: it has no runs to give."""
    monkeypatch.setattr(flash, "fits_varlen", lambda x, width: True)
    low = torch.zeros(3, dtype=torch.int32)
    past, own = (tuple(torch.randn(2, n, 2, 8) for _ in range(2)) for n in (4, 3))
    assert attend_window(torch.randn(2, 3, 4, 8), past, own, 5, Reach(low, low, low)).shape == (2, 3, 4, 8)


def test_runs_say_the_same_as_the_mask() -> None:
    """What varlen attention is told, read back into a mask, is the mask."""
    tokens = text(EVERYTHING)
    for start, end in ((0, 15), (15, 30), (20, 41), (13, 20), (5, 9)):
        for isolated in (False, True):
            reach = Reach.spread(*find_runs(cut(tokens, start, end, length=40), 9, isolated=isolated), 40)
            runs = list(zip(reach.queries.tolist(), reach.queries.tolist()[1:], reach.keys.tolist()))
            low = torch.cat([torch.full((b - a,), head, dtype=torch.int32) for a, b, head in runs])
            assert torch.equal(low, reach.low)
            ends = reach.keys.tolist()[1:]
            assert all(stop == 8 + b for (_, b, _), stop in zip(runs, ends)), "queries end where their keys end"
            assert (len(reach.keys) - 1).bit_count() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 40])
@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (4, 4), (4, 1)])
def test_attention_has_the_window_it_is_told(heads: int, kv_heads: int, isolated: bool, width: int) -> None:
    """In bfloat16, against the blocks in float32, over awkward lengths, and never a key outside its reach. Heads 64 wide take
    our kernel, and those 40 wide FlashAttention."""
    torch.manual_seed(0)
    cuda = torch.device("cuda")
    for length, window in ((1, 1), (1, 33), (300, 64), (513, 128), (64, 700)):
        q = torch.randn(1, length, heads, width, device=cuda, dtype=torch.bfloat16)
        k, v = (
            torch.randn(1, window - 1 + length, kv_heads, width, device=cuda, dtype=torch.bfloat16) for _ in range(2)
        )
        tokens = text(EVERYTHING, 2 * length + 40)
        for start in (0, length):
            segment = cut(tokens, start, start + length)
            runs = find_runs(replace(segment, ids=segment.ids.to(cuda)), window, isolated=isolated)
            reach = Reach.spread(*runs, length)
            assert reach.varlen
            assert flash.fits_varlen(q, width)
            k[:, : int(reach.low[0])] = float("nan")  # what must not be read
            past, own = (tuple(x.split([window - 1, length], dim=1)[half] for x in (k, v)) for half in (0, 1))
            found = attend_window(q, past, own, window, reach)
            wide = [tuple(x.float().nan_to_num() for x in pair) for pair in (past, own)]
            expected = attend_window(q.float(), *wide, window, reach)
            torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
            k = k.nan_to_num()


@pytest.mark.gpu
@pytest.mark.parametrize("isolated", [False, True])
def test_a_graphed_stream_on_a_gpu_is_the_plain_one(isolated: bool) -> None:
    config = replace(EVERYTHING, width=256, isolate_documents=isolated)
    model, tokens = random_model(config), text(config, 3000)
    for parameter in model.parameters():
        parameter.data.mul_(0.2)
    targets = torch.from_numpy(np.roll(tokens, -1))
    with torch.no_grad():
        whole = read(Stream(model, 200), tokens, 0, 3000, targets)
        model.cuda()
        found = {}
        for graph in (False, True):
            stream, parts = Stream(model, 200, graph=graph), []
            for start in range(0, 3000, 500):
                own = targets[start : start + 500].cuda()
                with torch.autocast("cuda", torch.bfloat16):
                    parts.append(read(stream, tokens, start, start + 500, own).float().cpu())
            assert (stream.captures > 0) == graph
            found[graph] = torch.cat(parts)
    assert torch.equal(found[False], found[True])
    assert (found[True] - whole).abs().mean() < 0.02
    assert abs(found[True].mean() - whole.mean()) < 0.005


def test_a_window_as_long_as_the_text_is_plain_attention() -> None:
    q, k, v = torch.randn(1, 50, 4, 8), torch.randn(1, 50, 2, 8), torch.randn(1, 50, 2, 8)
    reach = Reach(torch.full((50,), 49), torch.tensor([0, 50]), torch.tensor([49, 99]))
    empty = torch.zeros(1, 49, 2, 8)
    torch.testing.assert_close(attend_window(q, (empty, empty), (k, v), 50, reach), causal_attention(q, k, v))


def test_the_flash_call_fits_the_operator() -> None:
    """Without a GPU only its shapes can be asked for: names, order and types of the arguments are then checked all the same."""
    meta = torch.device("meta")
    q, past, own = (torch.empty(1, *shape, 64, device=meta) for shape in ((10, 8), (31, 4), (10, 4)))
    runs = torch.empty(2, dtype=torch.int32, device=meta)
    y = _attend_flash(q, (past, past), (own, own), 32, Reach(torch.empty(10, device=meta), runs, runs))
    assert (y.shape, y.device) == (q.shape, meta)
