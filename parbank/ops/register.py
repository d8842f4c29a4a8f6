"""Registers an operator with PyTorch, so that compilers see one call and its shapes.

`torch.library.custom_op` does the same, but its operators import `torch._dynamo` at their first call, compiler or not. That took 4
seconds of every start on the host of an H200 (docs/log/startup.md). So this file uses the functions below it.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("parbank", "FRAGMENT")


def operator(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function of tensors an operator parbank::`name` for all devices. It changes no argument, and returns none. Without a
    schema, its annotations are one. Shapes and derivatives are registered by `parbank.ops.checks.fake` and
    `torch.library.register_autograd`."""

    def register(function: Callable[..., Any]) -> Any:
        _LIBRARY.define(
            name + (schema or torch.library.infer_schema(function, mutates_args=())),
            tags=(torch.Tag.pt2_compliant_tag,),
        )
        _LIBRARY.impl(name, _untraced(function), "CompositeExplicitAutograd")
        return getattr(torch.ops.parbank, name).default

    return register


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which `torch.compile` does not look into. Nothing can be traced while its tracer is not imported."""
    outside: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal outside
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if outside is None:
            import torch._dynamo  # waits for another thread that imports it

            # The frame itself: the compiler watches operators of a function that it does not compile whole.
            torch._dynamo.decorators.skip(call)
            outside = torch.compiler.disable(function)
        return outside(*args, **kwargs)

    return call
