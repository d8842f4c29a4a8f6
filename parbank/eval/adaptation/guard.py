"""Checks that an adapter changes weights and nothing else: code that runs in a pass would see the text before it is scored.

An adapter is Python code of the same process, which can also read the text from memory, from a caller's frame or from its
file. No check can rule that out: the guard notices what an adapter leaves behind, not what it looks up (docs/design/promises.md).
"""

import builtins
import math
import sys
from collections.abc import Iterator, Mapping
from operator import is_
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.nn.modules.module as torch_module
from torch import nn

from parbank.errors import ParbankError

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
WEIGHT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
ROOMS = ("parbank.model", "parbank.ops", "parbank.eval")
"""Our packages whose functions run while a text is scored."""


class CodeGuard:
    """Records the code that runs in a pass over a model, and refuses a model where it has changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._before = model, _find_code(model)
        self._spaces = [(name, space, [*space.values()], _find_functions(space)) for name, space in _find_spaces(model)]
        functions = ((f"{name}.{key}", value) for name, _, _, own in self._spaces for key, value in own.items())
        self._codes = [(name, value, value.__code__) for name, value in functions if isinstance(value, FunctionType)]

    def check(self) -> None:
        now = _find_code(self._model)
        for name in sorted(now.keys() | self._before.keys()):
            if now.get(name) != self._before.get(name):
                _refuse(name)
        # By identity: an object may claim to equal any other.
        for name, space, values, before in self._spaces:
            if len(space) == len(values) and all(map(is_, space.values(), values)):
                continue  # the usual case, found quickly
            after = _find_functions(space)
            for key in sorted(after.keys() | before.keys()):
                if after.get(key) is not before.get(key):
                    _refuse(f"{name}.{key}")
        for name, function, code in self._codes:
            if function.__code__ is not code:
                _refuse(name)


def _refuse(name: str) -> None:
    raise ParbankError(
        f"the adapter has changed {name}: it left a hook there, or put something else in its place, and could see "
        "the text before it is scored; an adapter may change the values of weights, in place, and nothing else"
    )


def _find_code(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """For the name of each module, parameter and buffer: the object, its class, its hooks and attributes. Also code that
    Python or PyTorch calls from everywhere."""
    found: dict[str, tuple[Any, ...]] = {
        "every module's hooks": tuple(tuple(getattr(torch_module, f"_global{kind}", ())) for kind in HOOKS),
        "PyTorch's modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        # Its functions are looked up elsewhere: an attribute would come before them.
        "torch._VF": tuple((key, id(value)) for key, value in vars(torch._VF).items()),
        "Python's tracing": (id(sys.gettrace()), id(sys.getprofile()), *_find_monitors()),
    }
    for name, module in model.named_modules():
        hooks = (tuple(getattr(module, kind)) for kind in HOOKS)
        own = ((key, id(value), type(value)) for key, value in vars(module).items() if key != "training")
        found[name or "the model"] = (id(module), type(module), *hooks, *own)
    for name, parameter in model.named_parameters():
        hooks = (tuple(getattr(parameter, kind) or ()) for kind in WEIGHT_HOOKS)
        found[name] = (id(parameter), type(parameter), *hooks)
    for name, table in model.named_buffers():
        found[name] = (id(table), type(table))
    return found


def _find_monitors() -> tuple[Any, ...]:
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    return tuple(monitoring.get_tool(number) for number in range(6)) if monitoring else ()


def _find_spaces(model: nn.Module) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Classes and Python modules whose functions run in a pass."""
    ours = {name: module for name, module in list(sys.modules.items()) if name.startswith(ROOMS) and module is not None}
    classes = {cls for part in model.modules() for cls in type(part).__mro__} | set(nn.Parameter.__mro__) - {object}
    classes |= {cls for module in ours.values() for cls in vars(module).values() if isinstance(cls, type)}
    for cls in classes:
        if cls.__module__.startswith(("torch", *ROOMS)):
            yield f"{cls.__module__}.{cls.__qualname__}", vars(cls)
    for foreign in (F, torch, torch._C._nn, np, math, builtins):
        yield foreign.__name__, vars(foreign)
    for name, module in ours.items():
        yield name, vars(module)


def _find_functions(space: Mapping[str, Any]) -> dict[str, Any]:
    """Functions, classes and properties. Without functions of Python in `torch`, which PyTorch itself replaces when it
    imports its compiler."""
    own = space is vars(torch)
    return {
        name: value
        for name, value in space.items()
        if (callable(value) or isinstance(value, property | classmethod))
        and not (own and isinstance(value, FunctionType))
    }
