"""Ranks that train or score together must have the same settings, software, data and weights, or the result is wrong.

Each rank sends its facts, short texts by name, to all others. `compare_settings` does so first of all: ranks with
batches or models of different shapes would hang or abort in a later collective. `compare_state` does so before the
first step, when data and weights are loaded, and `compare_scoring` before a score. All ranks hold the same facts then,
so all raise the same error.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import parbank
from parbank.config import walk
from parbank.errors import RankError
from parbank.runtime import Runtime, versions
from parbank.training.config import RunConfig
from parbank.training.trainer import Trainer

SOFTWARE = ("parbank", "torch", "numpy", "cuda", "triton", "flash-attn-3")  # a Python or a platform may differ
_SHOWN = 4  # differences in one message

Facts = Mapping[str, str]


def compare_settings(config: RunConfig, runtime: Runtime, *, resume: bool) -> None:
    """Compares everything that is known before data is opened. Paths of the data may differ between machines."""
    if runtime.world == 1:
        return
    facts = {name: json.dumps(value) for name, value, _ in walk(config) if name != "data"}
    facts |= {f"version of {name}": version for name, version in versions().items() if name in SOFTWARE}
    facts |= {"--device": runtime.device.type, "--resume": json.dumps(resume), "code": hash_code()}
    compare(facts, runtime)


def compare_state(trainer: Trainer, checkpoint: Path | None) -> None:
    """Compares the data, the checkpoint that the run continues from, and the weights."""
    if trainer.runtime.world == 1:
        return
    facts = {"data": trainer.dataset.fingerprint[:12], "step": str(trainer.step)}
    facts["checkpoint"] = hash_file(checkpoint) if checkpoint is not None else "none"
    facts["starting weights"] = hash_tensors(trainer.model.state_dict().items())
    compare(facts, trainer.runtime)


def compare_scoring(model: nn.Module, about: Mapping[str, Any], runtime: Runtime) -> None:
    """Compares the model, the text and the method of a score: each rank scores a share of one text."""
    if runtime.world == 1:
        return
    facts = {name: json.dumps(value) for name, value in about.items()}
    compare(facts | {"weights": hash_tensors(model.state_dict().items()), "code": hash_code()}, runtime)


def compare(facts: Facts, runtime: Runtime) -> None:
    """Raises the same error on all ranks if a fact differs between them."""
    first, *others = runtime.gather(facts)
    different = {rank: found for rank, facts in enumerate(others, 1) if (found := differences(facts, first))}
    if not different:
        return
    (rank, found), *rest = different.items()
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    also = f" (and so does rank {', '.join(str(other) for other, _ in rest)})" if rest else ""
    raise RankError(
        f"rank {rank} differs from rank 0{also}: {', '.join(found[:_SHOWN])}{more}; start all ranks with the same command, "
        "software, data and run folder"
    )


def differences(facts: Facts, first: Facts) -> list[str]:
    names = [*first, *(name for name in facts if name not in first)]
    return [
        f"{name} {facts.get(name, 'missing')} instead of {first.get(name, 'missing')}"
        for name in names
        if facts.get(name) != first.get(name)
    ]


def hash_code() -> str:
    """A hash of every source file of parbank, with its path below the package."""
    root = Path(parbank.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def hash_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of names, types, shapes and every bit."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]
