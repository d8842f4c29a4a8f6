"""The shape of a model. Every element of the recipe of parameter-golf #549 is a field and can be switched off."""

import math
from dataclasses import dataclass
from typing import Literal

from parbank.config import require

Activation = Literal["leaky_relu_squared", "relu_squared", "gelu"]


# Far more than any model has. A damaged config must not build layers for ever, or tensors whose bytes overflow 64 bits:
# 2 * 10^3 layers of 2^22 x 2^22 float32 weights are less than 2^57 bytes. A thousand layers are built at once.
MAX_LAYERS, MAX_CHANNELS, MAX_BUCKETS = 1_000, 1 << 22, 1 << 31
MAX_ROPE_DIMS = 256  # attention on GPUs takes no wider heads; the tables of all positions are then 32 MB
MAX_VOCAB = 1 << 16  # shards hold 16 bits a token
MAX_NUMBER = 1e30  # of settings that a kernel takes as float32, which ends at 3e38


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A GPT over parameter banks. The defaults are a plain transformer; recipes switch the rest on."""

    vocab_size: int = 1024
    """Tokens in the vocabulary; the tokenizer is trained to this size."""
    bos_id: int = 1
    """The token that opens every document."""
    layers: int = 11
    """Transformer blocks."""
    width: int = 512
    """Channels of the residual stream."""
    heads: int = 8
    """Query heads."""
    kv_heads: int = 4
    """Key and value heads; each serves heads / kv_heads query heads."""
    mlp_multiple: float = 3.0
    """Hidden width of the MLP, as a multiple of the model's width."""
    activation: Activation = "leaky_relu_squared"
    """The MLP's nonlinearity."""
    activation_slope: float = 0.5
    """Slope of leaky_relu_squared below zero, before squaring."""
    qk_gain: float = 0.0
    """Starting value of a learned gain per query head after the QK norm; 0 leaves the gain out."""
    rope_dims: int = 64
    """Channels of each head that rotate with position; the others carry no position. 0 turns RoPE off."""
    rope_base: float = 10_000.0
    """Base of RoPE's frequencies."""
    norm_scale: bool = False
    """Scale each block's norms by 1/sqrt(layer + 1), so that deep blocks write smaller updates."""
    unet_skips: bool = False
    """The first half's outputs are added, by learned gains, to the inputs of the second half, last to first."""
    residual_mix: bool = False
    """Each block starts from a learned mix of the residual stream and the embedding."""
    block_gains: bool = False
    """A learned gain per channel on the outputs of attention and MLP."""
    smear: bool = False
    """A learned gate per channel that mixes in the previous position's embedding."""
    smear_input: int = 0
    """The gate is computed from this many channels of each position, and the first token of a document receives nothing; 0
    learns one gate for all positions. Needs `smear`."""
    bigram_buckets: int = 0
    """Rows of the hashed bigram embedding; 0 leaves it out."""
    bigram_width: int = 128
    """Channels of the bigram embedding before it is projected to the model's width."""
    value_layers: tuple[int, ...] = ()
    """Layers whose values get a separate token embedding added."""
    value_width: int = 128
    """Channels of the value embedding before it is projected to the values' width."""
    xsa_layers: int = 0
    """Exclusive self-attention on the last n layers: removes an output's component along its own value. -1: all layers."""
    gated_attention: bool = False
    """A gate per head, from the block's input, on the attention output."""
    value_residual: bool = False
    """Each layer's values are a learned mix with the first layer's."""
    dense: bool = False
    """Each block reads a learned sum of the embedding and of all earlier blocks' outputs (DenseFormer)."""
    parallel_layers: int = 0
    """In the last n layers the MLP reads the attention's input, not its output."""
    softcap: float = 0.0
    """Logits become softcap * tanh(logits / softcap); 0 leaves them alone."""
    tied: bool = True
    """The output head is the token embedding."""
    embedding_std: float = 0.005
    """Standard deviation of the token embedding at the start; small, because a tied head reads it too."""
    isolate_documents: bool = False
    """Nothing (attention, smear, bigram) looks across a document boundary."""
    window: int = 1024
    """Tokens that attention sees in the layers of `window_layers`, its own included."""
    window_layers: tuple[int, ...] = ()
    """Layers whose attention sees the last `window` tokens only."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "width", "heads", "kv_heads"):
            require(getattr(self, name) >= 1, f"model.{name} must be at least 1, got {getattr(self, name)}")
        require(self.layers <= MAX_LAYERS, f"model.layers must be at most {MAX_LAYERS}, got {self.layers}")
        require(self.vocab_size <= MAX_VOCAB, f"model.vocab_size must be at most {MAX_VOCAB}, got {self.vocab_size}")
        for name in ("width", "bigram_width", "value_width"):
            value = getattr(self, name)
            require(value <= MAX_CHANNELS, f"model.{name} must be at most {MAX_CHANNELS}, got {value}")
        require(
            self.width % self.heads == 0,
            f"model.width ({self.width}) must be a multiple of model.heads ({self.heads}): each head gets an equal share",
        )
        require(
            self.heads % self.kv_heads == 0,
            f"model.heads ({self.heads}) must be a multiple of model.kv_heads ({self.kv_heads})",
        )
        require(math.isfinite(self.mlp_multiple), f"model.mlp_multiple must be finite, got {self.mlp_multiple}")
        for name in ("activation_slope", "qk_gain"):
            value = getattr(self, name)
            require(abs(value) <= MAX_NUMBER, f"model.{name} must lie within +-{MAX_NUMBER:g}, got {value}")
        for name in ("rope_base", "embedding_std", "softcap"):
            value = getattr(self, name)
            require(0 <= value <= MAX_NUMBER, f"model.{name} must lie in 0..{MAX_NUMBER:g}, got {value}")
        require(self.rope_base > 0, f"model.rope_base must be positive, got {self.rope_base}")
        require(self.hidden >= 1, f"model.mlp_multiple must give at least one hidden channel, got {self.mlp_multiple}")
        require(
            self.hidden <= MAX_CHANNELS,
            f"model.mlp_multiple must give at most {MAX_CHANNELS} hidden channels, got {self.mlp_multiple}",
        )
        require(
            0 <= self.rope_dims <= self.head_width and self.rope_dims % 2 == 0,
            f"model.rope_dims must be an even number from 0 to the head's width ({self.head_width}), got {self.rope_dims}",
        )
        require(
            self.rope_dims <= MAX_ROPE_DIMS, f"model.rope_dims must be at most {MAX_ROPE_DIMS}, got {self.rope_dims}"
        )
        for name in ("value_layers", "window_layers"):
            chosen = getattr(self, name)
            require(
                all(0 <= layer < self.layers for layer in chosen),
                f"model.{name} must lie in 0..{self.layers - 1}, got {list(chosen)}",
            )
        require(self.window >= 1, f"model.window must be at least 1, got {self.window}")
        require(
            -1 <= self.xsa_layers <= self.layers,
            f"model.xsa_layers must lie in 0..{self.layers}, or be -1 for all layers, got {self.xsa_layers}",
        )
        require(
            0 <= self.parallel_layers <= self.layers,
            f"model.parallel_layers must lie in 0..{self.layers}, got {self.parallel_layers}",
        )
        require(
            0 <= self.smear_input <= self.width and (self.smear or not self.smear_input),
            f"model.smear_input must lie in 0..{self.width} and needs model.smear=true, got {self.smear_input}",
        )
        require(
            self.bigram_buckets == 0 or 2 <= self.bigram_buckets <= MAX_BUCKETS,
            f"model.bigram_buckets must be 0 (off) or 2 to {MAX_BUCKETS}, got {self.bigram_buckets}",
        )
        require(
            0 <= self.bos_id < self.vocab_size, f"model.bos_id must lie in 0..{self.vocab_size - 1}, got {self.bos_id}"
        )

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width

    @property
    def hidden(self) -> int:
        return round(self.width * self.mlp_multiple)

    def window_of(self, layer: int) -> int:
        """The window of a layer's attention; 0 is no limit."""
        return self.window if layer in self.window_layers else 0

    def uses_xsa(self, layer: int) -> bool:
        return self.xsa_layers == -1 or layer >= self.layers - self.xsa_layers
