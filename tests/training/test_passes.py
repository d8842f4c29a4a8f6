"""Passes add up what plain backward calls add up, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from parbank.data.batches import BatchStream
from parbank.data.prefetch import Prefetcher
from parbank.data.shards import TokenSet
from parbank.model import GPT
from parbank.model.gpt import document_lengths
from parbank.ops import flash
from parbank.recipes import GOLF_MODEL, get_recipe
from parbank.training.passes import Passes, take_batch

CPU = torch.device("cpu")
COUNT = 3


def test_passes_add_what_backward_adds() -> None:
    config = get_recipe("nano").model
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    batches = torch.randint(config.vocab_size, (COUNT, 2, 17))
    passes = Passes(model, model, CPU, COUNT, graph=False, precision="float32")
    passes.start()
    for batch in batches:
        passes.add(batch)
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    total = torch.zeros(())
    for batch in batches:
        loss = model(batch[:, :-1], batch[:, 1:]) / COUNT
        loss.backward()
        total += loss.detach()
    assert torch.equal(passes.loss, total)
    expected = [parameter.grad for parameter in model.parameters()]
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected) if b is not None)


class Halves(nn.Module):
    """Uses its second parameter only on long inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return (self.first * ids.sum() + (self.second if ids.shape[1] > 2 else 0)).sum()


def test_a_parameter_may_go_unused_in_a_pass() -> None:
    model = Halves()
    passes = Passes(model, model, CPU, 1, graph=False, precision="float32")
    for length in (4, 3, 5):  # of which a pass sees all but the last
        passes.add(torch.ones(1, length, dtype=torch.long))
    assert torch.equal(model.first.grad, torch.full((3,), 9.0))
    assert torch.equal(model.second.grad, torch.full((3,), 2.0))


def test_documents_are_those_of_the_batch() -> None:
    """What a GPU is told without being asked: of the batch handed out, and cut as a stage cuts it."""
    config = get_recipe("nano")
    length, bos = config.batch.sequence_length, config.model.bos_id
    tokens = np.where(np.arange(5000) % 37 == 5, bos, 7).astype(np.uint16)
    stream = BatchStream(TokenSet([tokens]), sequence_length=length, batch_sequences=2, micro_sequences=2)
    with Prefetcher(stream, device="cpu") as batches:
        for cut in (length, length // 2, length):
            batch, lengths = take_batch(batches, cut, bos)
            assert batch.shape == (2 * length // cut, cut + 1)
            starts = batch[:, :-1] == bos
            starts[:, 0] = True
            assert lengths.unique().tolist() == [*starts.flatten().nonzero().flatten().tolist(), 2 * length]
        assert len(take_batch(batches, length)) == 1


def _differentiate(model: nn.Module, batch: Tensor, weights: list[nn.Parameter]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss and its gradients in plain PyTorch. Their autograd graph ends here, since none may be alive in a capture."""
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(batch[:, :-1], batch[:, 1:])
    return loss.detach(), torch.autograd.grad(loss, weights)


@pytest.mark.gpu
@pytest.mark.parametrize("library", [False, True], ids=["PyTorch's", "the library's"])
def test_isolated_documents_as_graphs_on_a_gpu(library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes with few and with many documents, each a graph of its own, against the dense mask."""
    if library and not flash.AVAILABLE:
        pytest.skip("needs FlashAttention 3")
    monkeypatch.setattr(flash, "AVAILABLE", library)
    config = replace(GOLF_MODEL, layers=2, value_layers=(1,), xsa_layers=1, isolate_documents=True)
    cuda = torch.device("cuda")
    torch.manual_seed(0)
    model = GPT(config).to(cuda)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    passes = Passes(model, model, cuda, 1, graph=True, precision="bfloat16")
    for round in range(3):
        for documents in (3, 40):
            batch = torch.randint(2, config.vocab_size, (4, 257), device=cuda)
            batch[:, torch.randint(256, (documents,))] = config.bos_id
            lengths = document_lengths(batch[:, :-1].cpu().numpy(), config.bos_id, 256).to(cuda)
            model.zero_grad(set_to_none=round == 0)
            passes.start()
            passes.add(batch, lengths)
            matrices = [p for p in model.parameters() if p.ndim >= 2]  # sums of a few numbers round too much to compare
            loss, expected = _differentiate(model, batch, matrices)
            torch.testing.assert_close(passes.loss, loss, rtol=5e-3, atol=5e-3)
            for parameter, gradient in zip(matrices, expected, strict=True):
                assert parameter.grad is not None
                assert (parameter.grad - gradient).norm() < 0.05 * gradient.norm()
    assert passes.captures >= 2
