"""Every CUDA path in Python, on the stand-in of a GPU: see cuda_rehearsal.py."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from parbank.config import override
from parbank.data.dataset import Dataset, open_dataset
from parbank.data.shards import TokenSet
from parbank.eval.compressor.coder import TokenCoder
from parbank.eval.methods import make_method
from parbank.eval.sampling import sample_tokens
from parbank.graphs import Graphs
from parbank.model import GPT
from parbank.model.config import ModelConfig
from parbank.optim import ParallelMuon
from parbank.plan import probe
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from parbank.training.passes import Passes
from parbank.training.trainer import Trainer
from tests.cuda_rehearsal import GPU, CaptureError, Graph, StandIn, is_on_gpu

# With a GPU, kernels are not interpreted, and would read the stand-in's memory.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
CPU = torch.device("cpu")


@pytest.fixture(name="gpu")
def _gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with StandIn(monkeypatch) as gpu:
        yield gpu


# --- the stand-in itself ------------------------------------------------------------------------------------------------


def capture(work: Callable[[], Any]) -> Graph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph  # type: ignore[return-value]


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 1),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.add_(torch.tensor([1.0, 2.0], device="cuda")),
        lambda x: x[x > 0],
        lambda x: x.copy_(torch.zeros(2)),
        lambda x: torch.cuda.synchronize(),
    ],
    ids=["item", "test", "tolist", "cpu", "numbers of the host", "mask", "copy", "synchronize"],
)
def test_a_capture_refuses_what_waits_and_what_copies(work: Callable[[Tensor], Any], gpu: StandIn) -> None:
    x = torch.ones(2, device="cuda")
    work(x)
    with pytest.raises(CaptureError):
        capture(lambda: work(x))


@pytest.mark.parametrize(("mode", "refused"), [("thread_local", False), ("global", True)])
def test_another_thread_may_wait_only_beside_a_capture_of_one_thread(mode: str, refused: bool, gpu: StandIn) -> None:
    """As a loader's thread waits for its copies. Without this rule, a run failed whenever the two met."""
    with ThreadPoolExecutor(1) as pool, torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
        error = pool.submit(torch.cuda.Event().synchronize).exception()
    assert isinstance(error, CaptureError) == refused


def test_a_capture_is_on_the_device_of_its_work(gpu: StandIn) -> None:
    """`load(path, device="cuda:1")` changes no current device, and a capture elsewhere would record nothing."""
    gpu.current = 1
    with pytest.raises(AssertionError, match="none of the work"):
        capture(lambda: None)
    gpu.graph, graphs, x = None, Graphs(enabled=True), torch.ones(2, device="cuda")
    results = [graphs.run(torch.neg, [x * number]).tolist() for number in (1, 2, 3)]
    assert results == [[-1, -1], [-2, -2], [-3, -3]]
    assert (graphs.captures, gpu.current) == (1, 1)


@pytest.mark.parametrize("backward", [False, True], ids=["grad", "backward"])
def test_a_capture_refuses_gradients_of_weights_that_an_older_graph_holds(backward: bool, gpu: StandIn) -> None:
    """Its AccumulateGrad nodes are on the stream where it was made. A graph of another weight, one that has ended, and one of
    an earlier capture do no harm."""

    def work() -> Tensor:
        loss = (3 * (weight + other.detach())).sum()
        loss.backward() if backward else torch.autograd.grad(loss, weight)
        return loss

    weight, other = (torch.ones(2, device="cuda", requires_grad=True) for _ in range(2))
    held, captured = (2 * other).sum(), []
    work()
    for _ in range(2):
        capture(lambda: captured.append(work()))
    captured.clear()
    held = (2 * weight).sum()
    with pytest.raises(CaptureError, match="legacy stream"):
        capture(work)
    assert held.requires_grad


def test_tensors_of_two_devices_are_refused(gpu: StandIn) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="cuda") + torch.ones(2)


def test_a_replay_repeats_ops_and_not_python(gpu: StandIn) -> None:
    x, y, calls = torch.zeros(2, device="cuda"), torch.ones(2, device="cuda"), []

    def work() -> None:
        calls.append(1)
        x.add_(y * len(calls))

    graph = capture(work)
    assert x.tolist() == [0.0, 0.0], "a capture computes nothing"
    y.fill_(3.0)
    graph.replay()
    graph.replay()
    assert (x.tolist(), len(calls)) == ([6.0, 6.0], 1)


