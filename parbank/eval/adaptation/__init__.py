"""Adapters: what learns from a text while it is being scored. See methods/ttt.py for what they are given, and when."""

from typing import Any

from parbank.eval.adaptation.base import AdaptConfig, Adapter, plan_steps, restored
from parbank.eval.adaptation.low_rank import LowRankAdapter
from parbank.eval.adaptation.sgd import SgdAdapter
from parbank.model import GPT
from parbank.runtime import Runtime

__all__ = ["AdaptConfig", "Adapter", "LowRankAdapter", "SgdAdapter", "make_adapter", "plan_steps", "restored"]


def make_adapter(model: GPT, runtime: Runtime, config: AdaptConfig, *, context: int, compiled: bool) -> Any:
    kind = SgdAdapter if config.adapter == "sgd" else LowRankAdapter
    return kind(model, runtime, config, context=context, compiled=compiled, graph=compiled)
