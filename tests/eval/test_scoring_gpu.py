"""The graphed methods on a GPU, in bfloat16, against the same on the CPU in float32."""

import dataclasses
import gc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from parbank.data.dataset import Dataset, open_dataset
from parbank.data.shards import TokenSet
from parbank.eval.adaptation.low_rank import LowRankAdapter, LowRankConfig
from parbank.eval.adaptation.sgd import SgdAdapter, SgdConfig
from parbank.eval.audit import SAMPLE
from parbank.eval.methods import make_method
from parbank.eval.methods.adaptive import Adaptive
from parbank.eval.methods.base import Method
from parbank.eval.score import Text, silent
from parbank.eval.windows import make_window_scorer, score_windows
from parbank.model import GPT
from parbank.runtime import Runtime
from tests.eval.sizes import TOKENIZER
from tests.eval.test_score import make_model

CPU = Runtime(device=torch.device("cpu"))
METHODS = [
    make_method("chunked", context=64),
    make_method("sliding", context=64, stride=16),
    make_method("streaming", context=64, segment=512),
    make_method("ttt", context=64, chunk=512),
    make_method("ttt", context=64, chunk=512, scores="sliding", stride=16),
    make_method("ttt", context=64, chunk=128, adapter="low-rank"),
]
ADAPTIVE = make_method("adaptive", context=64, chunk=16, rank=8, lr=0.003, rows=2, orders=(), allowance=0.5)


@pytest.fixture(scope="module")
def tokens(text_spec: str) -> np.ndarray:
    dataset: Dataset = open_dataset(text_spec, vocab_size=320, say=lambda line: None)
    return np.concatenate([dataset.val.read(0, 1500), dataset.val.read(0, 700)])


@pytest.mark.gpu
@pytest.mark.parametrize("method", [*METHODS, ADAPTIVE], ids=lambda method: method.name)
def test_a_gpu_scores_what_a_cpu_does(method: Method, tokens: np.ndarray) -> None:
    cuda = Runtime(device=torch.device("cuda"))
    expected = method.score(make_model(), TokenSet([tokens]), CPU, tokenizer=TOKENIZER).nats
    model: GPT = make_model().cuda()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    found = method.score(model, TokenSet([tokens]), cuda, tokenizer=TOKENIZER).nats
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())), "the weights are as they were"
    assert found.mean() == pytest.approx(expected.mean(), rel=5e-3)
    assert np.abs(found - expected).mean() < 0.1
    again = method.score(model, TokenSet([tokens]), cuda, tokenizer=TOKENIZER).nats
    if method.name != "ttt":  # gradients of embeddings are added by atomics, in any order
        assert np.array_equal(found, again), "the same bits again"


@pytest.mark.gpu
@pytest.mark.parametrize("method", [*METHODS, ADAPTIVE], ids=lambda method: method.name)
def test_passes_that_are_replayed_as_graphs_are_audited_as_others_are(method: Method, tokens: np.ndarray) -> None:
    cuda, model = Runtime(device=torch.device("cuda")), make_model().cuda()
    graphed, eager = (
        dataclasses.replace(method, graphed=graphed).score(model, TokenSet([tokens]), cuda, tokenizer=TOKENIZER)
        for graphed in (True, False)
    )
    assert graphed.audit.positions >= SAMPLE
    assert graphed.audit.positions == eager.audit.positions
    assert 0 < graphed.audit.deviation < 1e-4
    graphed.total(TOKENIZER)


@pytest.mark.gpu
@pytest.mark.parametrize("lr", [0.0, 0.003])
def test_low_rank_adapters_score_each_document_as_on_a_cpu(lr: float, tokens: np.ndarray) -> None:
    """Documents that end inside a chunk, which a graph pads: the score of the next document must not change. Without
    learning, only rounding to bfloat16 differs; with it, a few steps of Adam enlarge the difference."""
    cuda = Runtime(device=torch.device("cuda"))
    text = np.concatenate([tokens[:700], tokens[:40], tokens[:331], tokens[1500:1900], tokens[:257]])
    method = make_method("ttt", context=64, chunk=128, adapter="low-rank", lr=lr, epochs=1)
    expected = method.score(make_model(), TokenSet([text]), CPU).nats
    found = method.score(make_model().cuda(), TokenSet([text]), cuda).nats
    starts = [0, *np.flatnonzero(text[1:] == 1).tolist(), len(found)]
    assert len(starts) >= 6, "several documents"
    for first, last in pairwise(starts):
        assert found[first:last].mean() == pytest.approx(expected[first:last].mean(), rel=0.01 if lr else 0.004)


