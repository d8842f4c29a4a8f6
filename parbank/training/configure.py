"""The config of a run: that of a recipe, or of an earlier run, with changes."""

from collections.abc import Callable, Sequence
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
    data spec become absolute, so that the run does not depend on the current folder."""
    config = load_run_config(source, *changes) if isinstance(source, Path) else _change(source(), changes)
    return replace(config, data=absolute_spec(config.data))


def _change(recipe: RunConfig, changes: Sequence[str]) -> RunConfig:
    """Two settings of a recipe go with others. Its stages go with its batch: a batch that is given is that of the whole run. Its
    tokenizer goes with text: tokens say by themselves which one they have."""
    names = {change.partition("=")[0].strip() for change in changes}
    if names & {"batch.sequence_length", "batch.batch_tokens"} and "batch.stages" not in names:
        recipe = replace(recipe, batch=replace(recipe.batch, stages=()))
    config = override(recipe, *changes)
    given = any(name.startswith("tokenizer.") for name in names)
    if config.tokenizer.case_operators and not given and find_source(config.data).tokens:
        config = replace(config, tokenizer=TokenizerConfig())
    return config
