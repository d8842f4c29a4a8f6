"""A model back from its artifact, with nothing else at hand."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parbank.artifact import Artifact, read_artifact
from parbank.config import from_dict, to_dict
from parbank.data.tokenizer import Tokenizer
from parbank.errors import ArtifactError, ParbankError
from parbank.model import GPT, ModelConfig
from parbank.quant import unpack_tensors

KIND = "parbank language model"
TOKENIZER = "tokenizer"


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to score and to write."""

    model: GPT
    tokenizer: Tokenizer
    context: int
    """The window it was trained on, in tokens."""
    data: str | None
    """The corpus it was trained on, where that has a name anybody can use (stdlib, fineweb)."""


def artifact_meta(config: ModelConfig, *, context: int, data: str, recipe: str, seed: int) -> dict[str, Any]:
    """What an artifact says about itself. A path of the machine it was made on is nobody's business and left out."""
    named = data if ":" not in data else None
    return {"kind": KIND, "model": to_dict(config), "context": context, "data": named, "recipe": recipe, "seed": seed}


def load_artifact(path: Path, device: torch.device) -> LoadedModel:
    artifact = read_artifact(path)
    try:
        return _rebuild(artifact, device)
    except ArtifactError:
        raise
    except (ParbankError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ArtifactError(f"{path} is a whole artifact, but its model cannot be rebuilt: {reason}") from error


def _rebuild(artifact: Artifact, device: torch.device) -> LoadedModel:
    meta = artifact.meta
    if meta.get("kind") != KIND:
        raise ArtifactError(f"the artifact holds {meta.get('kind')!r}, not a {KIND}")
    config = from_dict(ModelConfig, meta["model"], path="model")
    tokenizer = Tokenizer.from_bytes(artifact.sections[TOKENIZER])
    tensors = unpack_tensors(artifact)
    with torch.device("meta"):  # the shapes are compared before memory for them is taken
        model = GPT(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if expected != found:
        name = sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n))[0]
        raise ArtifactError(f"{name} should be {expected.get(name)} and is {found.get(name)}")
    model = model.to_empty(device=device)
    model.fill_tables()
    model.load_state_dict(tensors)
    return LoadedModel(model=model, tokenizer=tokenizer, context=int(meta["context"]), data=meta.get("data"))
