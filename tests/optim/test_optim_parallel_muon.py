"""One rank: the update itself, against definitions written per matrix and against PyTorch's optimizers."""

import copy
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parbank.errors import ConfigError, DeviceError
from parbank.optim import ParallelMuon, orthogonalize

SHAPES = ((16, 24), (24, 16), (16, 16), (3, 16, 24), (2, 40, 8), (6, 4, 3, 3))


def make(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(params: list[nn.Parameter], steps: int, seed: int = 1) -> Iterator[list[Tensor]]:
    """Sets random gradients, steps times over, and yields copies of them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        yield [param.grad.clone() for param in params]  # type: ignore[union-attr]


def newton_schulz(G: Tensor) -> Tensor:
    """The plain definition, one matrix at a time."""
    X = G / (G.norm() + 1e-20)
    if tall := X.shape[0] > X.shape[1]:
        X = X.T
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.T if tall else X


def plain_muon(
    weights: list[Tensor], buffers: list[Tensor], grads: list[Tensor], lr: float, momentum: float, decay: float
) -> None:
    """A sequential float32 Muon: what ParallelMuon must equal."""
    for weight, buffer, grad in zip(weights, buffers, grads):
        buffer.mul_(momentum).add_(grad)
        update = grad + momentum * buffer
        matrices = [weight] if weight.ndim == 2 else list(weight) if weight.ndim == 3 else [weight.flatten(1)]
        updates = [update] if weight.ndim == 2 else list(update) if weight.ndim == 3 else [update.flatten(1)]
        for matrix, u in zip(matrices, updates):
            matrix.mul_(1 - lr * decay)
            matrix.sub_(newton_schulz(u), alpha=lr * math.sqrt(max(1.0, u.shape[0] / u.shape[1])))


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def test_equals_a_plain_muon_per_matrix() -> None:
    params = make(*SHAPES)
    weights = [p.detach().clone() for p in params]
    buffers = [torch.zeros_like(w) for w in weights]
    optimizer = ParallelMuon(params, lr=0.05, weight_decay=0.1)
    for grads in gradients(params, 5):
        plain_muon(weights, buffers, grads, 0.05, 0.95, 0.1)
        optimizer.step()
    for param, weight, buffer in zip(params, weights, buffers):
        assert relative(param.detach(), weight) < 1e-6
        assert relative(optimizer.state[param]["momentum_buffer"], buffer) < 1e-6


def test_equals_torch_muon_within_its_bfloat16() -> None:
    """Measured on these shapes: what five steps moved differs by 0.5 to 0.8%, PyTorch's bfloat16 against our float32."""
    params = make((16, 24), (24, 16), (64, 64), (48, 128))
    others = [nn.Parameter(p.detach().clone()) for p in params]
    starts = [p.detach().clone() for p in params]
    ours = ParallelMuon(params, lr=0.02, weight_decay=0.1)
    theirs = torch.optim.Muon(others, lr=0.02, weight_decay=0.1, momentum=0.95)
    for grads in gradients(params, 5):
        for other, grad in zip(others, grads):
            other.grad = grad
        ours.step()
        theirs.step()
    for param, other, start in zip(params, others, starts):
        difference = relative(param.detach() - start, other.detach() - start)
        assert difference < 0.02, difference


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_adamw_equals_torch(max_norm: float | None) -> None:
    params = make((10, 4), (7,), ())
    others = [nn.Parameter(p.detach().clone()) for p in params]
    ours = ParallelMuon([{"params": params, "algorithm": "adamw", "lr": 1e-2, "weight_decay": 0.1}], max_norm=max_norm)
    theirs = torch.optim.AdamW(others, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for grads in gradients(params, 5):
        for other, grad in zip(others, grads):
            other.grad = grad
        if max_norm:
            torch.nn.utils.clip_grad_norm_(others, max_norm)
        ours.step()
        theirs.step()
    for param, other in zip(params, others):
        assert relative(param.detach(), other.detach()) < 1e-6
        assert relative(ours.state[param]["exp_avg_sq"], theirs.state[other]["exp_avg_sq"]) < 1e-6
        assert ours.state[param]["step"] == theirs.state[other]["step"]


def test_clip_is_one_norm_over_everything() -> None:
    matrices, rest = make((8, 8), (3, 8, 4)), make((5,), seed=9)
    groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw"}]
    optimizer = ParallelMuon(groups, max_norm=0.5)
    grads = next(gradients([*matrices, *rest], 1))
    total = torch.cat([g.flatten() for g in grads]).norm()
    optimizer.step()
    torch.testing.assert_close(optimizer.last_grad_norm, total)
    torch.testing.assert_close(optimizer.state[matrices[0]]["momentum_buffer"], grads[0] * (0.5 / (total + 1e-6)))
    torch.testing.assert_close(optimizer.state[rest[0]]["exp_avg"], 0.1 * grads[2] * (0.5 / (total + 1e-6)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float, where: int) -> None:
    params = [*make((8, 8)), *make((5,))]
    groups = [
        {"params": params[:1], "normuon": True, "weight_decay": 0.1},
        {"params": params[1:], "algorithm": "adamw"},
    ]
    optimizer = ParallelMuon(groups, max_norm=1.0)
    for _ in gradients(params, 2):
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict()["state"])
    before = [p.detach().clone() for p in params]
    for count, _ in enumerate(gradients(params, 3), 1):
        params[where].grad.view(-1)[2] = value  # type: ignore[union-attr]
        optimizer.step()
        assert optimizer.last_skipped
        assert optimizer.skipped_in_a_row == count
    for param, old in zip(params, before):
        assert torch.equal(param, old)
    for number, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(v, state[number][k]) for k, v in values.items())
    for _ in gradients(params, 1):
        optimizer.step()
    assert not optimizer.last_skipped
    assert optimizer.skipped_in_a_row == 0
    assert not torch.equal(params[0], before[0])


def test_hyperparameters_may_change_every_step() -> None:
    params = make((8, 12), (3, 12, 8))
    weights = [p.detach().clone() for p in params]
    buffers = [torch.zeros_like(w) for w in weights]
    optimizer = ParallelMuon(params)
    for step, grads in enumerate(gradients(params, 4)):
        lr, momentum, decay = 0.1 / (step + 1), 0.8 + 0.04 * step, 0.1 * step
        optimizer.param_groups[0].update(lr=lr, momentum=momentum, weight_decay=decay)
        plain_muon(weights, buffers, grads, lr, momentum, decay)
        optimizer.step()
    for param, weight in zip(params, weights):
        assert relative(param.detach(), weight) < 1e-6


@pytest.mark.parametrize("kind", ["spectral", "rms", None, "none"])
def test_learning_rate_factor_is_that_of_the_logical_matrix(kind: str | None) -> None:
    """A matrix moves by the same amount whether it is stored upright or transposed, alone or in a bank."""
    upright = make((24, 8), (8, 24))
    bank = nn.Parameter(torch.stack([upright[0].detach().T, upright[1].detach()]))
    ours = ParallelMuon(upright, lr_scale=kind)
    banked = ParallelMuon([{"params": [bank], "transposed": [True, False]}], lr_scale=kind)
    for grads in gradients(upright, 3):
        bank.grad = torch.stack([grads[0].T, grads[1]])
        ours.step()
        banked.step()
    torch.testing.assert_close(bank[0].T, upright[0])
    torch.testing.assert_close(bank[1], upright[1])


def test_factors() -> None:
    for kind, expected in (("spectral", math.sqrt(3)), ("rms", 0.2 * math.sqrt(24)), (None, 1.0)):
        (param,) = make((24, 8))
        start = param.detach().clone()
        optimizer = ParallelMuon([param], lr=0.1, lr_scale=kind)
        (grad,) = next(gradients([param], 1))
        optimizer.step()
        torch.testing.assert_close(start - param, 0.1 * expected * orthogonalize(grad), rtol=1e-4, atol=1e-6)


def test_cautious_decay_acts_only_where_the_update_shrinks_the_weight() -> None:
    plain, cautious = make((8, 12)), make((8, 12))
    start = plain[0].detach().clone()
    for params, option in ((plain, False), (cautious, True)):
        optimizer = ParallelMuon(params, lr=0.1, weight_decay=0.5, cautious=option)
        (grad,) = next(gradients(params, 1))
        optimizer.step()
    shrinks = orthogonalize(grad) * start > 0
    assert 0 < shrinks.sum() < shrinks.numel()
    torch.testing.assert_close(cautious[0][shrinks], plain[0][shrinks])
    torch.testing.assert_close(cautious[0][~shrinks], plain[0][~shrinks] + 0.05 * start[~shrinks])


def test_heads_are_orthogonalised_by_themselves() -> None:
    (param,) = make((24, 16))
    heads = [nn.Parameter(block.clone()) for block in param.detach().view(4, 6, 16)]
    together, apart = ParallelMuon([param], num_heads=4), ParallelMuon(heads)
    for grads in gradients([param], 3):
        for head, grad in zip(heads, grads[0].view(4, 6, 16)):
            head.grad = grad
        together.step()
        apart.step()
    torch.testing.assert_close(param.view(4, 6, 16), torch.stack([h.detach() for h in heads]))


def test_normuon() -> None:
    """Each neuron divided by its running root mean square, with the norm of the whole kept; for a stored transpose too."""
    upright, stored = make((12, 8)), [nn.Parameter(make((12, 8))[0].detach().T.contiguous())]
    start = upright[0].detach().clone()
    optimizer = ParallelMuon(upright, lr=0.1, normuon=True, row_beta=0.9, lr_scale=None)
    other = ParallelMuon([{"params": stored, "transposed": (True,)}], lr=0.1, normuon=True, row_beta=0.9, lr_scale=None)
    buffer, moment = torch.zeros_like(start), torch.zeros(12)
    for (grad,) in gradients(upright, 3):
        stored[0].grad = grad.T.contiguous()
        buffer = 0.95 * buffer + grad
        whole = orthogonalize(grad + 0.95 * buffer)
        moment = 0.9 * moment + 0.1 * whole.square().mean(1)
        scaled = whole / moment.sqrt()[:, None]
        start -= 0.1 * scaled * (whole.norm() / scaled.norm())
        optimizer.step()
        other.step()
    torch.testing.assert_close(upright[0].detach(), start, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stored[0].T, upright[0])
    torch.testing.assert_close(optimizer.state[upright[0]]["row_moment"][0], moment, rtol=1e-4, atol=1e-6)


def test_convolutions_are_flattened_in_any_memory_order() -> None:
    plain = make((6, 4, 3, 3))
    last = [nn.Parameter(plain[0].detach().clone(memory_format=torch.channels_last))]
    flat = [nn.Parameter(plain[0].detach().flatten(1).clone())]
    line = [nn.Parameter(plain[0].detach().flatten(2).clone())]
    optimizers = [ParallelMuon(plain), ParallelMuon(last), ParallelMuon(flat), ParallelMuon(line, lr=0.02)]
    optimizers[3].param_groups[0]["flatten"] = True
    for (grad,) in gradients(plain, 3):
        last[0].grad, flat[0].grad, line[0].grad = (
            grad.clone(memory_format=torch.channels_last),
            grad.flatten(1),
            grad.flatten(2),
        )
        for optimizer in optimizers:
            optimizer.step()
    assert last[0].is_contiguous(memory_format=torch.channels_last)
    for found in (last, flat, line):
        torch.testing.assert_close(
            found[0].detach().view(-1, 36) if found is flat else found[0].detach().flatten(1), plain[0].flatten(1)
        )


def test_bfloat16_weights_follow_a_float32_master() -> None:
    """Updates a thousand times smaller than a bfloat16 step add up, as they do in float32."""
    exact = make((16, 24)), make((5,))
    half = [[nn.Parameter(p.detach().bfloat16()) for p in params] for params in exact]
    for params, copies in zip(exact, half):
        params[0].data.copy_(copies[0].detach().float())
    groups = [
        [{"params": matrices, "lr": 1e-5, "weight_decay": 0.1}, {"params": small, "algorithm": "adamw", "lr": 1e-5}]
        for matrices, small in (exact, half)
    ]
    ours = [ParallelMuon(group) for group in groups]
    flat = [[*exact[0], *exact[1]], [*half[0], *half[1]]]
    for _ in gradients(flat[1], 20):
        for param, copy_ in zip(*flat):
            param.grad = copy_.grad.float()  # type: ignore[union-attr]
        for optimizer in ours:
            optimizer.step()
    from parbank.optim.master import join_master

    for param, copy_ in zip(*flat):
        master = join_master(copy_.detach(), ours[1].state[copy_]["low_bits"])
        torch.testing.assert_close(master, param.detach(), rtol=0, atol=1e-7)
        torch.testing.assert_close(copy_.detach(), param.detach().bfloat16(), rtol=2**-7, atol=0)
        assert ours[1].state[copy_].get("momentum_buffer", torch.zeros(1)).dtype == torch.float32


def test_state_dict_keeps_every_bit_of_bfloat16_training() -> None:
    params = make((8, 12), (5,), dtype=torch.bfloat16)
    groups = [{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}]
    optimizer = ParallelMuon(groups, lr=1e-4)
    for _ in gradients(params, 3):
        optimizer.step()
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    other = ParallelMuon([{"params": copies[:1]}, {"params": copies[1:], "algorithm": "adamw"}], lr=1e-4)
    other.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    for grads in gradients(params, 2, seed=7):
        for copy_, grad in zip(copies, grads):
            copy_.grad = grad.clone()
        optimizer.step()
        other.step()
    for param, copy_ in zip(params, copies):
        assert torch.equal(param, copy_)
        assert all(torch.equal(v, other.state[copy_][k]) for k, v in optimizer.state[param].items())


def test_loading_does_not_alias_and_forgets_what_is_not_in_it() -> None:
    params = make((8, 12))
    optimizer = ParallelMuon(params)
    fresh = copy.deepcopy(optimizer.state_dict())
    for _ in gradients(params, 1):
        optimizer.step()
    snapshot = copy.deepcopy(optimizer.state_dict())
    kept = snapshot["state"][0]["momentum_buffer"].clone()
    optimizer.load_state_dict(snapshot)
    for _ in gradients(params, 1):
        optimizer.step()
    assert torch.equal(snapshot["state"][0]["momentum_buffer"], kept)
    optimizer.load_state_dict(fresh)
    assert not optimizer.state


def test_reset_clears_everything() -> None:
    params, copies = make((8, 12), (2, 8, 8)), make((8, 12), (2, 8, 8))
    optimizer, other = ParallelMuon(params, normuon=True), ParallelMuon(copies, normuon=True)
    for _ in gradients(params, 3):
        optimizer.step()
    params[0].grad.fill_(math.nan)  # type: ignore[union-attr]
    optimizer.step()
    optimizer.reset()
    assert not optimizer.state
    assert optimizer.skipped_in_a_row == 0
    for param, copy_ in zip(params, copies):
        param.data.copy_(copy_)
    for grads in gradients(params, 2, seed=5):
        for copy_, grad in zip(copies, grads):
            copy_.grad = grad
        optimizer.step()
        other.step()
    for param, copy_ in zip(params, copies):
        assert torch.equal(param, copy_)


def test_parameters_without_gradients_are_left_alone() -> None:
    params = make((8, 12), (12, 8), (4, 4))
    optimizer = ParallelMuon(params, weight_decay=0.5)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert optimizer.last_grad_norm == 0
    for step in range(3):
        for param in params:
            param.grad = None
        params[step % 2].grad = torch.ones_like(params[step % 2])
        optimizer.step()
    assert torch.equal(params[2], before[2])
    assert params[2] not in optimizer.state
    assert not torch.equal(params[0], before[0])
    assert not torch.equal(params[1], before[1])


def test_behaves_as_an_optimizer() -> None:
    """Closures, schedulers, hooks, deepcopy, pickle, later groups, learning rates as tensors."""
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False))
    optimizer = ParallelMuon([{"params": [model[0].weight], "lr": torch.tensor(0.1)}])
    optimizer.add_param_group({"params": [model[1].weight], "algorithm": "adamw"})
    assert optimizer.param_groups[1]["lr"] == 3e-4, "AdamW must not inherit Muon's learning rate"
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        return loss

    losses = []
    for _ in range(4):
        losses.append(optimizer.step(closure).item())  # type: ignore[union-attr]
        scheduler.step()
    assert losses[-1] < losses[0]
    assert len(calls) == 4
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.02)
    twin_model, twin = copy.deepcopy((model, optimizer))
    twin.zero_grad()
    twin_model(torch.ones(2, 6)).square().mean().backward()
    twin.step()
    optimizer.step(closure)
    for a, b in zip(model.parameters(), twin_model.parameters()):
        torch.testing.assert_close(a, b)
    assert len(pickle.loads(pickle.dumps(optimizer)).param_groups) == 2


