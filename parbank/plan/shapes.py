"""Parameters and arithmetic of a model, from its config alone: thousands of candidates are counted in a moment."""

from dataclasses import dataclass

from parbank.model.config import ModelConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model."""

    matrices: int
    """The parameters in the banks."""
    tables: int
    """Embeddings of tokens, bigrams and values, and an untied head."""
    others: int
    """Gains, gates and small projections."""

    @property
    def total(self) -> int:
        return self.matrices + self.tables + self.others


def count_parameters(c: ModelConfig) -> ParameterCounts:
    matrices = c.layers * 2 * c.width * (c.width + c.kv_width + c.hidden)
    tables = c.vocab_size * c.width * (1 if c.tied else 2)
    others = c.smear_input + 1 if c.smear_input else c.width * c.smear
    others += c.width * (c.layers * (2 * c.block_gains + 2 * c.residual_mix))
    others += c.width * (c.layers // 2) * c.unet_skips + c.layers**2 * c.dense
    others += c.layers * c.heads * (bool(c.qk_gain) + c.width * c.gated_attention)
    others += 2 * (c.layers - 1) * c.value_residual
    if c.bigram_buckets:
        tables += c.bigram_buckets * c.bigram_width
        others += c.width * c.bigram_width + 1
    if c.value_layers:
        tables += c.vocab_size * c.value_width
        others += c.kv_width * c.value_width + 1 + len(c.value_layers)
    return ParameterCounts(matrices, tables, others)


def count_products(c: ModelConfig) -> int:
    """Multiplications of one token in one forward pass, attention's own left out."""
    narrow = c.width * c.bigram_width * bool(c.bigram_buckets) + c.kv_width * c.value_width * bool(c.value_layers)
    return count_parameters(c).matrices + c.vocab_size * c.width + narrow


def orthogonalisation_flops(c: ModelConfig, iterations: int = 5) -> float:
    """FLOP of Newton-Schulz over all matrices, once a step: three products an iteration, on the shorter side."""
    shapes = [(c.width, c.width)] * 2 + [(c.kv_width, c.width)] * 2 + [(c.width, c.hidden)] * 2
    flops = 0.0
    for sides in shapes:
        short, long = min(sides), max(sides)
        flops += 2.0 * short * short * (2 * long + short)
    return c.layers * iterations * flops
