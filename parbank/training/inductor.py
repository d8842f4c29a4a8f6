"""The passes of a training step through torch.compile's Inductor, on a CPU.

PyTorch's operations for CPUs read and write memory once each. Inductor fuses them into loops that a C++ compiler
translates: a step of the demo takes 146 ms of a core instead of 174 (docs/log/cpu.md).
Compiling takes 65 s of core time the first time, and a few seconds when the cache has the code. So it is done by
default only for runs that are long enough. A machine without a working compiler trains as plain PyTorch.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parbank.runtime import Runtime
from parbank.training.compiled import keep_compiled_graphs
from parbank.training.config import RunConfig

LEAST_MINUTES = 2.0
"""In a shorter run, faster steps do not make up for the first compilation (docs/log/cpu.md)."""

LEAST_FLOP = 1e13
"""The least FLOP of the matrix products of a run without a clock: about two minutes of two cores."""

_COMPILERS = ("g++", "clang++", "c++")


def find_compiler() -> str | None:
    """The C++ compiler that CXX names; without CXX, the first of the usual names that is installed."""
    named = os.environ.get("CXX")
    return next((found for name in ([named] if named else _COMPILERS) if (found := shutil.which(name))), None)


def wants_inductor(config: RunConfig, runtime: Runtime, parameters: int) -> bool:
    """Whether a run on this machine compiles its passes: as train.compile says, or where it pays.

    A budget in steps decides by its work alone, so that two equal runs compile both or not at all. Ranks on CPUs are
    for tests, and run as plain PyTorch.
    """
    if runtime.is_cuda or runtime.world > 1 or config.train.compile is False:
        return False
    return config.train.compile is True or _is_long(config, parameters)


def _is_long(config: RunConfig, parameters: int) -> bool:
    """A clock that ends early after a number of steps is long if both its minutes and its steps are."""
    budget = config.budget
    if budget.minutes is not None and (budget.minutes < LEAST_MINUTES or budget.most_steps is None):
        return budget.minutes >= LEAST_MINUTES
    tokens = budget.tokens or (budget.steps or budget.most_steps or 0) * config.batch.batch_tokens
    return 6.0 * parameters * tokens >= LEAST_FLOP


def compile_model(model: nn.Module, threads: int) -> Callable[..., Tensor]:
    """The model as Inductor compiles it for up to `threads` threads. Precision and grad mode must stay as in the first call.

    Dynamo guards the number of threads, and would compile again inside the clock when `training.threads` changes it.
    The guard of global state goes, and generated loops ask for the number at each call.
    """
    keep_compiled_graphs()
    options: dict[str, Any] = {
        "cpp.dynamic_threads": True,
        "cpp.threads": threads,
        "guard_filter_fn": _without_global_state,
    }
    return torch.compile(model, dynamic=False, options=options)


def _without_global_state(guards: Sequence[Any]) -> list[bool]:
    return [guard.guard_type != "GLOBAL_STATE" for guard in guards]