def test_grad_scaler() -> None:
    """The scale is divided out before the clip; an overflow skips the step and lowers the scale."""
    params, copies = [*make((8, 12)), *make((5,))], [*make((8, 12)), *make((5,))]
    optimizers = [
        ParallelMuon([{"params": p[:1]}, {"params": p[1:], "algorithm": "adamw"}], max_norm=1.0)
        for p in (params, copies)
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    for step, grads in enumerate(gradients(params, 4)):
        for param, copy_, grad in zip(params, copies, grads):
            copy_.grad = grad
            param.grad = grad * scaler.get_scale()
        if step == 2:
            params[0].grad[0, 0] = math.inf  # type: ignore[index]
        scaler.step(optimizers[0])
        scaler.update()
        if step == 2:
            assert optimizers[0].last_skipped
            assert scaler.get_scale() == 512.0
        else:
            optimizers[1].step()
            torch.testing.assert_close(optimizers[0].last_grad_norm, optimizers[1].last_grad_norm)
    for param, copy_ in zip(params, copies):
        torch.testing.assert_close(param, copy_)


def test_extra_work_runs_at_the_end_of_each_step() -> None:
    (param,) = make((4, 4))
    seen = []
    optimizer = ParallelMuon([param], extra_captured=lambda: seen.append(param.detach().clone()))
    for _ in gradients([param], 2):
        optimizer.step()
    assert len(seen) == 2
    assert torch.equal(seen[1], param)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"params": [torch.zeros(3)]}, "algorithm='adamw'"),
        ({"algorithm": "sgd"}, "one of muon, adamw"),
        ({"lr": -1.0}, "lr must not be negative"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
        ({"betas": (0.9,), "algorithm": "adamw"}, "betas"),
        ({"ns_steps": 0}, "ns_steps"),
        ({"coefficients": "magic"}, "unknown coefficients"),
        ({"lr_scale": "big"}, "lr_scale"),
        ({"method": "magic"}, "method"),
        ({"num_heads": 3}, "does not divide"),
        ({"transposed": (True, False)}, "one for each"),
        ({"num_heads": 2, "transposed": (True,)}, "one or the other"),
        ({"params": [torch.zeros(4, 4, dtype=torch.float16)]}, "float32, bfloat16 and float64"),
        ({"params": [torch.zeros(8, 8).t()[::2]]}, "contiguous"),
    ],
)
def test_refuses(group: dict[str, Any], message: str) -> None:
    params = [nn.Parameter(p, requires_grad=True) for p in group.pop("params", [torch.zeros(4, 6)])]
    with pytest.raises(ConfigError, match=message):
        ParallelMuon([{"params": params, **group}])


def test_a_refused_group_is_not_kept() -> None:
    optimizer = ParallelMuon(make((4, 4)))
    with pytest.raises(ConfigError):
        optimizer.add_param_group({"params": make((4,))})
    assert len(optimizer.param_groups) == 1


def test_refuses_sparse_gradients_and_missing_gpus() -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = ParallelMuon([{"params": embedding.parameters(), "algorithm": "adamw"}])
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse=False"):
        optimizer.step()
    (param,) = make((4, 4))
    param.grad = torch.ones_like(param)
    with pytest.raises(DeviceError, match="cuda_graph"):
        ParallelMuon([param], cuda_graph=True).step()
