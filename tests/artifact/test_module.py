"""What calibration measures of a module that parbank did not build, held against hooks and autograd by hand."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parbank.artifact.module import calibrate_module
from parbank.errors import ConfigError
from parbank.quant.calibration import Calibration


class Small(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any] = lambda logits: logits) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(30, 16)
        self.hidden = nn.Linear(16, 24)
        self.bare = nn.Parameter(torch.randn(24, 16) / 5)
        self.head = nn.Linear(16, 30)
        self.wrap = wrap

    def forward(self, input_ids: Tensor, scale: float = 1.0) -> Any:
        x = F.gelu(self.hidden(self.table(input_ids)))
        return self.wrap(scale * self.head(x @ self.bare))


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: t for name, t in module.state_dict().items() if t.ndim == 2}


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(30, (4, 9), generator=generator) for _ in range(count)]


def same(first: Calibration, second: Calibration) -> bool:
    return first.tokens == second.tokens and all(
        ours.keys() == theirs.keys() and all(torch.allclose(ours[n], theirs[n]) for n in ours)
        for ours, theirs in ((first.hessians, second.hessians), (first.sensitivity, second.sensitivity))
    )


def test_the_moments_are_those_of_inputs_and_gradients() -> None:
    module, data = Small(), batches()
    found = calibrate_module(module, data, weights(module))
    inputs, gradients = [], []
    module.hidden.register_forward_hook(lambda m, args, out: inputs.append(args[0].detach().flatten(0, -2)))
    module.hidden.register_full_backward_hook(lambda m, ins, outs: gradients.append(outs[0].flatten(0, -2)))
    for ids in data:
        logits = module(ids)[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    x, d = torch.cat(inputs), torch.cat(gradients)
    assert found.tokens == 3 * 36
    torch.testing.assert_close(found.hessians["hidden.weight"], x.mT @ x / 108)
    torch.testing.assert_close(found.sensitivity["hidden.weight"], d.square().sum(0) / 108)
    assert set(found.hessians) == {"table.weight", "hidden.weight", "head.weight"}, "x @ bare reads its transpose"
    assert found.logits == {"head.weight"}


def test_batches_come_as_ids_as_arguments_or_by_name() -> None:
    module, data = Small(), batches()
    plain = calibrate_module(module, data, weights(module))
    assert same(plain, calibrate_module(module, [(ids,) for ids in data], weights(module)))
    assert same(plain, calibrate_module(module, [[ids, 1.0] for ids in data], weights(module)))
    named = [{"scale": 1.0, "input_ids": ids} for ids in data]
    assert same(plain, calibrate_module(module, iter(named), weights(module)))


def test_the_loss_is_the_next_token_s_or_the_module_s_own() -> None:
    data = batches()
    module = Small()
    plain = calibrate_module(module, data, weights(module))
    module.wrap = lambda logits: SimpleNamespace(logits=logits)
    assert same(plain, calibrate_module(module, data, weights(module)))

    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")

    module.wrap = lambda logits: logits
    assert same(plain, calibrate_module(module, data, weights(module), loss=loss))
    module.wrap = lambda logits: SimpleNamespace(loss=loss(logits, data[0]), logits=None)
    assert same(calibrate_module(module, data[:1], weights(module)), _first(Small(), data, loss))
    module.wrap = lambda logits: loss(logits, data[0])
    assert same(calibrate_module(module, data[:1], weights(module)), _first(Small(), data, loss))
    module.wrap = lambda logits: logits.mean(1)
    with pytest.raises(ConfigError, match=r"it returned \(4, 30\), which are no logits.*Give loss="):
        calibrate_module(module, data, weights(module))


def _first(module: Small, data: list[Tensor], loss: Callable[..., Tensor]) -> Calibration:
    return calibrate_module(module, data[:1], weights(module), loss=loss)


def test_a_module_of_numbers_is_calibrated_too() -> None:
    module = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 16))
    x = torch.randn(50, 20)
    found = calibrate_module(module, [x], weights(module), loss=lambda out, batch: out.square().sum() / 2)
    torch.testing.assert_close(found.hessians["0.weight"], x.mT @ x / 50)
    torch.testing.assert_close(found.sensitivity["2.weight"], module(x).detach().square().mean(0))
    assert not x.requires_grad
    assert set(found.sensitivity) == {"0.weight", "2.weight"}
    assert not found.logits


@pytest.mark.parametrize("outputs", [1, 2, 16])
def test_outputs_whose_gradients_share_a_sign_are_no_logits(outputs: int) -> None:
    """A score or a gate has one output or two, and all numbers of a layer may be too large."""
    module, x = nn.Sequential(nn.Linear(20, outputs)), torch.randn(50, 20)
    found = calibrate_module(module, [x], weights(module), loss=lambda out, batch: (out + 50).square().sum())
    assert not found.logits
    gated = calibrate_module(module, [x], weights(module), loss=lambda out, batch: out.softmax(-1)[:, 0].sum())
    assert outputs > 2 or not gated.logits


def test_gradients_that_are_no_numbers_show_no_logits() -> None:
    module = nn.Sequential(nn.Linear(20, 16))
    found = calibrate_module(
        module, [torch.randn(5, 20)], weights(module), loss=lambda out, batch: out.sum() * math.nan
    )
    assert not found.logits


def test_the_module_is_left_as_it_was() -> None:
    module = Small().train()
    module.table.weight.requires_grad_(False)
    before = {name: p.requires_grad for name, p in module.named_parameters()}
    calibrate_module(module, batches(1), weights(module))
    assert {name: p.requires_grad for name, p in module.named_parameters()} == before
    assert module.training
    assert all(p.grad is None for p in module.parameters())


def test_no_batches_and_strange_ones_are_refused() -> None:
    module = Small()
    with pytest.raises(ConfigError, match="calibration has no batches"):
        calibrate_module(module, [], weights(module))
    with pytest.raises(ConfigError, match="got a str"):
        calibrate_module(module, ["text"], weights(module))  # type: ignore[list-item]


def test_a_weight_read_in_part_or_transposed_is_not_measured() -> None:
    """Its inputs are others than those of its rows, or its outputs are fewer."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(30, 16)
            self.joint = nn.Parameter(torch.randn(48, 16))
            self.turned = nn.Parameter(torch.randn(16, 16))
            self.named = nn.Parameter(torch.randn(30, 16))

        def forward(self, ids: Tensor) -> Tensor:
            x = F.linear(self.table(ids), self.joint[:16]) + F.linear(self.table(ids), self.joint[16:32])
            return F.linear(input=F.linear(x, self.turned.T), weight=self.named)

    module = Odd()
    assert set(calibrate_module(module, batches(1), weights(module)).hessians) == {"table.weight", "named"}


