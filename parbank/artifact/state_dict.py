"""Any state dict as an artifact, and back.

Weights are stored like those of parbank's own models: integers if a tensor has two dimensions, else float16. Four
additions cover other models; the meta describes them:

    shapes      tensors of three dimensions and more. A stack of matrices is stored matrix by matrix, as NAME[0], NAME[1]
                and so on; a convolution's filters are stored as rows.
    transposed  matrices of (inputs, outputs), as GPT-2 has them, are stored as (outputs, inputs).
    shared      names of one tensor, such as a head tied to an embedding: it is stored once.
    exact       a section for tensors that float16 cannot hold: integers, bools, numbers that are infinite or above
                65,504, as in masks, and tensors whose values all lie below its full precision (6.1e-5), where a scale
                would have few digits or be 0. It is a safetensors file.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parbank.artifact.container import Artifact
from parbank.artifact.pack import Packed, pack_weights, unpack_tensors
from parbank.artifact.safetensors import load_bytes, save_bytes
from parbank.artifact.streams import decode_bytes, encode_bytes
from parbank.errors import ArtifactError
from parbank.quant.calibration import Calibration
from parbank.quant.config import QuantConfig
from parbank.quant.roles import Role, role

KIND = "state dict"
EXACT = "exact"
_LARGEST_HALF = 65504.0
_LEAST_HALF = 2.0**-14
"""The smallest number that float16 holds with all of its digits."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NARROW = 16  # the least side of a matrix that is stored as integers (quant/roles.py)


@dataclass(frozen=True)
class Split:
    """A state dict, divided for storage."""

    weights: dict[str, Tensor]
    """Floating-point tensors of two dimensions at most, in the memory of the tensors that were given."""
    roles: dict[str, Role]
    exact: dict[str, Tensor]
    shared: dict[str, str]
    """Name -> the name that its tensor is stored under."""
    shapes: dict[str, list[int]]
    """The shapes of tensors that are stored with another shape."""
    transposed: list[str]

    @property
    def quantised(self) -> dict[str, Tensor]:
        """The tensors that become integers."""
        return {name: tensor for name, tensor in self.weights.items() if self.roles[name] != "other"}

    @property
    def meta(self) -> dict[str, Any]:
        return {"kind": KIND, "shared": self.shared, "shapes": self.shapes, "transposed": self.transposed}

    @property
    def sections(self) -> dict[str, bytes]:
        return {EXACT: encode_bytes(save_bytes(self.exact))} if self.exact else {}


def split_state_dict(
    state: Mapping[str, Any], roles: Mapping[str, Role] | None = None, transposed: Collection[str] = ()
) -> Split:
    """`roles` are the certain ones (`roles_in`); the others follow from names and shapes. `transposed` names the matrices of
    (inputs, outputs) (`transposed_in`). The order of the dict does not matter."""
    known, found = roles or {}, Split({}, {}, {}, {}, {}, [])
    seen: dict[tuple[Any, ...], str] = {}
    for name, given in sorted(state.items(), key=lambda item: str(item[0])):
        _check_tensor(name, given)
        # A conjugate lies in the memory of its tensor, with other signs.
        tensor = given.detach().resolve_conj().resolve_neg()
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            found.shared[name] = first = seen[place]
            if first in found.roles and _choose_role(name, tensor, known) == "embedding":  # any of its names may say so
                found.roles[first] = "embedding"
            continue
        seen[place] = name
        if _needs_exactness(name, tensor):
            found.exact[name] = tensor
            continue
        if name in transposed:
            found.transposed.append(name)
        for part, weights in _parts(name, tensor.mT if name in transposed else tensor):
            if part in found.weights or (part != name and part in state):
                raise ArtifactError(f"{name} would be stored as {part}, and another tensor has that name; rename one")
            found.weights[part] = weights
            found.roles[part] = _choose_role(name, weights, known)
        if tensor.ndim > 2:
            found.shapes[name] = list(tensor.shape)
    return found


