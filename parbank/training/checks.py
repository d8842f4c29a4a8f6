"""Checks of a run before any work: of its settings, and whether its model can fit its cap."""

from parbank.artifact.model import check_model
from parbank.config import require
from parbank.data.tokenizer import Tokenizer
from parbank.model.gpt import MAX_POSITIONS
from parbank.ops.fp8 import check_device
from parbank.runtime import Runtime, check_seed
from parbank.training.config import RunConfig
from parbank.training.display import Display
from parbank.training.load import describe_run
from parbank.training.loggers import check_loggers


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
