"""Adapters: what learns from a text while it is being scored. A new one is a file here and a name in `ADAPTERS`."""

from parbank.eval.adaptation.base import AdaptConfig
from parbank.eval.adaptation.low_rank import LowRankConfig
from parbank.eval.adaptation.sgd import SgdConfig

ADAPTERS: dict[str, type[AdaptConfig]] = {config.name: config for config in (SgdConfig, LowRankConfig)}
