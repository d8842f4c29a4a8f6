"""Checks before any work whether a run's model can fit its cap."""

from parbank.artifact.model import check_model
from parbank.data.tokenizer import Tokenizer
from parbank.training.config import RunConfig
from parbank.training.display import Display
from parbank.training.load import describe_run


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
