"""A model from whatever a user points at: an artifact, a checkpoint, or the folder of a run."""

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import torch

from parbank.artifact import is_artifact
from parbank.config import from_dict
from parbank.data.tokenizer import Tokenizer
from parbank.errors import CheckpointError, ConfigError, ParbankError
from parbank.eval.load import LoadedModel, load_artifact
from parbank.model import GPT
from parbank.optim.averaging import Averages
from parbank.quant import Packed
from parbank.train.checkpoint import find_checkpoint, load_checkpoint
from parbank.train.config import RunConfig
from parbank.train.run import pack_model


def load_model(path: Path, device: torch.device) -> LoadedModel:
    """An artifact as it is; a checkpoint with the average it would have been packed with. A run folder means its artifact,
    or its newest checkpoint where there is none yet; it also knows what the run was trained on, by its path."""
    if path.is_dir() and (path / "model.pbk").exists():
        loaded = load_artifact(path / "model.pbk", device)
        return replace(loaded, data=loaded.data or _trained_on(path))
    if is_artifact(path) or path.suffix == ".pbk":
        return load_artifact(path, device)
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; give an artifact (.pbk), a checkpoint (step_N.pt), or a run folder"
        )
    if path.is_file() and not zipfile.is_zipfile(path):  # which is what a whole checkpoint is
        raise CheckpointError(
            f"{path} is neither an artifact (.pbk) nor a whole checkpoint (step_N.pt); give one of them"
        )
    model, tokenizer, config = load_trained(path, device)
    return LoadedModel(model=model, tokenizer=tokenizer, context=config.batch.sequence_length, data=config.data)


def _trained_on(folder: Path) -> str | None:
    try:
        found = json.loads((folder / "config.json").read_bytes())["data"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def load_trained(path: Path, device: torch.device) -> tuple[GPT, Tokenizer, RunConfig]:
    """The averaged weights of a checkpoint, with its tokenizer and config."""
    file = find_checkpoint(path)
    state = load_checkpoint(file)
    try:
        config = from_dict(RunConfig, state["config"])
        model = GPT(config.model).to(device)
        model.load_state_dict(state["model"])
        averages = Averages(dict(model.named_parameters()), config.average)
        saved = dict(state["averages"])
        for kind in ("ema", "swa"):
            saved[kind] = None if saved[kind] is None else model.parameter_names(saved[kind])
        averages.load_state_dict(saved)
        model.load_state_dict(model.plain_names(averages.averaged()))
        return model, Tokenizer.from_bytes(state["tokenizer"]), config
    except (ParbankError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{file} does not hold what its config says: {str(error).splitlines()[0]}") from error


def pack_checkpoint(path: Path, max_bytes: int, out: Path | None) -> tuple[Path, Packed]:
    """Packs a checkpoint under a cap of its own. The file appears whole or not at all, and by default beside the run's own
    artifact, whose score is in the summary, not over it."""
    if max_bytes < 1:
        raise ConfigError(f"--max-bytes must be positive, got {max_bytes}")
    if is_artifact(path):
        raise ConfigError(f"{path} is packed already; give the checkpoint it came from, or its run folder")
    file = find_checkpoint(path)
    model, tokenizer, config = load_trained(file, torch.device("cpu"))
    packed = pack_model(model, config, tokenizer, max_bytes=max_bytes)
    folder = file.parent.parent if file.parent.name == "checkpoint" else file.parent
    target = out or folder / f"model-{max_bytes}.pbk"
    packed.write(target)
    return target, packed
