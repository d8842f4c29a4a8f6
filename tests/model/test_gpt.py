"""The model's promises: it never looks ahead, never across documents when told so, and every element can be left out."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from parbank.model import GPT, ModelConfig
from parbank.model.attention import pad_lengths
from parbank.model.gpt import document_lengths
from parbank.ops import causal_attention, flash, remove_own_value
from parbank.ops.backend import INTERPRETED, use_backend
from parbank.recipes import GOLF_MODEL

BASE = ModelConfig(vocab_size=67, layers=4, width=32, heads=4, kv_heads=2, rope_dims=8)
EVERYTHING = replace(
    BASE,
    qk_gain=1.5,
    rope_dims=4,
    norm_scale=True,
    unet_skips=True,
    residual_mix=True,
    block_gains=True,
    smear=True,
    bigram_buckets=32,
    bigram_width=8,
    value_layers=(2, 3),
    value_width=8,
    xsa_layers=2,
    gated_attention=True,
    value_residual=True,
    softcap=15.0,
)
OPTIONS: dict[str, ModelConfig] = {
    "plain": BASE,
    "everything": EVERYTHING,
    "everything, isolated": replace(EVERYTHING, isolate_documents=True),
    "relu_squared": replace(BASE, activation="relu_squared"),
    "gelu": replace(BASE, activation="gelu"),
    "one kv head": replace(BASE, kv_heads=1),
    "as many kv heads": replace(BASE, kv_heads=4),
    "odd layers": replace(EVERYTHING, layers=5),
    "one layer": replace(BASE, layers=1, unet_skips=True),
    "wide mlp": replace(BASE, mlp_multiple=4.0),
    "square mlp": replace(BASE, mlp_multiple=1.0),
    "qk_gain": replace(BASE, qk_gain=1.5),
    "no rope": replace(BASE, rope_dims=0),
    "partial rope": replace(BASE, rope_dims=4),
    "norm_scale": replace(BASE, norm_scale=True),
    "unet_skips": replace(BASE, unet_skips=True),
    "residual_mix": replace(BASE, residual_mix=True),
    "block_gains": replace(BASE, block_gains=True),
    "smear": replace(BASE, smear=True),
    "bigram": replace(BASE, bigram_buckets=32, bigram_width=8),
    "value embedding": replace(BASE, value_layers=(0, 3), value_width=8),
    "xsa last": replace(BASE, xsa_layers=1),
    "xsa all": replace(BASE, xsa_layers=-1),
    "gated_attention": replace(BASE, gated_attention=True),
    "value_residual": replace(BASE, value_residual=True),
    "softcap": replace(BASE, softcap=15.0),
    "untied": replace(BASE, tied=False),
    "isolated": replace(BASE, isolate_documents=True),
    "dense": replace(BASE, dense=True, unet_skips=True),
    "parallel": replace(BASE, parallel_layers=2),
    "smear by input": replace(BASE, smear=True, smear_input=5),
    "windows": replace(BASE, window=4, window_layers=(1, 2)),
    "everything, isolated, windows": replace(EVERYTHING, isolate_documents=True, window=6, window_layers=(0, 3)),
}


def random_model(config: ModelConfig, seed: int = 0) -> GPT:
    """Every parameter drawn at random: at its own start a model has zeros that would hide a leak."""
    torch.manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


def random_ids(config: ModelConfig, length: int = 24, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, config.vocab_size, (2, length), generator=generator)  # 2: no BOS by chance


@pytest.mark.parametrize("name", OPTIONS)
def test_changing_a_token_moves_no_earlier_logit(name: str) -> None:
    config = OPTIONS[name]
    model, ids = random_model(config), random_ids(config)
    before = model(ids)
    for position in (1, 11, 23):
        changed = ids.clone()
        changed[:, position] = (changed[:, position] - 2 + 7) % (config.vocab_size - 2) + 2
        after = model(changed)
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=0)
        assert not torch.equal(after[:, position], before[:, position]), "the test must be able to see a change"


@pytest.mark.parametrize("base", ["everything", "plain"])
def test_isolated_documents_do_not_see_each_other(base: str) -> None:
    config = replace(OPTIONS[base], isolate_documents=True)
    model = random_model(config)
    ids = random_ids(config)
    ids[:, 10] = config.bos_id
    other = ids.clone()
    other[:, :10] = random_ids(config, seed=9)[:, :10]
    torch.testing.assert_close(model(other)[:, 10:], model(ids)[:, 10:], rtol=0, atol=0)
    leaking = GPT(replace(config, isolate_documents=False))
    leaking.load_state_dict(model.state_dict())
    assert not torch.allclose(leaking(other)[:, 10:], leaking(ids)[:, 10:]), (
        "without isolation the text before must matter"
    )


def test_an_isolated_document_is_scored_as_if_it_stood_alone() -> None:
    config = replace(EVERYTHING, isolate_documents=True, rope_dims=0)  # without positions, shifting changes nothing
    model, ids = random_model(config), random_ids(config)
    ids[:, 10] = config.bos_id
    torch.testing.assert_close(model(ids)[:, 10:], model(ids[:, 10:]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["isolated", "everything, isolated", "everything, isolated, windows"])
def test_documents_by_their_lengths_are_those_of_the_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU in training, in float64: the loss, and every gradient, and through the blocks' fused halves."""
    config = OPTIONS[name]
    model, ids = random_model(config).double(), random_ids(config)
    ids[0, [0, 5, 6, 17]] = ids[1, [11, 23]] = config.bos_id
    lengths = document_lengths(ids.numpy(), config.bos_id, ids.shape[1])
    assert lengths.tolist() == [0, 5, 6, 17, 24, 35, 47, 48, 48]

    def both_ways(lengths: torch.Tensor | None) -> list[torch.Tensor]:
        loss = model(ids, ids.roll(-1, 1), lengths=lengths)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    expected = both_ways(None)
    monkeypatch.setattr(
        flash, "takes_varlen", lambda x, width: x.dim() == 3
    )  # the model asks, and not the op, of a CPU
    for a, b in zip(both_ways(lengths), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    wrong = both_ways(document_lengths(ids.roll(1, 1).numpy(), config.bos_id, ids.shape[1]))
    assert not torch.allclose(wrong[0], expected[0], rtol=1e-9), "the lengths must matter"


def test_empty_documents_fill_up_to_a_power_of_two() -> None:
    assert pad_lengths([0], 9) == [0, 9]
    assert pad_lengths([0, 4], 9) == [0, 4, 9]
    assert pad_lengths([0, 4, 5], 9) == [0, 4, 5, 9, 9]
    assert len(pad_lengths(range(129), 1000)) == 257


def test_a_cut_window_starts_its_own_documents() -> None:
    ids = np.array([[1, 5, 5, 5, 5, 5, 1, 5], [5] * 8])
    assert document_lengths(ids, 1, 4).tolist() == [0, 4, 6, 8, 12, 16, 16, 16, 16]
    assert document_lengths(ids, 1, 8).tolist() == [0, 6, 8, 16, 16]


def test_a_layer_with_a_window_sees_so_many_tokens() -> None:
    config = replace(BASE, layers=2, window=4, window_layers=(0, 1))
    model, ids = random_model(config), random_ids(config)
    changed = ids.clone()
    changed[:, 3] = (changed[:, 3] - 2 + 7) % (config.vocab_size - 2) + 2
    before, after = model(ids), model(changed)
    moved = (before - after).abs().amax((0, 2)) > 0
    assert moved.nonzero().flatten().tolist() == list(range(3, 10)), "two layers of four tokens reach six further"


@pytest.mark.parametrize("name", OPTIONS)
def test_every_parameter_gets_a_gradient_and_plain_names_round_trip(name: str) -> None:
    config = OPTIONS[name]
    model, ids = random_model(config), random_ids(config)
    model(ids, ids.roll(-1, 1)).backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().max() == 0]
    assert dead == []
    state = model.state_dict()
    assert not any("banks" in key for key in state)
    assert state["blocks.0.mlp.down.weight"].shape == (config.width, config.hidden)
    again = GPT(config)
    again.load_state_dict(state)
    torch.testing.assert_close(again(ids), model(ids), rtol=0, atol=0)


