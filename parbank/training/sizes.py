"""Whether a model can fit its cap, said before any work is done."""

import math

import torch

from parbank.artifact.code import code_bytes
from parbank.artifact.load import TOKENIZER
from parbank.artifact.sizes import FEW_BITS, check_fits, expected_bytes, overhead_bytes
from parbank.data.tokenizer import Tokenizer
from parbank.model import GPT
from parbank.training.config import RunConfig
from parbank.training.display import Display
from parbank.training.load import describe_run


def check_size(config: RunConfig, display: Display, tokenizer: Tokenizer | None = None) -> None:
    """Refuses, before any work is done, a model that no tokenizer would let fit; with the tokenizer, one that could not be
    promised to fit."""
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in GPT(config.model).state_dict().items()}
    # a SentencePiece model of n pieces takes at least 10 n bytes (score 4, text 1, tags and lengths 5) and about 18 n; twice
    # that is more than any we have seen
    model = bytes(10 * config.model.vocab_size) if tokenizer is None else tokenizer.to_bytes()
    overhead, cap = overhead_bytes(describe_run(config), {TOKENIZER: model}), config.budget.max_bytes
    code = code_bytes() if config.budget.count_code else 0
    reserve = 26 * config.model.vocab_size + 4096 if tokenizer is None else 0
    check_fits(shapes, config.quant, cap, overhead=overhead, code_bytes=code, reserve=reserve)
    if tokenizer is not None:
        return
    parameters = sum(math.prod(shape) for shape in shapes.values())
    overhead += code + 8 * config.model.vocab_size
    bits = 8 * max(cap - overhead, 0) / parameters
    expected = expected_bytes(shapes, config.quant, overhead=overhead)
    if config.quant.method == "solver" and bits < FEW_BITS:
        display.say(
            f"note: {cap:,} bytes leave {bits:.1f} bits for each of {parameters:,} parameters; a smaller model (model.width, "
            "model.layers) would probably do better at this cap"
        )
    elif expected > cap:
        display.say(
            f"note: at {config.quant.matrix_bits} bits the artifact may come to {expected:,} bytes; where it does, matrices are "
            f"stored more coarsely until it fits {cap:,}"
        )
