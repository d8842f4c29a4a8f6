"""The config of a run: that of a recipe, or of an earlier run, with changes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from parbank.config import override
from parbank.data.sources import absolute_spec, find_source
from parbank.data.tokenizer import TokenizerConfig
from parbank.training.config import RunConfig
from parbank.training.folder import load_run_config

Recipe = Callable[[], RunConfig]


def configure_run(source: Recipe | Path, *changes: str) -> RunConfig:
    """`source` is a recipe, or the folder or the config.json of an earlier run; each change is a.b=value. Paths in the
    data spec become absolute, so that the run does not depend on the current folder. Text that is tokens already says by
    itself which tokenizer it has, so a recipe's does not count there."""
    config = load_run_config(source, *changes) if isinstance(source, Path) else override(source(), *changes)
    given = any(change.strip().startswith("tokenizer.") for change in changes)
    if (
        config.tokenizer.case_operators
        and not given
        and not isinstance(source, Path)
        and find_source(config.data).tokens
    ):
        config = replace(config, tokenizer=TokenizerConfig())
    return replace(config, data=absolute_spec(config.data))