def test_the_golf_model_is_four_kinds_of_matrix_in_three_banks() -> None:
    with torch.device("meta"):
        model = GPT(GOLF_MODEL)
    assert {k: tuple(p.shape) for k, p in model.banks.named_parameters()} == {
        "512x512": (22, 512, 512),
        "256x512": (22, 256, 512),
        "1536x512": (22, 1536, 512),
    }
    assert model.banks.transposed["1536x512"] == (False,) * 11 + (True,) * 11
    assert sum(p.numel() for p in model.parameters()) == 26_928_220


def loss_and_gradients(
    model: GPT, ids: torch.Tensor, backend: str, compiler: str | None = None
) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with use_backend(backend):
        call = torch.compile(model, fullgraph=True, backend=compiler) if compiler else model
        loss = call(ids, ids.roll(-1, 1))
        loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check_kernels(config: ModelConfig, length: int, device: str, compiler: str | None, tolerance: float) -> None:
    """One forward and backward pass in float32, through the kernels and in plain PyTorch."""
    model, ids = random_model(config).to(device), random_ids(config, length=length).to(device)
    with torch.no_grad():
        # near the size of trained ones: of larger ones the softcap leaves little but saturated logits
        for parameter in model.parameters():
            parameter.mul_(0.5)
    torch._dynamo.reset()
    expected = loss_and_gradients(model, ids, "reference")
    found = loss_and_gradients(model, ids, "triton", compiler)
    assert found.keys() == expected.keys() == {"loss"} | dict(model.named_parameters()).keys()
    for key, exact in expected.items():
        error = (found[key] - exact).norm() / exact.norm()
        assert error < tolerance, f"{key}: {error}"


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton to interpret the kernels; on a GPU the next test runs them")
@pytest.mark.parametrize(
    ("base", "layers", "compiler"),
    [
        ("everything", 3, "aot_eager"),
        ("everything", 5, None),
        ("everything", 4, None),
        ("unet_skips", 3, None),
        ("dense", 3, None),
    ],
)
def test_the_kernels_compute_what_the_plain_path_does(base: str, layers: int, compiler: str | None) -> None:
    """Sums between blocks with and without skips and mix, for an odd and an even number of layers."""
    extras = {"value_layers": (1, 2)} if base == "everything" else {}
    config = replace(OPTIONS[base], layers=layers, width=16, heads=2, kv_heads=1, **extras)
    check_kernels(config, 6, "cpu", compiler, 1e-4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32")  # Inductor would rather round the products
@pytest.mark.parametrize("layers", [4, 5])
def test_compiled_the_kernels_compute_what_the_plain_path_does_on_a_gpu(layers: int) -> None:
    config = replace(EVERYTHING, layers=layers, width=128, heads=4, kv_heads=2, value_layers=(1, 2))
    check_kernels(config, 128, "cuda", "inductor", 1e-3)


def test_a_missing_matrix_is_reported_by_load_state_dict() -> None:
    state = GPT(BASE).state_dict()
    del state["blocks.2.attention.key.weight"]
    with pytest.raises(RuntimeError, match=r"banks\.16x32"):
        GPT(BASE).load_state_dict(state)


def test_a_new_model_starts_as_the_identity_and_predicts_near_uniformly() -> None:
    config = replace(EVERYTHING, value_residual=False)
    torch.manual_seed(0)
    model, ids = GPT(config), random_ids(config)
    loss = model(ids, ids.roll(-1, 1))
    assert abs(loss.item() - torch.tensor(float(config.vocab_size)).log().item()) < 0.1


def test_losses_per_token_average_to_the_mean_and_match_the_logits() -> None:
    model, ids = random_model(EVERYTHING), random_ids(EVERYTHING)
    targets = ids.roll(-1, 1)
    each = model(ids, targets, reduction="none")
    assert each.shape == targets.shape
    torch.testing.assert_close(each.mean(), model(ids, targets))
    expected = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(ids, targets), expected, rtol=1e-5, atol=1e-5)
    assert model(ids).abs().max() <= EVERYTHING.softcap


