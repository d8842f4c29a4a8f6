"""Variants around Muon, each against its definition: MuonEq-R, Lion, QK-clip, updates of AdamW's size, rates over widths."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parbank.errors import ConfigError
from parbank.optim import ParallelMuon, QKClip, bank, carry_rate, orthogonalize
from tests.distributed import run_distributed_test


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- MuonEq-R ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(12, 8), (6, 20)])
def test_equilibrate_normalises_rows_before_the_iteration(shape: tuple[int, int]) -> None:
    """For a stored transpose, the neurons are the columns; for a stack, those of each matrix."""
    start = _random(0, *shape)
    upright, stored, stack = (nn.Parameter(t.clone()) for t in (start, start.T.contiguous(), start.expand(2, *shape)))
    groups = [{"params": [upright]}, {"params": [stored], "transposed": (True,)}, {"params": [stack]}]
    optimizer = ParallelMuon(groups, lr=0.1, equilibrate=True)
    weight, buffer = start.clone(), torch.zeros(shape)
    for step in range(3):
        grad = _random(step + 1, *shape) * torch.logspace(-3, 3, shape[0])[:, None]  # rows of very different sizes
        grad[2] = 0.0
        upright.grad, stored.grad, stack.grad = grad.clone(), grad.T.contiguous(), torch.stack([grad, grad])
        optimizer.step()
        buffer = 0.95 * buffer + grad
        update = grad + 0.95 * buffer
        rows = update / (update.norm(dim=1, keepdim=True) + 1e-20)
        weight -= 0.1 * max(1.0, shape[0] / shape[1]) ** 0.5 * orthogonalize(rows)
    for found in (upright.detach(), stored.detach().T, *stack.detach()):
        torch.testing.assert_close(found, weight, rtol=1e-4, atol=1e-5)


# --- Lion -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lion_follows_its_definition(dtype: torch.dtype) -> None:
    param = nn.Parameter(_random(0, 5, 3).to(dtype))
    weight, mean = param.detach().clone(), torch.zeros(5, 3, dtype=dtype)
    optimizer = ParallelMuon([{"params": [param], "algorithm": "lion", "lr": 0.01, "weight_decay": 0.1}])
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)
    for step in range(4):
        grad = _random(step + 1, 5, 3).to(dtype)
        param.grad = grad.clone()
        optimizer.step()
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * (0.9 * mean + 0.1 * grad).sign()
        mean = 0.99 * mean + 0.01 * grad
    torch.testing.assert_close(param.detach(), weight, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], mean, rtol=1e-5, atol=1e-6)


def test_lion_stands_beside_muon_and_skips_what_is_not_finite() -> None:
    matrix, gain = nn.Parameter(_random(0, 6, 4)), nn.Parameter(torch.ones(4))
    optimizer = ParallelMuon([{"params": [matrix]}, {"params": [gain], "algorithm": "lion"}], max_norm=1.0)
    assert optimizer.param_groups[1]["lr"] == 1e-4
    matrix.grad, gain.grad = _random(1, 6, 4), torch.ones(4)
    optimizer.step()
    before = (matrix.detach().clone(), gain.detach().clone(), optimizer.state[gain]["exp_avg"].clone())
    matrix.grad = torch.full((6, 4), torch.nan)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, (matrix, gain, optimizer.state[gain]["exp_avg"])))


# --- updates of AdamW's size ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 64), (32, 256), (256, 32)])
def test_updates_have_the_size_of_adamws(shape: tuple[int, int]) -> None:
    """0.2 per number at rate 1, whatever the shape. Muon's polynomial ends between 0.7 and 1.2: so does the size."""
    param = nn.Parameter(torch.zeros(shape))
    param.grad = _random(0, *shape)
    ParallelMuon([param], lr=1.0, lr_scale="rms").step()
    assert 0.7 * 0.2 < param.detach().square().mean().sqrt() < 1.2 * 0.2


# --- QK-clip ----------------------------------------------------------------------------------------------------------

HEADS, CHANNELS, WIDTH = 4, 8, 16


def _project(weight: Tensor, x: Tensor, heads: int) -> Tensor:
    return (x @ weight.T).unflatten(-1, (heads, CHANNELS)).transpose(-3, -2)


