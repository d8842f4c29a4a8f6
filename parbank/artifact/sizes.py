"""The size of a packed model, from its shapes alone: a proven bound, and an estimate.

A model whose bound is under the cap packs under it, whatever its weights. For `rows`: every stream is stored at fixed
width if its coder's output would be larger. For the solver: at its coarsest every row is dropped, and a file of zeros
has a fixed size.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from parbank.artifact.container import encode_artifact
from parbank.artifact.contents import HALVES, INTEGERS, SCALES, TABLE, Spec, table_bytes
from parbank.artifact.pack import plan
from parbank.artifact.streams import encode_bytes
from parbank.errors import ConfigError
from parbank.quant.coders import CODERS
from parbank.quant.coders.base import FREE_WEIGHTS, MAX_WEIGHTS_PER_BYTE
from parbank.quant.config import QuantConfig
from parbank.quant.integers import Quantised
from parbank.quant.roles import Shape
from parbank.quant.streams import encode_quantised, fixed_bytes

# One entry of the container's section table beside its name: field names, punctuation and checksum 76, and two numbers
# of at most 12 digits.
_ENTRY_BYTES = 100
# The solver meets caps of fewer bits a weight than this, but the loss then grows fast: 0.03 bits per byte at 2.4 bits, 0.4
# at 1.2 (docs/log/packing.md). Fewer weights with more bits each are better.
FEW_BITS = 2
HUGE = 1 << 28  # weights; zeros for fewer are packed within seconds


def overhead_bytes(meta: Mapping[str, Any], extra_sections: Mapping[str, bytes]) -> int:
    """The size of the artifact without its weights: container, meta and extra sections such as the tokenizer."""
    return len(encode_artifact(meta, extra_sections))


def worst_case_bytes(shapes: Mapping[str, Shape], config: QuantConfig, *, overhead: int) -> int:
    """No weights of these shapes pack to more than this at the coarsest setting of `quant.method`."""
    if config.method == "solver":
        sections = _zeros_bytes(_coarsest(shapes, config), config.coder)
    else:
        sections = _most_bytes(_coarsest(shapes, config))
    return overhead + _total(sections)


def expected_bytes(shapes: Mapping[str, Shape], config: QuantConfig, *, overhead: int) -> int:
    """The size to expect at the configured bits, for display: as if every row were Gaussian.

    A row of n Gaussian weights has its largest near m with P(|x| < m)^n = 1/2, so its step is m/q standard deviations
    and its entropy log2(sqrt(2 pi e) q / m) bits a weight. Trained rows have heavier tails and come out smaller.
    """
    specs = plan(shapes, config)
    bits = sum(spec.count * _gaussian_bits(spec) for spec in specs if spec.q)
    total = math.ceil(bits * CODERS[config.coder].margin / 8) + 2 * sum(spec.scales + spec.halves for spec in specs)
    return overhead + total + 4 * _ENTRY_BYTES


def check_fits(
    shapes: Mapping[str, Shape],
    config: QuantConfig,
    max_bytes: int,
    *,
    overhead: int,
    code_bytes: int = 0,
    reserve: int = 0,
) -> None:
    """Refuses, before training, a model that might not fit the cap afterwards, or could not be packed at all.

    `reserve` is how much the overhead may still grow: it refuses nothing, but the cap that the error suggests
    includes it.
    """
    encode_quantised([])  # needs the entropy coder's package: without it a run would fail after its training
    fixed = overhead + code_bytes
    # A model that fits at fixed width also fits as zeros; this saves writing millions of them.
    if fixed + _total(_most_bytes(_coarsest(shapes, config))) <= max_bytes:
        return
    # Zeros for a huge model would take minutes, and more memory than there is: a lower bound refuses it at once.
    specs = _coarsest(shapes, config)
    least = fixed + _least_bytes(specs)
    huge = config.method == "solver" and sum(spec.count for spec in specs) > HUGE
    worst = least if huge and least > max_bytes else worst_case_bytes(shapes, config, overhead=fixed)
    if worst <= max_bytes:
        return
    parameters = sum(math.prod(shape) for shape in shapes.values())
    room = max(max_bytes - fixed, 0)
    fit, raised = int(parameters * room / (worst - fixed)), f"raise --max-bytes (at least {worst + reserve:,})"
    if config.method == "solver":
        need = f"{worst:,} even with every matrix at zero"
        advice = f"{raised}, or use fewer layers or a smaller width or vocabulary"
        advice += f": about {int(8 * room / FEW_BITS):,} parameters would have {FEW_BITS} bits each" if room else ""
    else:
        need = f"{worst:,} with matrices at {config.min_matrix_bits} bits and embeddings at {config.embedding_bits}"
        advice = f"about {fit:,} parameters would fit: use fewer layers or a smaller width or vocabulary, {raised}"
        if config.min_matrix_bits > 2:
            advice += f", lower quant.min_matrix_bits (now {config.min_matrix_bits}, at least 2)"
        advice += ", or set quant.method=solver, which goes lower"
    raise ConfigError(
        f"a model of {parameters:,} parameters cannot be promised to fit {max_bytes:,} bytes: it may need {need}, "
        f"{fixed:,} of them besides the weights; {advice}"
    )


def _coarsest(shapes: Mapping[str, Shape], config: QuantConfig) -> tuple[Spec, ...]:
    """The tensors at the coarsest setting: for the solver, integers that may all be zero."""
    if config.method == "solver":
        return tuple(replace(spec, q=min(spec.q, 1)) for spec in plan(shapes, config, 1))
    return tuple(plan(shapes, config, config.min_matrix_q))


def _total(sections: Mapping[str, int]) -> int:
    """Bytes of sections with their entries in the header."""
    return sum(size + _ENTRY_BYTES + len(name) for name, size in sections.items())


def _most_bytes(specs: Sequence[Spec]) -> dict[str, int]:
    """The largest size of each section, for any content."""
    return {
        TABLE: 1 + len(table_bytes(specs)),
        INTEGERS: fixed_bytes([(spec.count, spec.q) for spec in specs if spec.q]),
        SCALES: 1 + 2 * sum(spec.scales for spec in specs),
        HALVES: 1 + 2 * sum(spec.halves for spec in specs),
    }


def _least_bytes(specs: Sequence[Spec]) -> int:
    """No content takes less: a reader would refuse it (`parbank.artifact.contents`)."""
    count = sum(spec.count for spec in specs if spec.q)
    return count // MAX_WEIGHTS_PER_BYTE if count > FREE_WEIGHTS else 0


@functools.lru_cache(maxsize=8)
def _zeros_bytes(specs: tuple[Spec, ...], coder: str) -> dict[str, int]:
    """The same if all integers are zero: written by the writer itself, so exact except for the float16 numbers. Takes a
    second or two for a golf model, hence the cache."""
    shapes = [spec.shape for spec in specs if spec.q]
    zeros = [Quantised(np.zeros(shape, np.int8), np.zeros((shape[0], 1), np.float16), 1) for shape in shapes]
    integers, scales = encode_quantised(zeros, coder)
    return _most_bytes(specs) | {
        TABLE: len(encode_bytes(table_bytes(specs))),
        INTEGERS: len(integers),
        SCALES: len(scales),
    }


def _gaussian_bits(spec: Spec) -> float:
    largest = NormalDist().inv_cdf((1 + 0.5 ** (1 / spec.shape[1])) / 2)
    entropy = math.log2(math.sqrt(2 * math.pi * math.e) * spec.q / largest)
    # The formula is for fine steps; with few levels it may leave the range that 2q+1 levels can have.
    return min(max(entropy, 0.5), math.log2(2 * spec.q + 1))
