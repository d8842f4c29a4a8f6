"""Sorts the parameters of a model: hidden matrices for Muon, the rest for AdamW. It goes by role, not by name alone.

Muon is for hidden weights: matrices that map activations to activations. Embeddings and output heads have two
dimensions too, but their rows are looked up or scored one by one; norms, biases, gates and scalars are not matrices.
Where neither module nor name shows the role, a guess could train the model badly and silently, so it is an error with
the remedy.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from parbank.config import choose
from parbank.errors import ConfigError
from parbank.optim.algorithm import MatrixAlgorithm
from parbank.optim.algorithms import ALGORITHMS

_log = logging.getLogger("parbank")

HEAD_NAMES = frozenset({
    "lm_head", "head", "output_head", "embed_out", "unembed", "unembedding", "classifier", "score", "logits", "output",
})  # fmt: skip
GATE_NAMES = frozenset(["gate", "gates", "router", "gating"])
MATRIX_NAMES = frozenset(["weight", "kernel", "bank", "banks"])
SMALL_SIDE = 64  # a gate or router has a few outputs; a hidden matrix this thin is not worth orthogonalising

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class _Found:
    """One parameter, every module that holds it, and all its names."""

    param: Tensor
    names: list[str] = field(default_factory=list)
    owners: list[nn.Module] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def words(self) -> list[str]:
        """The parts of the name, without a final `weight`."""
        parts = self.name.lower().split(".")
        return parts[:-1] if parts[-1] == "weight" and len(parts) > 1 else parts


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
    overrides = dict(overrides or {})
    found = [item for item in _find(model) if item.param.requires_grad]
    chosen = {item.name: algorithm for item in found if (algorithm := _override(item, overrides)) is not None}
    roles = {item.name: _role_under(item, chosen[item.name]) for item in found if item.name in chosen}
    unused = [
        pattern for pattern in overrides if not any(fnmatchcase(n, pattern) for item in found for n in item.names)
    ]
    if unused:
        raise ConfigError(
            f"overrides names {unused[0]!r}, which no trainable parameter has; `model.named_parameters()` lists them"
        )
    heads = _find_heads(found)
    unclear = []
    for item in found:
        if item.name not in chosen:
            role = "head" if any(item is head for head in heads) else _role(item)
            roles[item.name] = role
            if role.startswith("?"):
                unclear.append(f"{item.name} {tuple(item.param.shape)}: {role[1:]}")
    if unclear:
        example = unclear[0].split(" ")[0]
        raise ConfigError(
            "cannot tell whether these are hidden matrices (muon) or not (adamw):\n  "
            + "\n  ".join(unclear)
            + f'\nsay so, for instance split_parameters(model, overrides={{"{example}": "adamw"}}); '
            'patterns like "*.gate.weight" work too'
        )
    _check_last_linear(found, roles, chosen)
    return _group(found, roles, chosen, lr, adam_lr)


def _find(model: nn.Module) -> list[_Found]:
    """All parameters, each once, with every place it is used in."""
    found: dict[int, _Found] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False):
            item = found.setdefault(id(param), _Found(param))
            item.names.append(f"{prefix}.{name}" if prefix else name)
            item.owners.append(module)
    return list(found.values())


def _override(item: _Found, overrides: Mapping[str, str]) -> str | None:
    """The algorithm that the first matching pattern names."""
    for pattern, algorithm in overrides.items():
        choose(ALGORITHMS, algorithm, f"overrides[{pattern!r}]")
        if any(fnmatchcase(name, pattern) for name in item.names):
            return algorithm
    return None


def _role_under(item: _Found, algorithm: str) -> str:
    """The role of a parameter whose algorithm was given."""
    if not isinstance(ALGORITHMS[algorithm], MatrixAlgorithm):
        return "small" if _is_vector(item.param) else "other"
    role = _role_of_module(item, item.owners[0])
    return role if role in ("flattened", "transposed", "triple") else "matrix"


def _is_vector(param: Tensor) -> bool:
    """One number per channel, however many dimensions the tensor has."""
    return param.ndim < 2 or param.numel() == max(param.shape)


def _find_heads(found: list[_Found]) -> list[_Found]:
    """Output layers: by name, if only one layer has it, or by having one output per token of the embedding."""
    linears = [
        item for item in found if any(isinstance(owner, nn.Linear) for owner in item.owners) and item.param.ndim == 2
    ]
    words = [item.words[-1] for item in linears]
    named = [item for item, word in zip(linears, words) if word in HEAD_NAMES and words.count(word) == 1]
    if named:
        return named
    vocabularies = {owner.num_embeddings for item in found for owner in item.owners if isinstance(owner, nn.Embedding)}
    return [i for i in linears if i.param.shape[0] in vocabularies and i.param.shape[0] != i.param.shape[1]][-1:]


def _role(item: _Found) -> str:
    """matrix, flattened, transposed, triple, embedding, head or small; or, after a question mark, why it is unclear."""
    param, owner, last = item.param, item.owners[0], item.words[-1]
    if any(isinstance(o, (nn.Embedding, nn.EmbeddingBag)) for o in item.owners):
        return "embedding"  # also a head that is tied to it
    if _is_vector(param) or "norm" in type(owner).__name__.lower() or item.names[0].endswith("bias"):
        return "small"
    if any("embed" in word or word in ("wte", "wpe") for word in item.words):
        return "embedding"
    if set(last.split("_")) & GATE_NAMES and not last.endswith("proj"):
        return "small" if min(param.shape) < SMALL_SIDE else "?named a gate, but as large as a hidden matrix"
    return _role_of_module(item, owner)


def _role_of_module(item: _Found, owner: nn.Module) -> str:
    param = item.param
    if isinstance(owner, CONVOLUTIONS):
        return (
            "small" if param[0].numel() == owner.kernel_size[0] ** (param.ndim - 2) else "flattened"
        )  # depthwise: filters
    if isinstance(owner, nn.Linear):
        return "matrix"
    if isinstance(owner, nn.MultiheadAttention):
        return "triple" if item.name.endswith("in_proj_weight") else "matrix"
    if type(owner).__name__ == "Conv1D" and param.ndim == 2:  # GPT-2's linear layer in transformers: (in, out)
        return "transposed"
    if isinstance(owner, (nn.RNNBase, nn.modules.conv._ConvTransposeNd, nn.Bilinear)):
        return f"?{type(owner).__name__} packs several maps into one weight"
    if param.ndim == 3 and min(param.shape[1:]) > 1:
        return "matrix"
    final = item.name.lower().split(".")[-1]
    if param.ndim == 2 and (final in MATRIX_NAMES or final.endswith(("_weight", "_proj", "_bank"))):
        return "matrix"
    return f"?a bare parameter of {type(owner).__name__}"


def _group(
    found: list[_Found], roles: dict[str, str], chosen: Mapping[str, str], lr: float | None, adam_lr: float | None
) -> list[dict[str, Any]]:
    """One group for each kind of parameter and algorithm."""
    kinds: dict[str, tuple[tuple[str, ...], str, dict[str, Any]]] = {
        "matrices": (("matrix",), "muon", {}),
        "convolutions": (("flattened",), "muon", {"flatten": True}),
        "transposed matrices": (("transposed",), "muon", {"transposed": (True,)}),
        "joint query, key and value": (("triple",), "muon", {"num_heads": 3}),
        "embeddings and heads": (("embedding", "head", "other"), "adamw", {}),
        "norms, biases, gates and scalars": (("small",), "adamw", {"weight_decay": 0.0}),
    }
    groups = []
    for role, (members, usual, options) in kinds.items():
        by_algorithm: dict[str, list[_Found]] = {}
        for item in found:
            if roles[item.name] in members:
                by_algorithm.setdefault(chosen.get(item.name, usual), []).append(item)
        rate = lr if usual == "muon" else adam_lr
        for algorithm, items in by_algorithm.items():
            params = [(item.name, item.param) for item in items]
            group = {"params": params, "role": role, "algorithm": algorithm, **options}
            groups.append(group if rate is None else {**group, "lr": rate})
            total = sum(item.param.numel() for item in items)
            names = ", ".join(item.name for item in items[:4]) + (", ..." if len(items) > 4 else "")
            _log.info("%s: %d %s, %s numbers (%s)", algorithm, len(items), role, f"{total:,}", names)
    return groups


def _check_last_linear(found: list[_Found], roles: dict[str, str], chosen: Mapping[str, str]) -> None:
    """A model without a known head may still end in one: the last Linear, if no other has its shape, is ambiguous."""
    if any(role in ("head", "other") for role in roles.values()) or any(len(item.names) > 1 for item in found):
        return
    linears = [item for item in found if isinstance(item.owners[0], nn.Linear) and item.param.ndim == 2]
    if not linears or roles[linears[-1].name] != "matrix" or linears[-1].name in chosen:
        return
    last = linears[-1]
    shapes = [item.param.shape for item in linears]
    if len(linears) > 1 and shapes.count(last.param.shape) == 1:
        raise ConfigError(
            f"{last.name} {tuple(last.param.shape)} is the last Linear and no other has its shape: it may be the output layer "
            f'(adamw) or a hidden matrix (muon). Say so: split_parameters(model, overrides={{"{last.name}": "adamw"}})'
        )