def pack_state_dict(
    split: Split,
    config: QuantConfig,
    calibration: Calibration,
    *,
    max_bytes: int,
    meta: Mapping[str, Any] | None = None,
    sections: Mapping[str, bytes] | None = None,
) -> Packed:
    """The artifact of a state dict, of at most `max_bytes`. `meta` and `sections` are added to its own."""
    return pack_weights(
        split.weights,
        config,
        calibration,
        roles=split.roles,
        max_bytes=max_bytes,
        meta={**(meta or {}), **split.meta},
        extra_sections={**(sections or {}), **split.sections},
    )


def unpack_state_dict(artifact: Artifact) -> dict[str, Tensor]:
    """The tensors by name: weights as float32, exact tensors in their own dtype, shared names as one tensor."""
    if artifact.meta.get("kind") != KIND:
        raise ArtifactError(f"{artifact.source} holds {artifact.meta.get('kind')!r}, not a {KIND}; use parbank.load")
    weights = unpack_tensors(artifact)
    try:
        state = {name: _join(name, shape, weights) for name, shape in artifact.meta["shapes"].items()}
        state |= weights
        state |= {name: state[name].mT.contiguous() for name in artifact.meta["transposed"]}
        if EXACT in artifact.sections:
            source = f"{artifact.source} ({EXACT})"
            state |= load_bytes(decode_bytes(artifact.sections[EXACT], None, source=source), source)
        state |= {name: state[target] for name, target in artifact.meta["shared"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ArtifactError(
            f"{artifact.source} is whole, but its table of shapes does not fit its weights ({error}); pack it again"
        ) from error
    return state


def _check_tensor(name: object, tensor: object) -> None:
    """Refuses names and tensors that no file could give back."""
    if not isinstance(name, str):
        raise ArtifactError(f"names in a state dict are strings, got {name!r}; pack a dict such as module.state_dict()")
    fault, remedy = "", ""
    if not isinstance(tensor, Tensor):
        fault, remedy = (
            f"a {type(tensor).__name__}, not a tensor",
            "pack a state dict of tensors, such as module.state_dict()",
        )
    elif hasattr(tensor, "full_tensor"):
        fault, remedy = "one rank's part of a tensor", "pack tensor.full_tensor(), which every rank must call"
    elif tensor.is_meta:
        fault, remedy = "on the device meta, which holds no values", "load the weights first"
    elif tensor.layout != torch.strided:
        fault, remedy = "sparse", "pack tensor.to_dense()"
    elif tensor.is_quantized or (tensor.is_floating_point() and tensor.dtype not in _FLOATS):
        fault, remedy = f"of {tensor.dtype}", "convert it, for instance by tensor.float()"
    if fault:
        raise ArtifactError(f"{name} is {fault}; {remedy}")


def _needs_exactness(name: str, tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    if tensor.isnan().any():
        raise ArtifactError(f"{name} holds values that are not numbers (NaN); pack weights from before it diverged")
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    return largest > _LARGEST_HALF or 0 < largest < _LEAST_HALF


def _parts(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    if tensor.ndim <= 2:
        return [(name, tensor)]
    if min(tensor.shape[-2:]) < _NARROW or not tensor.numel():
        return [(name, tensor.flatten(1))]
    return [(f"{name}[{i}]", matrix) for i, matrix in enumerate(tensor.flatten(0, -3))]


def _choose_role(name: str, weights: Tensor, known: Mapping[str, Role]) -> Role:
    chosen = known.get(name, role(name, tuple(weights.shape)))
    return chosen if weights.ndim == 2 and weights.numel() else "other"


def _join(name: str, shape: list[int], weights: dict[str, Tensor]) -> Tensor:
    """Undoes `_parts`; takes the parts out of `weights`."""
    if name in weights:
        return weights.pop(name).reshape(shape)
    count = math.prod(shape[:-2])
    return torch.stack([weights.pop(f"{name}[{i}]") for i in range(count)]).reshape(shape)
