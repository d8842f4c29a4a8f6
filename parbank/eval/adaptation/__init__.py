"""Adapters, which learn from a text while it is scored. A new adapter is a file here and a name in `ADAPTERS`."""

from parbank.eval.adaptation.base import AdaptConfig
from parbank.eval.adaptation.low_rank import LowRankConfig
from parbank.eval.adaptation.sgd import SgdConfig

ADAPTERS: dict[str, type[AdaptConfig]] = {config.name: config for config in (SgdConfig, LowRankConfig)}
