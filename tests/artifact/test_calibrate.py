"""Calibration against plain autograd, token by token, and over several ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parbank.artifact.calibrate import calibrate
from parbank.data.shards import TokenSet
from parbank.errors import DataError
from parbank.model import GPT, ModelConfig
from parbank.quant.calibration import Calibration
from parbank.quant.config import QuantConfig
from parbank.quant.roles import role
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from tests.distributed import run_distributed_test

CPU = Runtime(device=torch.device("cpu"))


def make_model(**changes: object) -> GPT:
    torch.manual_seed(3)
    config: ModelConfig = replace(get_recipe("nano").model, **changes)  # type: ignore[arg-type]
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def measure(model: GPT, ids: list[int] | np.ndarray, context: int, count: int, place: Runtime = CPU) -> Calibration:
    tokens, quant = TokenSet([np.asarray(ids, np.uint16)]), QuantConfig(calibration_tokens=count)
    return calibrate(model, tokens, quant, context=context, runtime=place)


def gradients(model: GPT, ids: list[int]) -> dict[str, torch.Tensor]:
    """The gradients of the weights themselves, by plain names."""
    tokens = torch.tensor(ids)[None]
    model.zero_grad()
    model.eval()
    model(tokens[:, :-1], tokens[:, 1:], reduction="sum").backward()
    found = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
    return model.plain_names(found)


@pytest.mark.parametrize("activation", ["leaky_relu_squared", "gelu"])
def test_one_token_gives_the_squared_gradient_of_every_weight(activation: str) -> None:
    """For one token dL/dW = d x^T, so its square is g times the diagonal of H: for every matrix, in a bank or not, stored
    transposed or not. A lookup's gradient is one row."""
    model = make_model(tied=False, activation=activation)
    found = measure(model, [7, 9], context=1, count=1)
    expected = gradients(model, [7, 9])
    names = {n for n, t in model.state_dict().items() if role(n, tuple(t.shape)) != "other"}
    assert set(found.hessians) == set(found.sensitivity) == names
    for name in names:
        product = torch.outer(found.sensitivity[name], found.hessians[name].diagonal())
        actual = expected[name].square()
        if name in found.logits:  # its rows' shares: the next test
            torch.testing.assert_close(product.sum(0), actual.sum(0), rtol=1e-3, atol=1e-12)
        elif name.endswith("embedding.weight"):
            row = actual.sum(1).argmax()
            torch.testing.assert_close(product[row] / 1.5, actual[row], rtol=1e-3, atol=1e-12)  # 1 + the half count
        else:
            torch.testing.assert_close(product, actual, rtol=1e-3, atol=1e-12)
    assert found.tokens == 1
    assert found.logits == {"head.weight"}


@pytest.mark.parametrize("tied", [False, True])
def test_a_row_of_logits_has_the_share_of_its_probability(tied: bool) -> None:
    """p (1 - p) from the model, not from which tokens came: also where a token never came."""
    model, ids = make_model(tied=tied, softcap=1000.0), [7, 9, 11, 7, 7, 9, 30]
    found = measure(model, ids, context=len(ids) - 1, count=len(ids) - 1)
    tokens = torch.tensor(ids)[None]
    with torch.no_grad():
        likely = torch.softmax(model(tokens[:, :-1])[0].float(), -1)
    name = "token_embedding.weight" if tied else "head.weight"
    assert found.logits == {name}
    never = [token for token in range(model.config.vocab_size) if token not in ids]
    expected = likely[:, never].mean(0)  # no target: p of every position, up to the square
    measured = found.sensitivity[name][never]
    if tied:  # the lookups of the table add the same to each of these rows
        expected, measured = expected - expected[0], measured - measured[0]
        scale = float(measured.norm() / expected.norm())
    else:
        scale = float(measured.sum() / expected.sum())
    torch.testing.assert_close(measured / scale, expected, rtol=2e-3, atol=1e-6)