# --- the optimizer --------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return x


def train(device: torch.device, cuda_graph: bool | str, steps: int = 24, dropout: float = 0.0, **options: Any) -> Any:
    net = Net(dropout).to(device)
    matrices = [param for param in net.parameters() if param.ndim == 2]
    rest = [param for param in net.parameters() if param.ndim == 1]
    groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw", "lr": 0.01}]
    optimizer = ParallelMuon(groups, weight_decay=0.1, cuda_graph=cuda_graph, **options)
    held = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (1 - step / steps)
        optimizer.zero_grad()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(device)
        net(x).square().mean().backward()
        held.append([param.grad for param in net.parameters()] if step < 12 else None)  # so that addresses change
        optimizer.step()
    return optimizer, [param.detach().cpu() for param in net.parameters()]


@pytest.mark.parametrize("cuda_graph", ["auto", True])
@pytest.mark.parametrize("options", [{}, {"max_norm": 0.5, "normuon": True}, {"cautious": True, "equilibrate": True}])
def test_a_replayed_optimizer_trains_as_without_a_graph(
    cuda_graph: bool | str, options: dict[str, Any], gpu: StandIn
) -> None:
    expected = train(GPU, False, **options)[1]
    optimizer, found = train(GPU, cuda_graph, **options)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)
    assert optimizer._graph.pilot.replays >= 8, repr(optimizer)


def test_a_replayed_step_waits_for_nothing(gpu: StandIn) -> None:
    optimizer, _ = train(GPU, "auto", steps=30)
    before = gpu.waits
    optimizer.step()
    assert gpu.waits == before


# --- training -------------------------------------------------------------------------------------------------------------


def make_model(device: torch.device, **changes: Any) -> GPT:
    torch.manual_seed(0)
    config = override(get_recipe("nano"), *(f"model.{name}={value}" for name, value in changes.items())).model
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model.to(device)