@pytest.mark.gpu
def test_replayed_windows_score_what_launched_ones_do(tokens: np.ndarray) -> None:
    """The first batch of a scorer is launched, all later ones replayed; and weights may change where they lie."""
    cuda = Runtime(device=torch.device("cuda", 0))
    model, text = make_model().cuda().eval(), Text.load(TokenSet([tokens]), cuda)
    shape: dict[str, Any] = {"context": 64, "stride": 16, "batch_tokens": 512}
    scorer = make_window_scorer(model, cuda, targets=text.targets, graphed=True, **shape)

    def read() -> np.ndarray:
        """Without an audit: a graph keeps the audit that it was captured in, and here it outlives one score."""
        nats = text.new_nats()
        scorer.score(text, 0, nats, more=False, progress=silent)
        return nats[:-1].cpu().numpy()

    first, again = read(), read()
    assert scorer.captures == 1
    assert np.array_equal(first, again)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8)
    moved = read()
    plain = score_windows(model, TokenSet([tokens]), runtime=cuda, **shape).nats
    assert scorer.captures == 1
    assert np.abs(moved - plain).mean() < 0.02 < np.abs(moved - first).mean()


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "config"), [(SgdAdapter, SgdConfig), (LowRankAdapter, LowRankConfig)])
def test_a_graph_learns_what_launches_do(kind: Any, config: Any, tokens: np.ndarray) -> None:
    """Steps of two shapes, several micro-batches, a learning rate that falls and a reset; and no wait for the GPU."""
    cuda = Runtime(device=torch.device("cuda", 0))
    settings = config(lr=0.01, sequences=3, micro_tokens=128)
    pieces = [torch.from_numpy(tokens[n : n + 513].astype(np.int64)).cuda() for n in (0, 512, 1024)]
    start = torch.cat([p.detach().flatten() for p in make_model().parameters()]).cuda()
    found = {}
    for graph in (False, True):
        model = make_model().cuda().eval()
        adapter = kind(model, cuda, settings, context=64, graph=graph)
        for number, piece in enumerate(pieces):
            adapter.reset()
            torch.cuda.set_sync_debug_mode("error" if graph and number else "default")
            try:
                adapter.learn(piece, number / 4)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert adapter.captures == 2 * graph
        assert all(p.grad is None for p in model.parameters())
        found[graph] = torch.cat([p.detach().flatten() for p in model.parameters()])
    moved = (found[False] - start).norm()
    assert moved > 0
    # sums by atomic addition come in any order; a learning rate held fast would be off by a quarter
    assert (found[True] - found[False]).norm() < 0.05 * moved


@pytest.mark.gpu
@pytest.mark.parametrize("lr", [0.003, None])
def test_factors_learn_each_document_as_on_a_cpu(lr: float | None, tokens: np.ndarray) -> None:
    """Three documents in two groups, read by graphs of two shapes; and the graph does what launches do. Without a rate, the
    first document is read at two rates side by side, and chooses one."""
    text = np.concatenate([tokens[:700], tokens[:331], tokens[1500:1900]])
    assert isinstance(ADAPTIVE, Adaptive)
    adaptive = dataclasses.replace(ADAPTIVE, lr=lr, rates=(0.0001, 0.003), pilot=1)
    eager = dataclasses.replace(adaptive, graphed=False)
    places = [(adaptive, "cuda"), (eager, "cuda"), (eager, "cpu")]
    found = []
    for method, device in places:
        place = Runtime(device=torch.device(device))
        loaded, model = Text.load(TokenSet([text]), place), make_model().to(place.device)
        found.append(method.read_documents(model, loaded, place, silent))
    plain = dataclasses.replace(eager, lr=0.0).read_documents(
        make_model(), Text.load(TokenSet([text]), CPU), CPU, silent
    )
    assert np.abs(found[2][:, -plain.shape[1] :] - plain).mean() > 0.02, "they learn"
    starts = [0, *np.flatnonzero(text[1:] == 1).tolist(), len(plain)]
    for first, last in pairwise(starts):
        graphed, launched, cpu = (nats[first:last].mean() for nats in found)
        assert graphed == pytest.approx(launched, rel=1e-3)
        assert launched == pytest.approx(cpu, rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS[3:], ids=lambda method: f"{method.scores.name}-{method.adapt.name}")
def test_a_score_leaves_no_memory_behind(method: Method, tokens: np.ndarray) -> None:
    cuda = Runtime(device=torch.device("cuda", 0))
    model = make_model().cuda()
    method.score(model, TokenSet([tokens]), cuda)  # compiles, and makes what stays for good
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    gc.disable()  # graphs go with their owner, not some time later
    try:
        method.score(model, TokenSet([tokens]), cuda)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before
    finally:
        gc.enable()