def test_a_linear_layer_may_be_written_as_a_product() -> None:
    torch.manual_seed(3)
    module, data = Small(), batches()
    found = calibrate_module(module, data, {**weights(module), "bare": module.bare.detach().mT})
    assert found.hessians["bare"].shape == (24, 24), "stored as (outputs, inputs), x @ bare is a linear layer"

    class Products(Small):
        def forward(self, input_ids: Tensor, scale: float = 1.0) -> Any:
            x = F.gelu(self.table(input_ids) @ self.hidden.weight.T + self.hidden.bias)
            x = torch.matmul(x, self.bare)
            flat = torch.addmm(self.head.bias, x.flatten(0, 1), self.head.weight.T)
            return flat.unflatten(0, input_ids.shape)

    other = Products()
    same_weights = {**weights(other), "bare": other.bare.detach().mT}
    products = calibrate_module(other, data, same_weights)
    assert same(found, products)


def test_one_vector_is_an_input_too_and_no_weights_are_nothing_to_measure() -> None:
    module, x = nn.Linear(20, 16), torch.randn(20)
    found = calibrate_module(module, [x], weights(module), loss=lambda out, batch: out.sum())
    torch.testing.assert_close(found.hessians["weight"], torch.outer(x, x) / found.tokens)
    assert calibrate_module(module, [x], {}, loss=lambda out, batch: out.sum()).hessians == {}


class Attending(nn.Module):
    """Attention by PyTorch's own module, or by the same weights and linear layers that can be seen."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.plain = plain

    def forward(self, ids: Tensor) -> Tensor:
        x, own = self.table(ids), self.attention
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        if not self.plain:
            return self.head(own(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0])
        parts = F.linear(x, own.in_proj_weight, own.in_proj_bias).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(F.linear(y, own.out_proj.weight, own.out_proj.bias))


def test_attention_of_pytorch_is_measured_like_its_linear_layers() -> None:
    linear = F.linear
    inside, plain = (calibrate_module(m, batches(), weights(m)) for m in (Attending(False), Attending(True)))
    assert {"attention.in_proj_weight", "attention.out_proj.weight"} < inside.hessians.keys()
    for name in plain.hessians:
        torch.testing.assert_close(inside.hessians[name], plain.hessians[name])
        torch.testing.assert_close(inside.sensitivity[name], plain.sensitivity[name])
    assert F.linear is linear


def test_attention_over_another_text_is_named_as_not_measured() -> None:
    """Its packed projection reads two inputs, each with some of its rows."""

    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.attention(x, y, y)[0].square().sum()

    module = Across()
    found = calibrate_module(module, [(torch.randn(2, 5, 16), torch.randn(2, 7, 16))], weights(module))
    assert set(found.hessians) == {"attention.out_proj.weight"}


def test_an_error_inside_attention_leaves_pytorch_as_it_was() -> None:
    linear, module = F.linear, Attending(False)
    with pytest.raises((RuntimeError, AssertionError)):  # of PyTorch's own checks
        calibrate_module(module, [torch.zeros(2, 3, 4, dtype=torch.int64)], weights(module))
    assert F.linear is linear
