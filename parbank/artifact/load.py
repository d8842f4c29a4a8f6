"""Loads a model from its artifact alone."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parbank.artifact.about import KIND, TOKENIZER
from parbank.artifact.container import Artifact, read_artifact
from parbank.artifact.contents import read_contents, read_specs
from parbank.artifact.pack import fill_tensors
from parbank.config import from_dict
from parbank.data.sources import is_public
from parbank.data.tokenizer import Tokenizer
from parbank.errors import ArtifactError, ParbankError, enough_memory
from parbank.model import GPT, ModelConfig
from parbank.model.gpt import MAX_POSITIONS


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to score and to sample."""

    model: GPT
    tokenizer: Tokenizer
    context: int
    """The window it was trained on, in tokens."""
    data: str | None
    """The spec it was trained on. An artifact knows it only where it means something anywhere (stdlib, fineweb)."""
    meta: dict[str, Any]
    """The meta of its artifact."""
    source: Path
    """The file it came from."""


Shaped = Callable[[ModelConfig, int], None]
"""Called with the config and the context of a model before its weights are decoded, which takes a second."""


def ignore_shape(config: ModelConfig, context: int) -> None:
    """Does nothing."""


def load_artifact(path: Path, device: torch.device, shaped: Shaped = ignore_shape) -> LoadedModel:
    """Reads, verifies and rebuilds. Any mismatch is an ArtifactError that names the file."""
    artifact = read_artifact(path)
    try:
        with enough_memory(ArtifactError, path):
            return _rebuild(artifact, device, shaped)
    except ArtifactError:
        raise
    except KeyError as error:
        raise _unusable(artifact, f"{error} is missing") from error
    except (ParbankError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        lines = str(error).strip().splitlines()
        raise _unusable(artifact, lines[0] if lines else type(error).__name__) from error


def _rebuild(artifact: Artifact, device: torch.device, shaped: Shaped) -> LoadedModel:
    meta = artifact.meta
    if meta.get("kind") != KIND:
        raise ArtifactError(
            f"{artifact.source} holds {meta.get('kind')!r}, not a {KIND}; give the file of a parbank model"
        )
    config = from_dict(ModelConfig, meta["model"], path="model")
    context, data = meta["context"], meta.get("data")
    if (fault := find_fault(context, data)) is not None:
        raise _unusable(artifact, fault)
    tokenizer = Tokenizer.from_bytes(artifact.sections[TOKENIZER])
    ours, theirs = (config.vocab_size, config.bos_id), (tokenizer.vocab_size, tokenizer.bos_id)
    if ours != theirs:
        raise _unusable(artifact, f"model and tokenizer differ in (vocabulary, BOS): {ours} and {theirs}")
    specs = read_specs(artifact)
    found = {spec.name: spec.shape for spec in specs}
    if config.layers > len(found):  # before a model of a billion layers is built to be compared
        raise _unusable(artifact, f"its config has {config.layers} layers, its weights are {len(found)} tensors")
    with torch.device("meta"):  # the shapes are compared before a weight is decoded or memory for them is taken
        model = GPT(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if expected != found:
        name = sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n))[0]
        here, there = (table.get(name, "absent") for table in (found, expected))
        raise _unusable(artifact, f"the shape of {name} is {here}, its config makes it {there}")
    shaped(config, context)
    model.allocate(device)
    fill_tensors(read_contents(artifact, specs), model.state_dict())  # views of the model's memory
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        context=context,
        data=data if data is not None and is_public(data) else None,  # a file must not choose what is read here
        meta=meta,
        source=Path(artifact.source),
    )


def find_fault(context: object, data: object) -> str | None:
    """Why no model is loaded with this context and data in its meta; None if both are sound."""
    if type(context) is not int or not 1 <= context <= MAX_POSITIONS:
        return f"its context is {context!r}, not a whole number from 1 to {MAX_POSITIONS}"
    return None if isinstance(data, str | None) else f"its data is {data!r}, not a name"


def _unusable(artifact: Artifact, reason: str) -> ArtifactError:
    return ArtifactError(
        f"{artifact.source} is whole, but its model cannot be rebuilt: {reason}; it was not written by this parbank: "
        "pack its checkpoint again"
    )
