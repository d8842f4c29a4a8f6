"""Loads a model from an artifact, a checkpoint, or the folder of a run."""

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from parbank.artifact.about import About
from parbank.artifact.container import is_artifact
from parbank.artifact.load import LoadedModel, Shaped, ignore_shape, load_artifact
from parbank.config import parse_json
from parbank.data.sources import remembered_spec
from parbank.data.tokenizer import Tokenizer
from parbank.errors import CheckpointError, ParbankError, enough_memory
from parbank.model import GPT
from parbank.training.checkpoint import MALFORMED, find_checkpoint, first_line, load_checkpoint

if TYPE_CHECKING:
    from parbank.training.config import RunConfig


def load_model(path: Path, device: torch.device, shaped: Shaped = ignore_shape) -> LoadedModel:
    """An artifact, or a checkpoint with the averaged weights that would be packed. A run folder means its artifact, or
    its newest checkpoint if there is none yet; it also knows the path of the run's training data. `shaped` is called
    for an artifact, before its weights are decoded."""
    if path.is_dir() and (path / "model.pbk").exists():
        loaded = load_artifact(path / "model.pbk", device, shaped)
        return replace(loaded, data=loaded.data or _trained_on(path))
    if is_artifact(path) or path.suffix == ".pbk":
        return load_artifact(path, device, shaped)
    check_model(path)
    file = find_checkpoint(path)
    model, tokenizer, config = load_trained(file, device)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        context=config.batch.sequence_length,
        data=config.data,
        meta=describe_run(config).to_meta(),
        source=file,
    )


def check_model(path: Path) -> None:
    """Refuses a path that cannot be a model, by what kind of file or folder it is. Nothing is decoded."""
    if (path.is_dir() and (path / "model.pbk").exists()) or is_artifact(path):
        return
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; give an artifact (.pbk), a checkpoint (step_N.pt), or a run folder"
        )
    if path.is_file() and not zipfile.is_zipfile(path):  # a complete checkpoint is one
        raise CheckpointError(
            f"{path} is neither an artifact (.pbk) nor a whole checkpoint (step_N.pt); give one of them"
        )
    find_checkpoint(path)


def _trained_on(folder: Path) -> str | None:
    try:
        found = parse_json((folder / "config.json").read_bytes())["data"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return remembered_spec(found) if isinstance(found, str) else None


def load_trained(path: Path, device: torch.device) -> tuple[GPT, Tokenizer, "RunConfig"]:
    """The averaged weights of a checkpoint, with its tokenizer and config."""
    file = find_checkpoint(path)
    state = load_checkpoint(file)
    try:
        with enough_memory(CheckpointError, file):
            return _rebuild(state, device)
    except CheckpointError:
        raise
    except (ParbankError, *MALFORMED) as error:
        raise CheckpointError(f"{file} does not hold what its config says: {first_line(error)}") from error


def _rebuild(state: dict[str, Any], device: torch.device) -> tuple[GPT, Tokenizer, "RunConfig"]:
    # The config of a run and its averages import all of optim. An artifact needs none of it, and is scored sooner.
    from parbank.training.averaging import Averages
    from parbank.training.config import read_config

    config = read_config(state["config"])
    _check_shapes(config, state["model"])
    model = GPT(config.model).to(device)
    model.load_state_dict(state["model"])
    averages = Averages(model, config.average)
    averages.load_state_dict(state["averages"])
    model.load_state_dict(averages.averaged())
    return model, Tokenizer.from_bytes(state["tokenizer"]), config


def _check_shapes(config: "RunConfig", weights: dict[str, torch.Tensor]) -> None:
    """Compares shapes on the meta device, before a model of any size takes memory."""
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in GPT(config.model).state_dict().items()}
    found = {name: tensor.shape for name, tensor in weights.items()}
    if different := sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)):
        raise ValueError(
            f"{different[0]!a} is {found.get(different[0])}, its config makes it {expected.get(different[0])}"
        )


def describe_run(config: "RunConfig") -> About:
    """The meta of a run's artifact."""
    return About(
        model=config.model,
        context=config.batch.sequence_length,
        data=config.data,
        recipe=config.recipe,
        seed=config.seed,
    )
