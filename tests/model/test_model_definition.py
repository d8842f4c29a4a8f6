"""The whole model written out once more, layer by layer and without banks or ops: what trained weights mean.

A file that was packed yesterday must say the same tomorrow. So this holds the order of skips and gains, the hash of bigrams,
which layers do what, and the cap, which tests of a model against itself cannot see.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parbank.model import GPT, ModelConfig, gpt
from parbank.model.stream import Stream
from tests.model.test_gpt import EVERYTHING

CONFIGS = {
    "even layers": EVERYTHING,
    "odd layers": replace(EVERYTHING, layers=5, value_layers=(1,), xsa_layers=3),
    "isolated": replace(EVERYTHING, isolate_documents=True),
    "windows": replace(EVERYTHING, isolate_documents=True, window=5, window_layers=(0, 2)),
    "untied, relu": replace(EVERYTHING, tied=False, activation="relu_squared", block_gains=False),
    "gelu": replace(EVERYTHING, activation="gelu", smear=False, residual_mix=False),
    "dense, parallel": replace(EVERYTHING, dense=True, parallel_layers=2, smear_input=5),
}
LENGTH = 24


def make_model(config: ModelConfig) -> GPT:
    """Every parameter random, gains around 1, and logits well beyond the cap."""
    model = GPT(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            gains = any(part in name for part in ("gain", "residual_mix", "value_mix", "scale"))
            parameter.copy_(
                1 + 0.3 * noise if gains else noise / math.sqrt(parameter.shape[-1] if parameter.ndim else 1)
            )
        (model.token_embedding if model.head is None else model.head).weight.mul_(12)
    return model


def make_ids(config: ModelConfig) -> Tensor:
    ids = torch.randint(2, config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = ids[0, 9] = ids[1, 17] = config.bos_id
    return ids


def norm(x: Tensor, scale: float = 1.0) -> Tensor:
    return scale * x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def define(config: ModelConfig, w: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits (B, T, vocabulary) from the weights by their plain names."""
    c, starts = config, torch.zeros_like(ids, dtype=torch.bool)
    starts[:, 0] = True
    if c.isolate_documents:
        starts |= ids == c.bos_id
    x = w["token_embedding.weight"][ids]
    pairs = zip(ids.flatten().tolist(), [0, *ids.flatten().tolist()], starts.flatten().tolist())
    rows = [31 if start else (40_499 * now ^ 25_033 * before) % 31 for now, before, start in pairs]  # of 32 buckets
    bigrams = w["bigram.embedding.weight"][torch.tensor(rows)].view(*ids.shape, -1)
    x = norm(x + w["bigram.scale"] * bigrams @ w["bigram.projection"].T)
    if c.smear_input:
        first_of_document = starts | (ids == c.bos_id)
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1).masked_fill(first_of_document[..., None], 0.0)
        x = x + w["smear.scale"] * torch.sigmoid(x[..., :5] @ w["smear.gate"])[..., None] * before
    elif c.smear:
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1).masked_fill(starts[..., None], 0.0)
        gate = torch.sigmoid(w["smear.gate"])
        x = (1 - gate) * x + gate * before
    documents = starts.cumsum(1)
    seen = torch.ones(LENGTH, LENGTH).tril().bool() & (documents[:, :, None] == documents[:, None, :])
    values = w["value_embedding.embedding.weight"][ids] @ w["value_embedding.projection"].T * w["value_embedding.scale"]
    first_input, first_values, outputs, history = x, None, list[Tensor](), list[Tensor]()
    for layer in range(c.layers):
        own = {name.removeprefix(f"blocks.{layer}."): t for name, t in w.items() if name.startswith(f"blocks.{layer}.")}
        if c.dense:
            history.append(x)
            x = sum(gain * past for gain, past in zip(w["dense_gains"][layer], history))
        if layer:
            outputs.append(x)  # of the block before, as this one reads it
        mirrored = c.layers - 1 - layer
        if mirrored < c.layers // 2:  # the second half: the output of block i reaches the block as far from the end
            x = x + w["skip_gains"][mirrored] * outputs[mirrored]
        if c.residual_mix:
            x = own["residual_mix"][0] * x + own["residual_mix"][1] * first_input
        scale = 1 / math.sqrt(layer + 1)
        read = norm(x, scale)
        q, k, v = (heads(read @ own[f"attention.{n}.weight"].T, c) for n in ("query", "key", "value"))
        if layer in c.value_layers:
            slot = c.value_layers.index(layer)
            v = v + heads(values * w["value_embedding.layer_scales"][slot], c)
        if first_values is None:
            first_values = v
        else:
            v = own["attention.value_mix"][0] * v + own["attention.value_mix"][1] * first_values
        q = rotate(norm(q), c) * own["attention.gain"][:, None]
        k = rotate(norm(k), c)
        y = attend(q, k, v, seen & torch.ones(LENGTH, LENGTH).triu(-4).bool() if layer in c.window_layers else seen)
        if layer >= c.layers - c.xsa_layers:
            shared = v.repeat_interleave(c.heads // c.kv_heads, dim=2)
            y = y - (y * shared).sum(-1, keepdim=True) / shared.square().sum(-1, keepdim=True) * shared
        y = y * (2 * torch.sigmoid(read @ own["attention.gate"].T))[..., None]
        attended = own.get("attention_gain", 1.0) * (y.flatten(2) @ own["attention.output.weight"].T)
        hidden = norm(x if layer >= c.layers - c.parallel_layers else x + attended, scale) @ own["mlp.up.weight"].T
        if c.activation == "gelu":
            hidden = F.gelu(hidden)
        else:
            slope = 0.5 if c.activation == "leaky_relu_squared" else 0.0
            hidden = torch.where(hidden > 0, hidden, slope * hidden).square()
        x = x + attended + own.get("mlp_gain", 1.0) * (hidden @ own["mlp.down.weight"].T)
    logits = norm(x) @ w["token_embedding.weight" if c.tied else "head.weight"].T
    return c.softcap * torch.tanh(logits / c.softcap)


def heads(x: Tensor, c: ModelConfig) -> Tensor:
    return x.unflatten(-1, (-1, c.width // c.heads))


def rotate(x: Tensor, c: ModelConfig) -> Tensor:
    """The first rope_dims channels, channel i with channel i + half."""
    half = c.rope_dims // 2
    angles = torch.arange(LENGTH)[:, None] * c.rope_base ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos + b * sin, b * cos - a * sin, rest], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    shares = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", shares, v)


@pytest.fixture(params=CONFIGS, name="model")
def _model(request: pytest.FixtureRequest) -> Iterator[GPT]:
    with torch.no_grad():
        yield make_model(CONFIGS[request.param])


def expected_logits(model: GPT, ids: Tensor) -> Tensor:
    return define(model.config, {name: t.double() for name, t in model.state_dict().items()}, ids).float()


def test_logits(model: GPT) -> None:
    ids = make_ids(model.config)
    expected = expected_logits(model, ids)
    assert expected.abs().max() > 0.9 * model.config.softcap, "the cap must show"
    torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-3)


def test_streamed_logits(model: GPT) -> None:
    """Cut in the middle of a document: what a segment is told of the tokens before it must be enough."""
    ids = make_ids(model.config)[0]
    stream, documents = Stream(model, LENGTH), (ids == model.config.bos_id).nonzero().flatten().numpy()
    parts = [stream.read(ids, a, b, documents=documents) for a, b in ((0, 11), (11, 12), (12, LENGTH))]
    found = torch.cat(parts)
    torch.testing.assert_close(found, expected_logits(model, ids[None])[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("path", ["whole", "in chunks", "in 8 bits"])
def test_every_loss_is_that_of_the_capped_logits(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(EVERYTHING, vocab_size=64)  # 8 bits take multiples of 16
    model, targets = make_model(config), make_ids(config).roll(-1, 1)
    ids = make_ids(config)
    nats = -expected_logits(model, ids).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    monkeypatch.setattr(gpt, "CHUNKED_HEAD_VOCAB", 1 if path == "in chunks" else 1 << 16)
    model.fp8 = "head" if path == "in 8 bits" else "off"
    with torch.no_grad():
        found = model.train()(ids, targets, reduction="none")
    # e4m3 has 3 bits of mantissa: a logit is a sum of 32 products, each wrong by 1/32 at most in both factors
    limits = {"rtol": 0.1, "atol": 0.5} if path == "in 8 bits" else {"rtol": 1e-4, "atol": 1e-3}
    torch.testing.assert_close(found, nats, **limits)
