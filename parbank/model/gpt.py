"""The GPT: embeddings, blocks over parameter banks, and the loss."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parbank import ops
from parbank.errors import ConfigError
from parbank.model.attention import Attention, Context, rope_tables
from parbank.model.banks import Banks
from parbank.model.config import ModelConfig
from parbank.model.embeddings import BigramEmbedding, SmearGate, ValueEmbedding
from parbank.ops import fp8
from parbank.ops.backend import use_triton

MAX_POSITIONS = 32_768  # rows of the rotation tables: 1 MB at 16 dims, and sixteen times the longest recipe
# From here on the head's product and the loss are made in chunks. With few tokens the logits are small, and the product
# followed by the loss is faster: 0.66 against 0.86 ms at 1,024; at 8,192 they tie, and chunks take a seventh of the memory
# (benchmarks/results/ops_h200_2026-11-15).
CHUNKED_HEAD_VOCAB = 4096


class Block(nn.Module):
    """One layer: attention, then MLP, each on a norm of the residual stream. The matrices come from the banks.

    What the MLP puts out is not added to the stream here: the next block's mix reads both, or the last norm, and one pass
    over memory makes the sum and what follows it. So a block takes the stream x and what is still to be added to it, and
    hands on the same.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.scale = 1 / math.sqrt(layer + 1) if config.norm_scale else 1.0
        self.attention = Attention(config, layer)
        gains, mix = config.block_gains, config.residual_mix
        self.attention_gain = nn.Parameter(torch.ones(config.width)) if gains else None
        self.mlp_gain = nn.Parameter(torch.ones(config.width)) if gains else None
        self.residual_mix = (
            nn.Parameter(torch.stack([torch.ones(config.width), torch.zeros(config.width)])) if mix else None
        )

    def forward(
        self,
        x: Tensor,
        addend: Tensor | None,
        skip: tuple[Tensor, Tensor] | None,
        x0: Tensor,
        weights: dict[str, Tensor],
        context: Context,
        extra: Tensor | None,
        first: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`addend` (None ahead of the first block) and gain * `skip` = (tensor, gain per channel) are added to x first.

        Returns the stream, what is to be added to it, the sum the block began with, and the values of its attention.
        """
        weights, gains = self._fold_gains(weights)
        total, x, normed = self._enter(x, addend, skip, x0)
        attended, values = self.attention(normed, weights, context, extra, first)
        x, normed = ops.add_rms_norm(x, _gained(attended, gains[0]), self.scale)
        return x, _gained(self._mlp(normed, weights), gains[1]), total, values

    def _enter(
        self, x: Tensor, addend: Tensor | None, skip: tuple[Tensor, Tensor] | None, x0: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The residual sum, the stream that follows from it, and that stream's norm."""
        mix = self.residual_mix
        if skip is not None and (addend is None or mix is None):
            x = x if addend is None else x + addend
            addend, skip = _gained(*skip), None
        if addend is None:
            if mix is None:
                return x, x, ops.rms_norm(x, scale=self.scale)
            return x, *ops.mix_rms_norm(x, x0, mix[0], mix[1], self.scale)
        if mix is None:
            total, normed = ops.add_rms_norm(x, addend, self.scale)
            return total, total, normed
        old, gain = skip or (None, None)
        return ops.add_mix_rms_norm(x, addend, x0, mix[0], mix[1], old, gain, self.scale)

    def _fold_gains(self, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[Tensor | None, Tensor | None]]:
        """The weights, and the gains still to be applied to what attention and MLP put out.

        Where the kernels run, gains are folded into the matrices: g * (W x) = (g * W) x. A gain's gradient is then a sum over a
        matrix; over the outputs it is one over every token of the batch, and reads both them and their gradient once more.
        """
        gains = self.attention_gain, self.mlp_gain
        if gains[0] is None or gains[1] is None or not use_triton(weights["output"]):
            return weights, gains
        folded = {name: _gained(weights[name].mT, gain).mT for name, gain in zip(("output", "down"), gains)}
        return weights | folded, (None, None)

    def _mlp(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        if self.config.activation == "gelu":
            linear = fp8.linear if fp8.takes_fp8("mlp") else F.linear
            return linear(F.gelu(linear(x, weights["up"])), weights["down"])
        slope = self.config.activation_slope if self.config.activation == "leaky_relu_squared" else 0.0
        if fp8.takes_fp8("mlp"):
            return fp8.mlp(x, weights["up"], weights["down"], slope)
        return ops.mlp(x, weights["up"], weights["down"], slope)


class Skips:
    """The outputs of the first half of the blocks, on their way to the inputs of the second half, last to first."""

    def __init__(self, gains: Tensor | None, layers: int) -> None:
        self.gains, self.layers = gains, layers
        self.count = 0 if gains is None else len(gains)
        self._held: list[Tensor] = []

    def take(
        self, layer: int, x: Tensor, addend: Tensor | None
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
        """What a block starts from: the stream, what is to be added to it, and the skip with its gain."""
        if self.gains is None or layer < self.layers - self.count:
            return x, addend, None
        if layer == self.count:
            # Of an even number of layers the first half ends here: its last output is this block's input and its skip.
            assert addend is not None  # this is not the first block
            x, addend = x + addend, None
            self._held.append(x)
        return x, addend, (self._held.pop(), self.gains[self.layers - 1 - layer])

    def keep(self, layer: int, total: Tensor) -> None:
        """`total` is the sum a block began with, so the output of the one before."""
        if 0 < layer <= self.count and layer < self.layers - self.count:
            self._held.append(total)


class GPT(nn.Module):
    """Parameters: one bank per matrix shape, the embeddings, and small gains and gates.

    The compute dtype is autocast's where autocast is on, else that of the weights. Casting is done here, once per bank
    and forward pass, rather than by autocast at every use.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        self.token_embedding = nn.Embedding(c.vocab_size, c.width)
        self.bigram = BigramEmbedding(c.bigram_buckets, c.bigram_width, c.width) if c.bigram_buckets else None
        self.smear = SmearGate(c.width) if c.smear else None
        self.value_embedding = (
            ValueEmbedding(c.vocab_size, c.value_width, c.kv_width, c.value_layers) if c.value_layers else None
        )
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.layers))
        skips = c.layers // 2 if c.unet_skips else 0
        self.skip_gains = nn.Parameter(torch.ones(skips, c.width)) if skips else None
        self.head = None if c.tied else nn.Linear(c.width, c.vocab_size, bias=False)
        self.banks = Banks(_matrix_shapes(c))
        self.register_state_dict_post_hook(_write_plain_names)
        self.register_load_state_dict_pre_hook(_read_plain_names)
        # Tables, not arithmetic in the forward pass: Inductor would redo the cosines for every element of every query.
        self.register_buffer("cos", torch.empty(MAX_POSITIONS, c.rope_dims // 2), persistent=False)
        self.register_buffer("sin", torch.empty(MAX_POSITIONS, c.rope_dims // 2), persistent=False)
        if not self.token_embedding.weight.is_meta:
            self.reset_parameters()
            self.fill_tables()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Orthogonal matrices, except those that write to the residual stream: they start at zero, so every block starts
        as the identity. Small embeddings, because the tied head reads them too."""
        with _one_thread():
            for name, matrix in self.banks.matrices().items():
                if name.endswith(("output.weight", "down.weight")):
                    matrix.zero_()
                else:
                    nn.init.orthogonal_(matrix)
        self.token_embedding.weight.normal_(std=self.config.embedding_std)
        if self.bigram is not None:
            # One of the two at zero starts as nothing; both at zero would get no gradient and stay nothing.
            self.bigram.embedding.weight.zero_()
            nn.init.orthogonal_(self.bigram.projection)
        if self.value_embedding is not None:
            self.value_embedding.embedding.weight.normal_(std=0.01)
        if self.head is not None:
            self.head.weight.zero_()

    @torch.no_grad()
    def fill_tables(self) -> None:
        """Computes what is not a parameter. Needed again only for a model that was built without memory (on "meta")."""
        cos, sin = rope_tables(MAX_POSITIONS, self.config.rope_dims, self.config.rope_base)
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    def plain_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by parameter name -> by plain per-layer name: what checkpoints and artifacts hold."""
        return self.banks.split(tensors, "banks.")

    def parameter_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `plain_names`."""
        return self.banks.join(tensors, "banks.")

    def forward(self, ids: Tensor, targets: Tensor | None = None, reduction: str = "mean") -> Tensor:
        """ids (B, T). With targets (B, T) the loss in nats (mean, sum, or none: one per token), else the logits."""
        return self.read_out(self.features(ids), targets, reduction)

    def read_out(self, x: Tensor, targets: Tensor | None, reduction: str = "mean") -> Tensor:
        """The loss, or the logits, from the normed output of the last block."""
        head = (self.token_embedding if self.head is None else self.head).weight.to(x.dtype)
        if targets is not None and fp8.takes_fp8("head"):
            return ops.softcap_cross_entropy(fp8.linear(x, head), targets, self.config.softcap, reduction=reduction)
        if targets is not None and self.config.vocab_size < CHUNKED_HEAD_VOCAB:
            return ops.softcap_cross_entropy(F.linear(x, head), targets, self.config.softcap, reduction=reduction)
        if targets is not None:
            return ops.linear_softcap_cross_entropy(x, head, targets, self.config.softcap, reduction=reduction)
        logits = F.linear(x, head).float()
        return self.config.softcap * torch.tanh(logits / self.config.softcap) if self.config.softcap else logits

    def features(self, ids: Tensor) -> Tensor:
        """The normed output of the last block, (B, T, width)."""
        c = self.config
        dtype = self._compute_dtype(ids.device)
        starts = _document_starts(ids, c.bos_id if c.isolate_documents else None)
        x = self.token_embedding(ids).to(dtype)
        if self.bigram is not None:
            x = x + self.bigram(ids, starts, dtype)
        x = ops.rms_norm(x)
        if self.smear is not None:
            x = self.smear(x, starts)
        extras = self.value_embedding(ids, dtype) if self.value_embedding is not None else {}
        if ids.shape[1] > MAX_POSITIONS:
            raise ConfigError(f"a window of {ids.shape[1]} tokens is longer than the model's {MAX_POSITIONS} positions")
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        context = Context(cos, sin, _document_mask(starts) if c.isolate_documents else None)
        matrices = self.banks.matrices(dtype)
        x0, addend, first = x, None, None
        skips = Skips(self.skip_gains, c.layers)
        for layer, block in enumerate(self.blocks):
            x, addend, skip = skips.take(layer, x, addend)
            weights = _of_layer(matrices, layer)
            x, addend, total, values = block(x, addend, skip, x0, weights, context, extras.get(layer), first)
            skips.keep(layer, total)
            first = values if first is None and c.value_residual else first
        assert addend is not None  # a model has a layer
        return ops.add_rms_norm(x, addend)[1]

    def _compute_dtype(self, device: torch.device) -> torch.dtype:
        if torch.is_autocast_enabled(device.type):
            return torch.get_autocast_dtype(device.type)
        return self.token_embedding.weight.dtype


MATRICES = ("query", "key", "value", "output", "up", "down")


def _matrix_names(layer: int) -> dict[str, str]:
    return {m: f"blocks.{layer}.{'mlp' if m in ('up', 'down') else 'attention'}.{m}.weight" for m in MATRICES}


def _matrix_shapes(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """Every matrix's (out, in), kind by kind, so that a bank is a run of queries, then a run of outputs, and so on."""
    shapes = {
        "query": (c.width, c.width),
        "output": (c.width, c.width),
        "key": (c.kv_width, c.width),
        "value": (c.kv_width, c.width),
        "up": (c.hidden, c.width),
        "down": (c.width, c.hidden),
    }
    return {_matrix_names(layer)[kind]: shape for kind, shape in shapes.items() for layer in range(c.layers)}


def _of_layer(matrices: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    return {kind: matrices[name] for kind, name in _matrix_names(layer).items()}


def _write_plain_names(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    _translate(state, prefix, cast(GPT, module).plain_names)


def _read_plain_names(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    _translate(state, prefix, cast(GPT, module).parameter_names)


def _translate(state: dict[str, Any], prefix: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Applies a change of names, in place, to the entries of a state dict under `prefix`."""
    own = {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}
    state.update({prefix + name: value for name, value in change(own).items()})


@contextmanager
def _one_thread() -> Iterator[None]:
    """Factorising one matrix of a few hundred rows after another is quickest so: the threads of a busy machine spend their
    time waiting for each other. And the start does not depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _gained(x: Tensor, gain: Tensor | None) -> Tensor:
    return x if gain is None else gain.to(x.dtype) * x


def _document_starts(ids: Tensor, bos_id: int | None) -> Tensor:
    """(B, T): true where a position must not look at the one before: the first of the window and, isolated, each BOS."""
    first = (torch.arange(ids.shape[1], device=ids.device) == 0).expand(ids.shape)
    return first if bos_id is None else first | (ids == bos_id)


def _document_mask(starts: Tensor) -> Tensor:
    """(B, 1, T, T): causal, and within one document."""
    document = starts.cumsum(-1)
    same = document[:, :, None] == document[:, None, :]
    return same.tril()[:, None]
