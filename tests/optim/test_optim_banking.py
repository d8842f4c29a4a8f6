"""Banks made of a plain model: nothing about the model changes but where its weights lie."""

import copy

import torch
from torch import nn

from parbank.optim import ParallelMuon, bank
from parbank.optim.collect import flatten_batch


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)], nn.Linear(8, 3))


def test_parameters_become_views_and_keep_names_and_values() -> None:
    model, plain = _model(), _model()
    banks = bank(model)
    assert [b.names for b in banks] == [tuple(f"{i}.weight" for i in range(4))]
    assert banks[0].weights.shape == (4, 8, 8)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(v, plain.state_dict()[k]) for k, v in model.state_dict().items())
    banks[0].weights.zero_()
    assert all((model[i].weight == 0).all() for i in range(4))


def test_trains_the_same_without_copies() -> None:
    model, plain = _model(), _model()
    (stack,) = bank(model)
    optimizers = []
    for m in (model, plain):
        weights = [layer.weight for layer in m[:4]]
        others = [p for p in m.parameters() if not any(p is w for w in weights)]
        optimizers.append(ParallelMuon([{"params": weights}, {"params": others, "algorithm": "adamw"}]))
    for step in range(4):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        for m, optimizer in zip((model, plain), optimizers):
            m(x).square().mean().backward()
            if m is model:
                assert flatten_batch(optimizer.batches()[0]).data_ptr() == stack.grads.data_ptr()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters()))
    assert all(model[i].weight.data_ptr() == stack.weights[i].data_ptr() for i in range(4))
    assert all(model[i].weight.grad is not None for i in range(4)), "zeroed in place"
    assert model[4].weight.grad is None


def test_survives_what_users_do() -> None:
    """Gradients set to None, weights loaded, the model copied or moved: still right, if no longer in one piece."""
    model, plain = _model(), _model()
    bank(model)
    optimizers = [ParallelMuon([layer.weight for layer in m[:4]]) for m in (model, plain)]
    x = torch.randn(5, 8)
    for m, optimizer in zip((model, plain), optimizers):
        m.zero_grad(set_to_none=True)
        m(x).square().mean().backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters()))
    model.load_state_dict(_model().state_dict())
    assert torch.equal(model[1].weight, _model()[1].weight)
    twin = copy.deepcopy(model)
    twin.double().float()
    optimizer = ParallelMuon([layer.weight for layer in twin[:4]])
    optimizer.zero_grad()
    twin(x).sum().backward()
    optimizer.step()
    assert torch.equal(model[1].weight, _model()[1].weight)
