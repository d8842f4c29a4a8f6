"""A model from whatever a user points at: an artifact, a checkpoint, or the folder of a run."""

from pathlib import Path

import torch

from parbank.artifact import is_artifact
from parbank.config import from_dict
from parbank.data.tokenizer import Tokenizer
from parbank.errors import CheckpointError
from parbank.eval.load import LoadedModel, load_artifact
from parbank.model import GPT
from parbank.optim.averaging import Averages
from parbank.quant import Packed
from parbank.train.checkpoint import find_checkpoint, load_checkpoint
from parbank.train.config import RunConfig
from parbank.train.run import pack_model


def load_model(path: Path, device: torch.device) -> LoadedModel:
    """An artifact as it is; a checkpoint with the average it would have been packed with. A run folder means its artifact,
    or its newest checkpoint where there is none yet."""
    if path.is_dir() and (path / "model.pbk").exists():
        path = path / "model.pbk"
    if is_artifact(path) or path.suffix == ".pbk":
        return load_artifact(path, device)
    model, tokenizer, config = load_trained(path, device)
    named = config.data if ":" not in config.data else None
    return LoadedModel(model=model, tokenizer=tokenizer, context=config.batch.sequence_length, data=named)


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
    except (KeyError, RuntimeError) as error:
        raise CheckpointError(f"{file} does not hold what its config says: {str(error).splitlines()[0]}") from error


def pack_checkpoint(path: Path, max_bytes: int, out: Path | None) -> tuple[Path, Packed]:
    """Packs a checkpoint under a cap of its own. The file appears whole or not at all."""
    file = find_checkpoint(path)
    model, tokenizer, config = load_trained(file, torch.device("cpu"))
    packed = pack_model(model, config, tokenizer, max_bytes=max_bytes)
    target = out or file.parent.parent / "model.pbk"
    packed.write(target)
    return target, packed