SHAPES = [{}, {"isolate_documents": "true"}, {"window": 16, "window_layers": "[0]"}, {"vocab_size": 8192}]


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_passes_as_a_graph_add_what_they_add_without(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    batches = torch.randint(320, (5, 2, 17), generator=torch.Generator().manual_seed(0))
    ends = []
    for device, graph in ((CPU, False), (GPU, True)):
        with StandIn(monkeypatch) if device == GPU else pytest.MonkeyPatch.context():
            model = make_model(device, **changes)
            passes = Passes(model, model, device, 1, graph=graph, precision="float32")
            losses = []
            for batch in batches:
                passes.start()
                passes.add(batch.to(device))
                losses.append(passes.loss.item())
            ends.append((losses, [p.grad.cpu() for p in model.parameters() if p.grad is not None]))
            assert not graph or passes.captures == 1
    (a, mine), (b, theirs) = ends
    assert a == pytest.approx(b, rel=1e-5)
    for x, y in zip(mine, theirs):
        torch.testing.assert_close(x, y)


def test_dropout_in_a_graph_is_new_in_every_replay(gpu: StandIn) -> None:
    model = make_model(GPU)
    model.dropout = model.token_dropout = 0.2
    passes = Passes(model, model, GPU, 1, graph=True, precision="float32")
    batch, losses = torch.randint(320, (2, 17), device="cuda"), []
    for _ in range(6):
        passes.start()
        passes.add(batch)
        losses.append(passes.loss.item())
    assert passes.captures == 1
    assert len(set(losses)) == 6


@pytest.fixture(name="dataset", scope="module")
def _dataset(text_spec: str) -> Dataset:
    return open_dataset(text_spec, vocab_size=320, say=lambda line: None)


@pytest.mark.parametrize(
    "settings", [(), ("model.isolate_documents=true", "quant.qat_share=0.5")], ids=["usual", "more"]
)
def test_a_run_with_graphs_trains_as_without(
    settings: tuple[str, ...], dataset: Dataset, gpu: StandIn, tmp_path: Path
) -> None:
    losses: list[list[float]] = []
    for graph in ("false", "true"):
        config = override(
            get_recipe("nano"), "budget.steps=6", "train.log_every=1", "train.warmup_steps=3", "train.compile=false",
            "model.layers=2", "model.value_layers=[1]", "model.xsa_layers=1", "batch.batch_tokens=256",
            "batch.micro_batch_tokens=128", f"train.cuda_graph={graph}", *settings,
        )  # fmt: skip
        trainer = Trainer(config, Runtime(device=GPU), dataset, tmp_path / graph)
        trainer.warm_up()
        found: list[float] = []
        trainer.train(lambda reading, found=found: found.append(reading.loss))
        trainer.close()
        assert all(is_on_gpu(parameter) for parameter in trainer.model.parameters())
        assert trainer.passes.captures >= (graph == "true")
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
    assert losses[1][-1] < losses[1][0]


# --- scores, samples, files -------------------------------------------------------------------------------------------------


def make_tokens(count: int, config: ModelConfig) -> TokenSet:
    found = np.random.default_rng(0).integers(0, config.vocab_size, count).astype(np.uint16)
    found[::60] = config.bos_id
    return TokenSet([found])


METHODS: dict[str, dict[str, Any]] = {
    "chunked": {"context": 64},
    "sliding": {"context": 64, "stride": 32},
    "streaming": {"context": 64, "segment": 128},
    "ttt": {"context": 64, "chunk": 96, "adapter": "sgd"},
    "ttt low-rank": {"context": 64, "chunk": 48, "adapter": "low-rank"},
    "adaptive": {"context": 64, "chunk": 24, "rank": 4, "rows": 4, "pilot": 2},
}


@pytest.mark.parametrize(
    ("method", "changes"), [*((name, {}) for name in METHODS), ("streaming", SHAPES[1]), ("adaptive", SHAPES[2])]
)
def test_a_score_with_graphs_is_that_of_a_cpu(
    method: str, changes: dict[str, Any], dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parbank.precision.scoring_precision", lambda device: "float32")
    name, found = method.split(maxsplit=1)[0], []
    for device in (CPU, GPU):
        with StandIn(pytest.MonkeyPatch()) if device == GPU else pytest.MonkeyPatch.context():
            model = make_model(device, **changes)
            tokens = make_tokens(420, model.config)
            scorer = make_method(name, **METHODS[method])
            scored = scorer.score(model, tokens, Runtime(device=device), tokenizer=dataset.tokenizer)
            scored.refuse_faults()
            found.append(scored.nats)
    np.testing.assert_allclose(found[1], found[0], rtol=2e-4, atol=2e-4)


def test_tokens_are_coded_and_decoded_through_a_graph(gpu: StandIn) -> None:
    model = make_model(GPU)
    tokens = make_tokens(120, model.config).read(0, 120)
    coded, bits = TokenCoder(model, 32).encode(tokens, 4)
    assert bits > 0
    assert np.array_equal(TokenCoder(model, 32).decode(coded, len(tokens), 4), tokens)


def test_sampling_through_a_graph_is_sampling_without(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parbank.precision.scoring_precision", lambda device: "float32")
    found = []
    for device in (CPU, GPU):
        with StandIn(pytest.MonkeyPatch()) if device == GPU else pytest.MonkeyPatch.context():
            found.append(list(sample_tokens(make_model(device), dataset.tokenizer, [5, 6, 7], tokens=12, context=8)))
    assert found[0] == found[1]


def test_the_probe_of_a_plan(gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    small = probe.shapes_of(Runtime(device=CPU))
    shapes = [(replace(model, bigram_buckets=64, vocab_size=320), 32, 64) for model, _, _ in small[:2]]
    monkeypatch.setattr(probe, "shapes_of", lambda place: shapes)
    monkeypatch.setattr(probe, "free_memory", lambda place: 1e11)
    monkeypatch.setattr(probe, "training_precision", lambda choice, device: "float32")
    machine = probe.look_at(Runtime(device=GPU))
    assert machine.cuda
    assert all(rate >= 0 for rate in machine.rates)
    assert sum(machine.rates) > 0