def test_windows_add_up() -> None:
    model = make_model(tied=False)
    pairs = [[5, 6], [6, 7], [7, 8]]
    single = [measure(model, pair, context=1, count=1) for pair in pairs]
    whole = measure(model, [5, 6, 7, 8], context=1, count=3)
    name = "blocks.2.mlp.down.weight"
    mean = torch.stack([s.hessians[name] for s in single]).mean(0)
    torch.testing.assert_close(whole.hessians[name], mean)
    torch.testing.assert_close(whole.sensitivity[name], torch.stack([s.sensitivity[name] for s in single]).mean(0))
    assert whole.tokens == 3


def test_matrices_of_one_input_have_one_hessian_and_a_tied_table_the_sum_of_its_uses() -> None:
    ids = np.random.default_rng(0).integers(0, 320, 400)
    found = measure(make_model(), ids, context=32, count=320)
    at = "blocks.1.attention."
    assert torch.equal(found.hessians[at + "query.weight"], found.hessians[at + "value.weight"])
    untied = make_model(tied=False)
    with torch.no_grad():
        untied.load_state_dict(
            {**make_model().state_dict(), "head.weight": make_model().state_dict()["token_embedding.weight"]}
        )
    apart = measure(untied, ids, context=32, count=320)
    name = "token_embedding.weight"
    traces = [
        float(c.sensitivity[n].sum() * c.hessians[n].trace())
        for c, n in ((found, name), (apart, name), (apart, "head.weight"))
    ]
    assert traces[0] == pytest.approx(traces[1] + traces[2], rel=1e-3), "the loss does not care how it is stored"


def test_the_model_is_left_as_it_was_and_twice_is_the_same() -> None:
    model = make_model().train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    ids = np.random.default_rng(1).integers(0, 320, 700)
    first, second = (measure(model, ids, context=64, count=512) for _ in range(2))
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    for name in first.hessians:
        assert torch.equal(first.hessians[name], second.hessians[name])
        assert torch.equal(first.sensitivity[name], second.sensitivity[name])


def test_casts_of_mixed_precision_are_seen_through() -> None:
    """On a GPU the banks are cast to bfloat16 as a whole; autocast on the CPU takes the same path."""
    model, ids = make_model(), np.random.default_rng(2).integers(0, 320, 300)
    wide = measure(model, ids, context=64, count=256)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = measure(model, ids, context=64, count=256)
    assert set(narrow.hessians) == set(wide.hessians)
    for name, hessian in wide.hessians.items():
        found = narrow.hessians[name]
        assert float(found.trace()) == pytest.approx(float(hessian.trace()), rel=0.2)
        # The sums themselves are float32. In 16 bits the small directions of H drown, and it has negative ones.
        if not name.endswith("embedding.weight"):
            assert not torch.equal(found, found.bfloat16().float())
        spectrum = torch.linalg.eigvalsh(found.double())
        assert spectrum[0] > -1e-6 * spectrum[-1]


def test_too_little_text_is_an_error_that_says_so() -> None:
    with pytest.raises(DataError, match=r"window of 65 tokens.*has 10"):
        measure(make_model(), list(range(10)), context=64, count=64)


def _calibrate_on_a_rank(ids: np.ndarray, count: int) -> Calibration:
    place = Runtime(device=torch.device("cpu"), rank=dist.get_rank(), world=dist.get_world_size())
    return measure(make_model(), ids, context=32, count=count, place=place)


@pytest.mark.parametrize("windows", [5, 1])
def test_two_ranks_measure_what_one_does(windows: int) -> None:
    """Of five windows the ranks get three and two; of one, the second rank gets none."""
    ids = np.random.default_rng(0).integers(0, 320, 200)
    alone = measure(make_model(), ids, context=32, count=32 * windows)
    for found in run_distributed_test(_calibrate_on_a_rank, 2, args=(ids, 32 * windows)):
        assert found.tokens == alone.tokens == 32 * windows
        assert found.hessians.keys() == alone.hessians.keys()
        for name in alone.hessians:
            torch.testing.assert_close(found.hessians[name], alone.hessians[name], rtol=1e-4, atol=1e-7)
            torch.testing.assert_close(found.sensitivity[name], alone.sensitivity[name], rtol=1e-4, atol=1e-10)
