"""Checks that an adapter changes weights and nothing else: a hook on the model would see the text before it is scored."""

from typing import Any

import torch.nn.modules.module as torch_module
from torch import nn

from parbank.errors import ParbankError

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
WEIGHT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Guard:
    """Records the code that runs in a pass over a model, and refuses a model where it has changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._before = model, _find_code(model)

    def check(self) -> None:
        now = _find_code(self._model)
        for name in sorted(now.keys() | self._before.keys()):
            if now.get(name) != self._before.get(name):
                raise ParbankError(
                    f"the adapter has changed {name}: it left a hook there, or put something else in its place, and could see "
                    "the text before it is scored; an adapter may change the values of weights, in place, and nothing else"
                )


def _find_code(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """For the name of each module and parameter: the object, its class, its hooks, and functions set on it."""
    found: dict[str, tuple[Any, ...]] = {
        "every module's hooks": tuple(tuple(getattr(torch_module, f"_global{kind}", ())) for kind in HOOKS)
    }
    for name, module in model.named_modules():
        hooks = (tuple(getattr(module, kind)) for kind in HOOKS)
        own = ((key, id(value)) for key, value in vars(module).items() if callable(value))
        found[name or "the model"] = (id(module), type(module), *hooks, *own)
    for name, parameter in model.named_parameters():
        hooks = (tuple(getattr(parameter, kind) or ()) for kind in WEIGHT_HOOKS)
        found[name] = (id(parameter), type(parameter), *hooks)
    return found
