"""The GPT: embeddings, blocks over parameter banks, and the loss.

The U-net skips, the mix with the first embedding and the zero-initialised outputs come from modded-nanogpt.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parbank import ops
from parbank.errors import ConfigError
from parbank.model.attention import Attention, Context, fill_rope_tables, pad_lengths
from parbank.model.banks import Banks
from parbank.model.config import ModelConfig
from parbank.model.embeddings import BigramEmbedding, InputSmear, SmearGate, ValueEmbedding, look_up, make_table
from parbank.ops import flash, fp8, reference
from parbank.ops.backend import use_triton

MAX_POSITIONS = 32_768  # rows of the rotation tables: 1 MB at 16 dims, and sixteen times the longest recipe
# From here on the head's product and the loss are made in chunks. With few tokens the logits are small, and the product
# followed by the loss is faster; with many, chunks are faster and take a seventh of the memory (docs/log/step.md).
CHUNKED_HEAD_VOCAB = 4096
UNKNOWN_ID = 0  # of every tokenizer here; byte fallback leaves it unused


class Block(nn.Module):
    """One layer: attention, then MLP, each on a norm of the residual stream. The matrices come from the banks."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.scale = 1 / math.sqrt(layer + 1) if config.norm_scale else 1.0
        self.attention = Attention(config, layer)
        self.parallel = layer >= config.layers - config.parallel_layers
        gains, mix = config.block_gains, config.residual_mix
        self.attention_gain = nn.Parameter(torch.ones(config.width)) if gains else None
        self.mlp_gain = nn.Parameter(torch.ones(config.width)) if gains else None
        self.residual_mix = nn.Parameter(torch.zeros(2, config.width)) if mix else None
        if self.residual_mix is not None:
            self.residual_mix.data[0] = 1  # the block starts from its stream alone

    def forward(
        self,
        x: Tensor,
        skip: tuple[Tensor, Tensor] | None,
        x0: Tensor,
        weights: dict[str, Tensor],
        context: Context,
        extra: Tensor | None,
        first: Tensor | None,
        return_x: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """gain * `skip` = (tensor, gain per channel) is added to x first.

        Returns the next x, this x for later readers (if `return_x`), and the values of the attention where a later
        layer needs them.
        """
        gains = (None, None) if folds_gains(x) else (self.attention_gain, self.mlp_gain)
        mix = None if self.residual_mix is None else (x0, self.residual_mix[0], self.residual_mix[1])
        extra = None if extra is None else extra.unflatten(-1, (self.config.kv_heads, -1))
        block_input = ops.BlockInput(mix, skip, extra, self.scale, return_x=return_x)
        x, stream, attended, values = self.attention(x, weights, context, first, block_input)
        attended = _dropped(attended, context.dropout)
        if self.parallel:
            added = _gained(F.linear(attended, weights["output"]), gains[0])
            return self._add_mlp(stream, weights, gains[1], context) + added, x, values
        if gains[0] is None:
            y = ops.add_linear(stream, attended, weights["output"])
        else:
            y = stream + _gained(F.linear(attended, weights["output"]), gains[0])
        return self._add_mlp(y, weights, gains[1], context), x, values

    def _add_mlp(self, x: Tensor, weights: dict[str, Tensor], gain: Tensor | None, context: Context) -> Tensor:
        slope = self.config.activation_slope if self.config.activation == "leaky_relu_squared" else 0.0
        gelu, eight = self.config.activation == "gelu", context.fp8_mlp
        if not gelu and not eight and gain is None and not context.dropout:
            return ops.residual_mlp(x, weights["up"], weights["down"], slope, self.scale)
        normed = ops.rms_norm(x, scale=self.scale)
        if gelu:
            linear = fp8.linear if eight else F.linear
            y = linear(F.gelu(linear(normed, weights["up"])), weights["down"])
        else:
            y = (fp8.mlp if eight else ops.mlp)(normed, weights["up"], weights["down"], slope)
        return x + _dropped(_gained(y, gain), context.dropout)


class Skips:
    """The outputs of the first half of the blocks, added to the inputs of the second half, last to first."""

    def __init__(self, gains: Tensor | None, layers: int) -> None:
        self.gains, self.layers = gains, layers
        self.count = 0 if gains is None else len(gains)
        self._held: list[Tensor] = []

    def take(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """The skip that reaches a block whose input is x, with its gain."""
        if self.gains is None or layer < self.layers - self.count:
            return None
        if layer == self.count:  # of an even number of layers the first half ends here: this input is its own skip
            self._held.append(x)
        return self._held.pop(), self.gains[self.layers - 1 - layer]

    def keeps(self, layer: int) -> bool:
        """Whether a later block reads this block's input."""
        return 0 < layer <= self.count and layer < self.layers - self.count

    def keep(self, layer: int, x: Tensor) -> None:
        if self.keeps(layer):
            self._held.append(x)


class Dense:
    """The input of each block as a learned sum of the embedding and of all outputs before it. (DenseFormer, Pagliardini et al.)"""

    def __init__(self, gains: Tensor | None) -> None:
        self.gains = gains
        self._held: list[Tensor] = []

    def mix(self, x: Tensor) -> Tensor:
        """The next input, from the output of the block before."""
        if self.gains is None:
            return x
        gains = self.gains[len(self._held)].to(x.dtype)
        self._held.append(x)
        return cast(Tensor, sum(gain * held for gain, held in zip(gains, self._held)))


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
        self.fp8: fp8.Parts = "off"
        """The parts that multiply in FP8 in training mode. In eval mode no part does."""
        self.dropout = 0.0
        """The share of channels that training mode drops from the output of attention and MLP. In eval mode none are."""
        self.token_dropout = 0.0
        """The share of input tokens that training mode replaces by the unknown token. In eval mode none are."""
        self.token_embedding = make_table(c.vocab_size, c.width)
        self.bigram = BigramEmbedding(c.bigram_buckets, c.bigram_width, c.width) if c.bigram_buckets else None
        self.smear: SmearGate | InputSmear | None = None
        if c.smear:
            self.smear = InputSmear(c.smear_input) if c.smear_input else SmearGate(c.width)
        self.value_embedding = (
            ValueEmbedding(c.vocab_size, c.value_width, c.kv_width, c.value_layers) if c.value_layers else None
        )
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.layers))
        skips = c.layers // 2 if c.unet_skips else 0
        self.skip_gains = nn.Parameter(torch.ones(skips, c.width)) if skips else None
        self.dense_gains = nn.Parameter(_identity(c.layers)) if c.dense else None
        self.head = None if c.tied else nn.Linear(c.width, c.vocab_size, bias=False)
        self.banks = Banks(matrix_shapes(c))
        self.register_state_dict_post_hook(_write_plain_names)
        self.register_load_state_dict_pre_hook(_read_plain_names)
        # Tables, not arithmetic in the forward pass: Inductor would recompute the cosines for every element of every query.
        self.register_buffer("cos", torch.empty(MAX_POSITIONS, c.rope_dims // 2), persistent=False)
        self.register_buffer("sin", torch.empty(MAX_POSITIONS, c.rope_dims // 2), persistent=False)
        if not self.token_embedding.weight.is_meta:
            self.reset_parameters()
            self.fill_tables()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Orthogonal matrices (Saxe et al.), except those that write to the residual stream: they start at zero, so
        every block starts as the identity. Small embeddings, because the tied head reads them too."""
        with _one_thread():
            for name, matrix in self.banks.matrices().items():
                if name.endswith(("output.weight", "down.weight")):
                    matrix.zero_()
                else:
                    nn.init.orthogonal_(matrix)
        self.token_embedding.weight.normal_(std=self.config.embedding_std)
        if self.bigram is not None:
            # With one of the two at zero their product starts at zero; with both at zero neither would get a gradient.
            self.bigram.embedding.weight.zero_()
            nn.init.orthogonal_(self.bigram.projection)
        if self.value_embedding is not None:
            self.value_embedding.embedding.weight.normal_(std=0.01)
        if self.head is not None:
            self.head.weight.zero_()

    @torch.no_grad()
    def allocate(self, device: torch.device) -> None:
        """Gives a model that was built on "meta" memory of its own. The weights have no values yet. `Module.to_empty` does
        the same, but it copies meta tensors, for which PyTorch imports its symbolic shapes and SymPy: a third of a
        second."""
        for module in self.modules():
            for name, tensor in module.named_parameters(recurse=False):
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                module.register_parameter(name, nn.Parameter(empty, requires_grad=tensor.requires_grad))
            for name, table in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty(table.shape, dtype=table.dtype, device=device))
        self.fill_tables()

    @torch.no_grad()
    def fill_tables(self) -> None:
        """Computes tensors that are not parameters."""
        fill_rope_tables(self.cos, self.sin, self.config.rope_base)

    def plain_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by parameter name -> by plain per-layer name, as in checkpoints and artifacts."""
        return self.banks.split(tensors, "banks.")

    def parameter_names(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `plain_names`."""
        return self.banks.join(tensors, "banks.")

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        reduction: str = "mean",
        lengths: Tensor | None = None,
    ) -> Tensor:
        """ids (B, T). With targets (B, T) the loss in nats (mean, sum, or none: one per token), else the logits.

        `lengths` (from `document_lengths`) says where documents begin, as the BOS tokens in `ids` do. With it, attention to
        isolated documents is faster on a GPU: to count the tokens there, the host would have to wait.
        """
        return self.read_out(self.features(ids, lengths), targets, reduction)

    def read_out(self, x: Tensor, targets: Tensor | None, reduction: str = "mean") -> Tensor:
        """The loss, or the logits, from the normed output of the last block."""
        head = (self.token_embedding if self.head is None else self.head).weight.to(x.dtype)
        if targets is not None and self._takes_fp8("head"):
            return ops.softcap_cross_entropy(fp8.linear(x, head), targets, self.config.softcap, reduction=reduction)
        if targets is not None and self.config.vocab_size < CHUNKED_HEAD_VOCAB:
            return ops.softcap_cross_entropy(F.linear(x, head), targets, self.config.softcap, reduction=reduction)
        if targets is not None:
            return ops.linear_softcap_cross_entropy(x, head, targets, self.config.softcap, reduction=reduction)
        logits = F.linear(x, head).float()
        return self.config.softcap * torch.tanh(logits / self.config.softcap) if self.config.softcap else logits

    def chunks_logits(self) -> bool:
        """Whether losses are computed without all logits in memory. Only the kernel makes them in chunks."""
        return self.config.vocab_size >= CHUNKED_HEAD_VOCAB and use_triton(self.token_embedding.weight)

    def features(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The normed output of the last block, (B, T, width)."""
        c = self.config
        dtype = self._compute_dtype(ids.device)
        if self.training and self.token_dropout:
            ids = _without_some(ids, self.token_dropout, c.bos_id)
        starts = _document_starts(ids, c.bos_id if c.isolate_documents else None)
        x = self.embed(ids, starts, dtype)
        extras = self.value_embedding(ids, dtype) if self.value_embedding is not None else {}
        if ids.shape[1] > MAX_POSITIONS:
            raise ConfigError(
                f"a window of {ids.shape[1]} tokens is longer than the model's {MAX_POSITIONS} positions; cut it"
            )
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        mask = None
        if not c.isolate_documents or not flash.takes_varlen(x, c.head_width):
            lengths = None
        if c.isolate_documents and lengths is None:
            mask = reference.causal_mask(ids.shape[1], ids.device, starts.cumsum(-1))
        context = Context(cos, sin, mask, lengths, fp8_mlp=self._takes_fp8("mlp"), dropout=self.dropout * self.training)
        return ops.rms_norm(self.run_blocks(x, extras, context, self.matrices(x)))

    def run_blocks(self, x: Tensor, extras: dict[int, Tensor], context: Context, matrices: dict[str, Tensor]) -> Tensor:
        """The output of the last block, from the embedding x (B, T, width): the one loop over the layers.

        Windows (`features`), a running text (stream.py), many texts (lanes.py) and documents with factors of their own
        (eval/adaptation) differ in `context.attend` and in `matrices`. `extras` are added to the values, by layer.
        """
        c = self.config
        x, *embedded = ops.fan_out(x, c.layers + 1) if c.residual_mix else (x,) * (c.layers + 1)
        first = None
        skips, dense = Skips(self.skip_gains, c.layers), Dense(self.dense_gains)
        for layer, block in enumerate(self.blocks):
            x = dense.mix(x)
            skip, keeps, weights = skips.take(layer, x), skips.keeps(layer), _of_layer(matrices, layer)
            x, before, values = block(x, skip, embedded[layer], weights, context, extras.get(layer), first, keeps)
            skips.keep(layer, before)
            first = values if first is None and c.value_residual else first
        return x

    def embed(self, ids: Tensor, starts: Tensor, dtype: torch.dtype) -> Tensor:
        """The input of the first block, (B, T, width). `starts` (B, T) marks positions that must not see the position before."""
        x = look_up(self.token_embedding, ids, dtype)
        if self.bigram is not None:
            x = x + self.bigram(ids, starts, dtype)
        x = ops.rms_norm(x)
        if self.config.smear_input:
            starts = starts | (ids == self.config.bos_id)
        return x if self.smear is None else self.smear(x, starts)

    def matrices(self, x: Tensor) -> dict[str, Tensor]:
        """Every matrix in the dtype of x, with output gains folded in where `folds_gains`."""
        gains: dict[str, Tensor] = {}
        if self.config.block_gains and folds_gains(x):
            for layer, block in enumerate(cast(Iterable[Block], self.blocks)):
                names = _matrix_names(layer)
                for matrix, gain in (("output", block.attention_gain), ("down", block.mlp_gain)):
                    assert gain is not None  # block_gains makes both
                    gains[names[matrix]] = gain
        return self.banks.matrices(x.dtype, gains)

    def _takes_fp8(self, part: str) -> bool:
        return self.training and part in self.fp8

    def _compute_dtype(self, device: torch.device) -> torch.dtype:
        if torch.is_autocast_enabled(device.type):
            return torch.get_autocast_dtype(device.type)
        return self.token_embedding.weight.dtype


MATRICES = ("query", "key", "value", "output", "up", "down")


def _identity(size: int) -> Tensor:
    """`torch.eye`, which on "meta" would import PyTorch's compiler: a second and 70 MB."""
    found = torch.zeros(size, size)
    found.diagonal().fill_(1.0)
    return found


def _matrix_names(layer: int) -> dict[str, str]:
    return {m: f"blocks.{layer}.{'mlp' if m in ('up', 'down') else 'attention'}.{m}.weight" for m in MATRICES}


def matrix_shapes(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """Every matrix's (out, in), kind by kind, so that a bank holds a run of queries, then a run of outputs, and so on."""
    shapes = {
        "query": (c.width, c.width),
        "output": (c.width, c.width),
        "key": (c.kv_width, c.width),
        "value": (c.kv_width, c.width),
        "up": (c.hidden, c.width),
        "down": (c.width, c.hidden),
    }
    names = [_matrix_names(layer) for layer in range(c.layers)]
    return {own[kind]: shape for kind, shape in shapes.items() for own in names}


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
    """Uses one thread. For factorising matrices of a few hundred rows that is fastest, since threads of a busy machine
    wait for each other, and the initial weights do not depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def folds_gains(x: Tensor) -> bool:
    """Whether a block's gains are folded into its matrices, g * (W x) = (g * W) x: where the kernels run.

    A gain's gradient is then a sum over a matrix. Otherwise it is a sum over every token of the batch, which reads
    the outputs and their gradient once more.
    """
    return use_triton(x)


def _gained(x: Tensor, gain: Tensor | None) -> Tensor:
    return x if gain is None else gain.to(x.dtype) * x


def _dropped(x: Tensor, share: float) -> Tensor:
    return F.dropout(x, share) if share else x


def _without_some(ids: Tensor, share: float, bos_id: int) -> Tensor:
    """The tokens, a share of them replaced by the unknown token, which no text has. The starts of documents stay."""
    dropped = (torch.rand(ids.shape, device=ids.device) < share) & (ids != bos_id)
    return ids.masked_fill(dropped, UNKNOWN_ID)


def _document_starts(ids: Tensor, bos_id: int | None) -> Tensor:
    """(B, T): true where a position must not see the position before: the first of a window and, if isolated, each BOS."""
    first = (torch.arange(ids.shape[1], device=ids.device) == 0).expand(ids.shape)
    return first if bos_id is None else first | (ids == bos_id)


def document_lengths(ids: np.ndarray, bos_id: int, window: int) -> Tensor:
    """The lengths of the documents in ids (rows, T), as `GPT.forward` takes them. The rows are cut into windows of `window`
    tokens. A document that crosses the edge of a window counts as two."""
    flat = ids.reshape(-1)
    starts = flat == bos_id
    starts[::window] = True
    return torch.tensor(pad_lengths(np.flatnonzero(starts).tolist(), len(flat)), dtype=torch.int32)
