"""Checks of a run before any work: of its settings, of the memory it takes, and whether its model can fit its cap."""

import torch

from parbank.artifact.model import check_model
from parbank.config import require
from parbank.data.tokenizer import Tokenizer
from parbank.display import Display
from parbank.model import GPT
from parbank.model.gpt import MAX_POSITIONS
from parbank.ops.fp8 import check_device
from parbank.runtime import Runtime, check_seed
from parbank.training.config import RunConfig
from parbank.training.inductor import find_compiler
from parbank.training.load import describe_run
from parbank.training.loggers import check_loggers
from parbank.training.memory import COMPILED, activation_bytes, free_memory

SURE = 0.8
"""A run is refused if this share of its estimated memory exceeds the free memory. The estimate is within a tenth for three
measured models (parbank.training.memory)."""

WEIGHT_BYTES = 12
"""Bytes that a parameter takes in training, at least: float32 value, gradient and momentum. Averages and Adam's second moments
come on top."""


def check_settings(config: RunConfig, runtime: Runtime) -> None:
    """Refuses settings that this machine or the model cannot run."""
    check_seed(config.seed)
    check_loggers(config.train.loggers)
    if config.train.fp8 != "off":
        check_device(config.train.fp8, runtime.device)
    require(
        config.batch.sequence_length <= MAX_POSITIONS,
        f"batch.sequence_length is {config.batch.sequence_length}; a model has {MAX_POSITIONS} positions at most",
    )


def check_memory(config: RunConfig, runtime: Runtime, display: Display) -> None:
    """Refuses passes that surely do not fit the memory of a machine without a GPU, and warns of those that may not. On a GPU
    the allocator says so itself."""
    if runtime.is_cuda:
        return
    model, batch, free = config.model, config.batch, free_memory(runtime)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in GPT(model).parameters())
    require(
        WEIGHT_BYTES * parameters <= free,
        f"training {parameters:,} parameters takes at least {WEIGHT_BYTES * parameters / 1e9:.3g} GB of memory, and "
        f"{free / 1e9:.3g} GB are free: give a smaller model (model.layers, model.width, model.vocab_size, tables)",
    )
    each = activation_bytes(
        float(model.layers), float(model.width), float(model.hidden), float(model.vocab_size), cuda=False
    )
    sequences = batch.micro_sequences(runtime.world)
    tokens = sequences * batch.sequence_length
    if tokens * each <= free:
        return
    may_compile = config.train.compile is not False and runtime.world == 1 and find_compiler() is not None
    most = int(SURE * free / (each * batch.sequence_length))  # sequences that fit
    fitting = next((n for n in range(min(most, sequences), 0, -1) if sequences % n == 0), 0)
    remedy = (
        f"give --set batch.micro_batch_tokens={fitting * batch.sequence_length}, which trains the same batches in more passes"
        if fitting
        else "give a smaller model or a smaller --set batch.sequence_length"
    )
    needed = f"a pass of {tokens:,} tokens takes about {tokens * each / 1e9:.3g} GB of memory on a CPU"
    certain = SURE * tokens * each * (COMPILED if may_compile else 1.0)
    require(certain <= free, f"{needed}, and {free / 1e9:.3g} GB are free: {remedy}, or use a GPU")
    display.say(f"warning: {needed}, and {free / 1e9:.3g} GB are free. If the system ends the run, {remedy}")


def check_size(config: RunConfig, display: Display, tokenizer: Tokenizer | None = None) -> None:
    """Refuses a model that cannot fit with any tokenizer; given the tokenizer, a model that is not guaranteed to fit."""
    check_model(
        describe_run(config),
        config.quant,
        config.budget.max_bytes,
        tokenizer=None if tokenizer is None else tokenizer.model_bytes,
        count_code=config.budget.count_code,
        say=display.say,
    )