def _logits(query: Tensor, key: Tensor, x: Tensor, kv_heads: int) -> Tensor:
    """(heads,): the largest logit of each head, from the whole matrix of them."""
    q, k = _project(query, x, HEADS), _project(key, x, kv_heads).repeat_interleave(HEADS // kv_heads, dim=-3)
    return (q @ k.mT / CHANNELS**0.5).abs().amax(dim=(0, 2, 3))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_qk_clip_keeps_logits_below_the_threshold(kv_heads: int, exact: bool) -> None:
    joint = nn.Parameter(
        0.5 * _random(0, (HEADS + 2 * kv_heads) * CHANNELS, WIDTH)
    )  # query, key and value in one weight
    query, key, value = joint.detach().split([HEADS * CHANNELS, kv_heads * CHANNELS, kv_heads * CHANNELS])
    query[:CHANNELS] *= 20.0  # the first head is far above, the others below
    x, before = _random(1, 2, 5, WIDTH), joint.detach().clone()
    clip = QKClip(threshold=40.0)
    layer = clip.add(query, key, heads=HEADS, kv_heads=kv_heads)
    q, k = _project(query, x, HEADS), _project(key, x, kv_heads)
    assert _logits(query, key, x, kv_heads)[0] > 40.0
    layer.observe(q[:1], k[:1], exact=exact)  # two passes of an accumulated batch
    layer.observe(q[1:], k[1:], exact=exact)
    clip.apply()
    after = _logits(query, key, x, kv_heads)
    assert (after <= 40.0 * (1 + 1e-5)).all()
    if exact and kv_heads == HEADS:
        assert after[0] == pytest.approx(40.0, rel=1e-5), "no more than needed"
        ratio = query[:CHANNELS] / before[:CHANNELS]
        torch.testing.assert_close(ratio, (key[:CHANNELS] / before[query.shape[0] :][:CHANNELS]))
    others = slice(CHANNELS, HEADS * CHANNELS)
    assert torch.equal(query[others], before[others]) or not exact
    assert torch.equal(value, before[-len(value) :])
    clip.apply()  # nothing was observed since
    torch.testing.assert_close(_logits(query, key, x, kv_heads), after, rtol=0, atol=0)


def test_the_bound_is_never_below_the_exact_logits() -> None:
    clip = QKClip()
    layers = [
        clip.add(torch.zeros(HEADS * CHANNELS, 4), torch.zeros(2 * CHANNELS, 4), heads=HEADS, kv_heads=2) for _ in "ab"
    ]
    q, k = _random(0, 3, HEADS, 300, CHANNELS), _random(1, 3, 2, 300, CHANNELS)
    layers[0].observe(q, k)
    layers[1].observe(q, k, exact=True)
    assert (layers[0].largest >= layers[1].largest).all()
    everything = (q @ k.repeat_interleave(2, dim=1).mT).abs().amax(dim=(0, 2, 3)) / CHANNELS**0.5
    torch.testing.assert_close(layers[1].largest, everything)


def test_qk_clip_runs_at_the_end_of_each_step() -> None:
    query, key = (nn.Parameter(3 * _random(n, HEADS * CHANNELS, WIDTH)) for n in range(2))
    clip = QKClip(threshold=5.0)
    layer = clip.add(query, key, heads=HEADS)
    optimizer = ParallelMuon([query, key], lr=1e-5, extra_captured=clip.apply)
    x = _random(3, 2, 5, WIDTH)
    q, k = _project(query, x, HEADS), _project(key, x, HEADS)
    layer.observe(q, k)
    nn.functional.scaled_dot_product_attention(q, k, q).sum().backward()  # flash attention: no logits to look at
    optimizer.step()
    assert (_logits(query.detach(), key.detach(), x, HEADS) < 5.001).all()


@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_qk_clip_leaves_weights_alone_after_an_overflow(number: float) -> None:
    query, key = _random(0, HEADS * CHANNELS, WIDTH), _random(1, HEADS * CHANNELS, WIDTH)
    before = query.clone(), key.clone()
    clip = QKClip(threshold=1.0)
    layer = clip.add(query, key, heads=HEADS)
    x = _random(2, 2, HEADS, 5, CHANNELS)
    x[0, :, 0, 0] = number
    layer.observe(x, x)
    clip.apply()
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])
    layer.observe(x[1:], x[1:])
    clip.apply()
    assert (query.norm() < before[0].norm()) & query.isfinite().all()


