"""The artifact of a parbank model with its config and tokenizer: whether it will fit, and packing it."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from parbank.artifact.about import TOKENIZER, About
from parbank.artifact.code import code_bytes
from parbank.artifact.pack import Packed, pack_weights
from parbank.artifact.sizes import FEW_BITS, check_fits, expected_bytes, overhead_bytes
from parbank.data.progress import Say, say_nothing
from parbank.data.tokenizer import LEAST_BYTES, MOST_BYTES, USUAL_BYTES
from parbank.model import GPT
from parbank.quant.calibration import Calibration
from parbank.quant.config import QuantConfig


def check_model(
    about: About,
    config: QuantConfig,
    max_bytes: int,
    *,
    tokenizer: bytes | None = None,
    count_code: bool = False,
    say: Say = say_nothing,
) -> None:
    """Refuses, before any work, a parbank model that cannot fit with any tokenizer; given the tokenizer, a model that is
    not guaranteed to fit. Without the tokenizer, it also reports a model that will be stored coarsely."""
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in GPT(about.model).state_dict().items()}
    vocabulary = about.model.vocab_size
    pieces = bytes(LEAST_BYTES * vocabulary) if tokenizer is None else tokenizer
    overhead = overhead_bytes(about.to_meta(), {TOKENIZER: pieces})
    code = code_bytes() if count_code else 0
    reserve = (MOST_BYTES - LEAST_BYTES) * vocabulary + 4096 if tokenizer is None else 0
    check_fits(shapes, config, max_bytes, overhead=overhead, code_bytes=code, reserve=reserve)
    if tokenizer is not None:
        return
    parameters = sum(math.prod(shape) for shape in shapes.values())
    overhead += code + (USUAL_BYTES - LEAST_BYTES) * vocabulary
    bits = 8 * max(max_bytes - overhead, 0) / parameters
    expected = expected_bytes(shapes, config, overhead=overhead)
    if config.method == "solver" and bits < FEW_BITS:
        say(
            f"note: {max_bytes:,} bytes leave {bits:.1f} bits for each of {parameters:,} parameters; a smaller model "
            "(model.width, model.layers) would probably do better at this cap"
        )
    elif expected > max_bytes:
        say(
            f"note: at {config.matrix_bits} bits the artifact may come to {expected:,} bytes; where it does, matrices are "
            f"stored more coarsely until it fits {max_bytes:,}"
        )


def pack_model(
    state: Mapping[str, torch.Tensor],
    about: About,
    tokenizer: bytes,
    config: QuantConfig,
    calibration: Calibration | None = None,
    *,
    max_bytes: int,
    count_code: bool = False,
    out: Path | None = None,
    say: Say = say_nothing,
) -> Packed:
    """The artifact of a parbank model with its tokenizer, which `load_artifact` makes a model again; written to `out`."""
    packed = pack_weights(
        state,
        config,
        calibration,
        max_bytes=max_bytes,
        meta=about.to_meta(),
        extra_sections={TOKENIZER: tokenizer},
        code_bytes=code_bytes() if count_code else 0,
        say=say,
    )
    if out is not None:
        packed.write(out)
    return packed
