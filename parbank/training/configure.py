"""The config of a run: that of a recipe, or of an earlier run, with changes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from parbank.config import override
from parbank.data.sources import absolute_spec
from parbank.training.config import RunConfig
from parbank.training.folder import load_run_config

Recipe = Callable[[], RunConfig]


def configure_run(source: Recipe | Path, *changes: str) -> RunConfig:
    """`source` is a recipe, or the folder or the config.json of an earlier run; each change is a.b=value. Paths in the
    data spec become absolute, so that the run does not depend on the current folder."""
    config = load_run_config(source, *changes) if isinstance(source, Path) else override(source(), *changes)
    return replace(config, data=absolute_spec(config.data))