@pytest.mark.parametrize("move", [bank, lambda model: model.bfloat16()])
@pytest.mark.parametrize("rows", [slice(None), slice(8)])
def test_qk_clip_refuses_weights_that_have_moved(move: Callable[[nn.Module], Any], rows: slice) -> None:
    model = nn.ModuleList([nn.Linear(8, 16, bias=False) for _ in range(2)])
    clip = QKClip()
    layer = clip.add(model[0].weight[rows], model[1].weight[rows], heads=2)
    clip.apply()
    move(model)
    with pytest.raises(ConfigError, match=r"moved since QKClip\.add\(\)"):
        clip.apply()
    clip.layers.remove(layer)
    clip.add(model[0].weight, model[1].weight, heads=2)
    clip.apply()


def _clip_on_ranks() -> Tensor:
    import torch.distributed as dist

    query, key = _random(0, HEADS * CHANNELS, WIDTH), _random(1, HEADS * CHANNELS, WIDTH)
    clip = QKClip(threshold=1.0)
    layer = clip.add(query, key, heads=HEADS)
    x = _random(2 + dist.get_rank(), 2, 5, WIDTH)
    layer.observe(_project(query, x, HEADS), _project(key, x, HEADS))
    clip.apply()
    return query


def test_ranks_clip_by_the_largest_logit_of_all() -> None:
    first, second = run_distributed_test(_clip_on_ranks, 2)
    assert torch.equal(first, second)
    assert not torch.equal(first, _random(0, HEADS * CHANNELS, WIDTH))


def test_qk_clip_refuses_weights_that_heads_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="10 rows, which 4 heads do not divide"):
        QKClip().add(torch.zeros(10, 4), torch.zeros(8, 4), heads=4)
    with pytest.raises(ConfigError, match="share 3 key heads"):
        QKClip().add(torch.zeros(8, 4), torch.zeros(9, 4), heads=4, kv_heads=3)


# --- rates over widths ------------------------------------------------------------------------------------------------


def _change(width: int, lr_scale: str, algorithm: str, role: str, carried: bool) -> float:
    """How much a hidden layer's and a head's output move in one step, at rates that were tuned at width 64."""
    torch.manual_seed(0)
    hidden, head = nn.Linear(width, width, bias=False), nn.Linear(width, 10, bias=False)
    nn.init.normal_(hidden.weight, std=width**-0.5)
    nn.init.normal_(head.weight, std=1 / width)
    rates = {"hidden": (0.05 if algorithm == "muon" else 0.005), "head": 0.005}
    if carried:
        kind = lr_scale if algorithm == "muon" else "elementwise"
        rates["hidden"] = carry_rate(rates["hidden"], kind, tuned_at=64, width=width)
        rates["head"] = carry_rate(rates["head"], "head", tuned_at=64, width=width)
    groups: list[dict[str, Any]] = [
        {"params": [hidden.weight], "lr": rates["hidden"], "lr_scale": lr_scale, "algorithm": algorithm},
        {"params": [head.weight], "lr": rates["head"], "algorithm": "adamw"},
    ]
    optimizer = ParallelMuon(groups)
    x = torch.randn(8, width)
    features = torch.relu(hidden(x)).detach()
    before = hidden(x).detach(), head(features).detach()
    nn.functional.cross_entropy(head(torch.relu(hidden(x))), torch.arange(8)).backward()
    optimizer.step()
    after = hidden(x).detach(), head(features).detach()
    number = 0 if role == "hidden" else 1
    return float((after[number] - before[number]).square().mean().sqrt())


@pytest.mark.parametrize(
    ("lr_scale", "algorithm", "role"),
    [
        ("spectral", "muon", "hidden"),
        ("rms", "muon", "hidden"),
        ("spectral", "adamw", "hidden"),
        ("spectral", "muon", "head"),
    ],
)
def test_activations_move_alike_at_any_width(lr_scale: str, algorithm: str, role: str) -> None:
    narrow, wide = (_change(width, lr_scale, algorithm, role, carried=True) for width in (64, 1024))
    assert 0.6 < wide / narrow < 1.6
    if (lr_scale, role) != ("spectral", "hidden") or algorithm == "adamw":
        assert _change(1024, lr_scale, algorithm, role, carried=False) / narrow > 2.5, "the rule is needed"


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ConfigError, match="role must be one of spectral"):
        carry_rate(0.1, "tail", tuned_at=64, width=128)