def test_autocast_sets_the_compute_dtype() -> None:
    model, ids = random_model(EVERYTHING), random_ids(EVERYTHING)
    assert model.features(ids).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert model.features(ids).dtype == torch.bfloat16


def test_exclusive_attention_leaves_nothing_along_the_own_value() -> None:
    y, v = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8)
    v[0, 0] = 0
    out = remove_own_value(y, v)
    along = (out * v.repeat_interleave(2, dim=2)).sum(-1)
    torch.testing.assert_close(along, torch.zeros_like(along), atol=1e-5, rtol=0)
    torch.testing.assert_close(out[0, 0], y[0, 0])


def with_weights_of(model: GPT, config: ModelConfig) -> GPT:
    """Another model of the same weights."""
    other = GPT(config)
    other.load_state_dict(model.state_dict())
    return other


def test_minus_one_layers_of_exclusive_attention_are_all_of_them() -> None:
    model, ids = random_model(replace(BASE, xsa_layers=-1)), random_ids(BASE)
    every = with_weights_of(model, replace(BASE, xsa_layers=BASE.layers))
    torch.testing.assert_close(model(ids), every(ids), rtol=0, atol=0)
    for fewer in (0, BASE.layers - 1):
        assert not torch.allclose(model(ids), with_weights_of(model, replace(BASE, xsa_layers=fewer))(ids))


def test_relu_squared_is_nothing_below_zero_whatever_the_slope() -> None:
    model, ids = random_model(replace(BASE, activation="relu_squared", activation_slope=0.7)), random_ids(BASE)
    flat = with_weights_of(model, replace(BASE, activation_slope=0.0))
    torch.testing.assert_close(model(ids), flat(ids), rtol=0, atol=0)
    leaky = with_weights_of(model, replace(BASE, activation_slope=0.7))
    assert not torch.allclose(model(ids), leaky(ids)), "below zero there must be something to see"


def test_grouped_attention_equals_attention_with_repeated_keys() -> None:
    q, k, v = torch.randn(2, 9, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    repeated = causal_attention(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))
    torch.testing.assert_close(causal_attention(q, k, v), repeated)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "everything", "everything, isolated"])
def test_the_kernels_never_look_ahead_either(name: str) -> None:
    """On the GPU, in bfloat16, with whatever kernels are on by default."""
    config = replace(OPTIONS[name], width=128)
    model = random_model(config).cuda()
    ids = random_ids(config, length=256).cuda()
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        before = model(ids)
        for position in (1, 100, 255):
            changed = ids.clone()
            changed[:, position] = (changed[:, position] - 2 + 7) % (config.vocab_size - 2) + 2
            after = model(changed)
            assert torch.equal(after[:, :position], before[:, :position])
            assert not torch.equal(after[:, position], before[:, position])
