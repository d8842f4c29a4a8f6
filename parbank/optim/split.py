"""Sorts the parameters of a model: hidden matrices for Muon, the rest for AdamW. It goes by role, not by name alone.

Muon is for hidden weights: matrices that map activations to activations. Embeddings and output heads have two
dimensions too, but their rows are looked up or scored one by one; norms, biases, gates and scalars are not matrices.
Where neither module nor name shows the role, a guess could train the model badly and silently, so it is an error with
the remedy.
"""

import logging
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from parbank.config import choose
from parbank.errors import ConfigError
from parbank.optim.algorithm import MatrixAlgorithm
from parbank.optim.algorithms import ALGORITHMS
from parbank.optim.roles import (
    Found,
    check_flattened,
    check_last_linear,
    find_declared,
    find_heads,
    find_role,
    is_vector,
    role_of_module,
)

_log = logging.getLogger("parbank")

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of a name that torch.compile, FSDP and activation checkpointing add."""


def split_parameters(
    model: nn.Module,
    lr: float | None = None,
    adam_lr: float | None = None,
    overrides: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Groups for ParallelMuon, from any module.

    overrides: {name or pattern: algorithm} for parameters whose role is unclear or misjudged: "muon", "adamw", or
    another name in `parbank.optim.algorithm.ALGORITHMS`. Patterns are those of a shell ("blocks.*.gate.weight").

    Norms, biases, gates and scalars get no weight decay; embeddings and heads take the optimizer's. Each group has
    its "role". The split is logged at level INFO. Frozen parameters are left out.

        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 9))
        >>> for group in parbank.split_parameters(model, overrides={"2.weight": "adamw"}):
        ...     print(group["algorithm"], group["role"], [name for name, _ in group["params"]])
        muon matrices ['1.weight']
        adamw embeddings and heads ['0.weight', '2.weight']
        adamw norms, biases, gates and scalars ['1.bias', '2.bias']
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"split_parameters takes the model, a torch.nn.Module, got a {type(model).__name__}")
    overrides = dict(overrides or {})
    found = _find(model)
    check_flattened(found)
    trainable = [item for item in found if item.param.requires_grad]
    chosen = {item.name: algorithm for item in trainable if (algorithm := _override(item, overrides)) is not None}
    unused = [
        pattern for pattern in overrides if not any(fnmatchcase(n, pattern) for item in trainable for n in item.names)
    ]
    if unused:
        raise ConfigError(
            f"overrides names {unused[0]!r}, which no trainable parameter has; `model.named_parameters()` lists them"
        )
    roles = _find_roles(model, found, chosen)
    unclear = [item for item in trainable if roles[item.name].startswith("?")]
    if unclear:
        lines = [f"{item.name} {tuple(item.param.shape)}: {roles[item.name][1:]}" for item in unclear]
        raise ConfigError(
            "cannot tell whether these are hidden matrices (muon) or not (adamw):\n  "
            + "\n  ".join(lines)
            + f'\nsay so, for instance split_parameters(model, overrides={{"{unclear[0].name}": "adamw"}}); '
            'patterns like "*.gate.weight" work too'
        )
    check_last_linear(found, roles, chosen)
    return _group(trainable, roles, chosen, lr, adam_lr)


def _find_roles(model: nn.Module, found: list[Found], chosen: Mapping[str, str]) -> dict[str, str]:
    """The role of every parameter, by its name. Frozen ones count: they show which layer is the head."""
    declared = find_declared(model)
    heads = {id(head) for head in find_heads(found, declared)}
    roles = {}
    for item in found:
        if item.name in chosen:
            roles[item.name] = _role_under(item, chosen[item.name])
        else:
            roles[item.name] = "head" if id(item) in heads else declared.get(id(item.param)) or find_role(item)
    return roles


def _find(model: nn.Module) -> list[Found]:
    """All parameters, each once, with every place it is used in."""
    found: dict[int, Found] = {}
    modules = {prefix: module for prefix, module in model.named_modules(remove_duplicate=False)}
    for prefix, module in modules.items():
        for name, param in module.named_parameters(recurse=False):
            item = found.setdefault(id(param), Found(param))
            path = [part for part in prefix.split(".") if part and part not in WRAPPERS]
            item.names.append(".".join([*path, name]))
            item.owners.append(module)
            item.parents.append(modules.get(prefix.rpartition(".")[0]) if prefix else None)
    return list(found.values())


def _override(item: Found, overrides: Mapping[str, str]) -> str | None:
    """The algorithm that the first matching pattern names."""
    for pattern, algorithm in overrides.items():
        choose(ALGORITHMS, algorithm, f"overrides[{pattern!r}]")
        if any(fnmatchcase(name, pattern) for name in item.names):
            return algorithm
    return None


def _role_under(item: Found, algorithm: str) -> str:
    """The role of a parameter whose algorithm was given."""
    if not isinstance(ALGORITHMS[algorithm], MatrixAlgorithm):
        return "small" if is_vector(item.param) else "other"
    role = role_of_module(item)
    return role if role in ("flattened", "transposed", "triple") else "matrix"


def _group(
    found: list[Found], roles: dict[str, str], chosen: Mapping[str, str], lr: float | None, adam_lr: float | None
) -> list[dict[str, Any]]:
    """One group for each kind of parameter, algorithm and set of options."""
    kinds: dict[str, tuple[tuple[str, ...], str, dict[str, Any]]] = {
        "matrices": (("matrix",), "muon", {}),
        "convolutions": (("flattened",), "muon", {"flatten": True}),
        "transposed matrices": (("transposed",), "muon", {}),
        "joint query, key and value": (("triple",), "muon", {"num_heads": 3}),
        "embeddings and heads": (("embedding", "head", "other"), "adamw", {}),
        "other weights": (("packed",), "adamw", {}),
        "norms, biases, gates and scalars": (("small",), "adamw", {"weight_decay": 0.0}),
    }
    groups = []
    for role, (members, usual, options) in kinds.items():
        alike: dict[tuple[str, int], list[Found]] = {}
        for item in found:
            if roles[item.name] in members:
                stack = (item.param.shape[0] if item.param.ndim == 3 else 1) if role == "transposed matrices" else 0
                alike.setdefault((chosen.get(item.name, usual), stack), []).append(item)
        rate = lr if usual == "muon" else adam_lr
        for (algorithm, stack), items in alike.items():
            params = [(item.name, item.param) for item in items]
            group = {"params": params, "role": role, "algorithm": algorithm, **options}
            if stack:
                group["transposed"] = (True,) * stack
            groups.append(group if rate is None else {**group, "lr": rate})
            total = sum(item.param.numel() for item in items)
            names = ", ".join(item.name for item in items[:4]) + (", ..." if len(items) > 4 else "")
            _log.info("%s: %d %s, %s numbers (%s)", algorithm, len(items), role, f"{total:,}", names)
    return groups
