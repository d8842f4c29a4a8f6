"""What a model will weigh, from its shapes alone: the bound that is promised, and the size to expect.

The bound is proven, not measured: every stream is stored at fixed width where its coder would be larger, so a model whose
bound is under the cap packs under it whatever its weights turn out to be.
"""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from parbank.artifact import encode_artifact
from parbank.errors import ConfigError
from parbank.quant.config import QuantConfig
from parbank.quant.contents import HALVES, INTEGERS, SCALES, TABLE, Shape, Spec, table_bytes
from parbank.quant.entropy import require_coder
from parbank.quant.pack import plan
from parbank.quant.streams import fixed_bytes

# One entry of the container's section table beside its name: field names, punctuation and checksum 76, and two numbers
# of at most 12 digits.
_ENTRY_BYTES = 100
# The coders over the entropy of Gaussian integers: lzma 2.3% at 6 bits, 3.1% at 5, 1.6% at 4; ans hits it.
_MARGINS = {"ans": 1.0, "lzma": 1.025}


def overhead_bytes(meta: Mapping[str, Any], extra_sections: Mapping[str, bytes]) -> int:
    """The artifact without its weights: container, meta and extra sections such as the tokenizer."""
    return len(encode_artifact(meta, extra_sections))


def worst_case_bytes(shapes: Mapping[str, Shape], config: QuantConfig, *, overhead: int) -> int:
    """No weights of these shapes pack to more than this at the coarsest setting."""
    specs = plan(shapes, config, config.min_matrix_q)
    sections = {TABLE: 1 + len(table_bytes(specs))}
    sections[INTEGERS] = fixed_bytes([(spec.count, spec.q) for spec in specs if spec.q])
    sections.update(_float_sections(specs))
    return overhead + sum(size + _ENTRY_BYTES + len(name) for name, size in sections.items())


def expected_bytes(shapes: Mapping[str, Shape], config: QuantConfig, *, overhead: int) -> int:
    """The size to expect at the configured bits, for display: as if every row were Gaussian.

    A row of n Gaussian weights has its largest near m with P(|x| < m)^n = 1/2, so its step is m/q standard deviations
    and its entropy log2(sqrt(2 pi e) q / m) bits a weight. Trained rows have heavier tails and come out smaller.
    """
    specs = plan(shapes, config, config.matrix_q)
    bits = sum(spec.count * _gaussian_bits(spec) for spec in specs if spec.q)
    total = math.ceil(bits * _MARGINS[config.coder] / 8) + sum(_float_sections(specs).values())
    return overhead + total + 4 * _ENTRY_BYTES


def check_fits(
    shapes: Mapping[str, Shape], config: QuantConfig, max_bytes: int, *, overhead: int, code_bytes: int = 0
) -> None:
    """Refuses, before training, a model that might not fit the cap afterwards, or could not be packed at all."""
    require_coder()
    worst = worst_case_bytes(shapes, config, overhead=overhead) + code_bytes
    if worst <= max_bytes:
        return
    parameters = sum(math.prod(shape) for shape in shapes.values())
    fixed = overhead + code_bytes
    room = max(max_bytes - fixed, 0)
    fit = int(parameters * room / (worst - fixed))
    coarser = (
        f", lower quant.min_matrix_bits (now {config.min_matrix_bits}, at least 2)"
        if config.min_matrix_bits > 2
        else ""
    )
    raise ConfigError(
        f"a model of {parameters:,} parameters cannot be promised to fit {max_bytes:,} bytes: it may need {worst:,} "
        f"with matrices at {config.min_matrix_bits} bits and embeddings at {config.embedding_bits}, "
        f"{fixed:,} of them for what is not weights. About {fit:,} parameters would fit: use fewer layers or a smaller "
        f"width or vocabulary, raise --max-bytes{coarser}"
    )


def _float_sections(specs: list[Spec]) -> dict[str, int]:
    scales = sum(spec.scales for spec in specs)
    halves = sum(spec.halves for spec in specs)
    return {SCALES: 1 + 2 * scales, HALVES: 1 + 2 * halves}


def _gaussian_bits(spec: Spec) -> float:
    largest = NormalDist().inv_cdf((1 + 0.5 ** (1 / spec.shape[1])) / 2)
    entropy = math.log2(math.sqrt(2 * math.pi * math.e) * spec.q / largest)
    # The formula is for fine steps; with few levels it may leave the range that 2q+1 levels can have.
    return min(max(entropy, 0.5), math.log2(2 * spec.q + 1))
