"""Passes add up what plain backward calls add up, bit for bit."""

import torch
from torch import Tensor, nn

from parbank.model import GPT
from parbank.recipes import get_recipe
from parbank.training.passes import Passes

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
