"""A model from whatever a user points at: an artifact, a checkpoint, or the folder of a run."""

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from parbank.artifact.container import is_artifact
from parbank.artifact.load import LoadedModel, load_artifact
from parbank.artifact.pack import Packed
from parbank.config import from_dict, override
from parbank.data.dataset import open_dataset
from parbank.data.shards import TokenSet
from parbank.data.tokenizer import Tokenizer
from parbank.errors import CheckpointError, ConfigError, DataError, ParbankError
from parbank.model import GPT
from parbank.optim.averaging import Averages
from parbank.runtime import Runtime
from parbank.training.checkpoint import find_checkpoint, load_checkpoint
from parbank.training.config import RunConfig
from parbank.training.metrics import Display
from parbank.training.run import calibrate_model, describe_run, pack_model


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
    file = find_checkpoint(path)
    model, tokenizer, config = load_trained(file, device)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        context=config.batch.sequence_length,
        data=config.data,
        meta=describe_run(config),
        source=file,
    )


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


def pack_checkpoint(
    path: Path,
    max_bytes: int,
    out: Path | None,
    *,
    settings: tuple[str, ...] = (),
    data: str | None = None,
    runtime: Runtime | None = None,
    display: Display | None = None,
) -> tuple[Path, Packed]:
    """Packs a checkpoint under a cap of its own, as its run would or with other `settings` of quant. The file appears whole or
    not at all, and by default beside the run's own artifact, whose score is in the summary, not over it. Calibrated on the
    run's training text, or on that of `data`."""
    if max_bytes < 1:
        raise ConfigError(f"--max-bytes must be positive, got {max_bytes}")
    if is_artifact(path):
        raise ConfigError(f"{path} is packed already; give the checkpoint it came from, or its run folder")
    runtime, display = runtime or Runtime(device=torch.device("cpu")), display or Display(enabled=False)
    file = find_checkpoint(path)
    model, tokenizer, config = load_trained(file, runtime.device)
    for setting in settings:
        if not setting.startswith("quant."):
            raise ConfigError(f"--set {setting}: packing has settings of quant alone, such as quant.method=rows")
    config = override(config, *settings)
    measured = None
    if config.quant.method == "solver" and config.quant.calibration_tokens:
        tokens = _training_tokens(data, config, tokenizer, display)
        measured = calibrate_model(model, config, tokens, runtime, display) if tokens is not None else None
    packed = pack_model(model, config, tokenizer, measured, max_bytes=max_bytes, say=display.say)
    folder = file.parent.parent if file.parent.name == "checkpoint" else file.parent
    target = out or folder / f"model-{max_bytes}.pbk"
    packed.write(target)
    return target, packed


def _training_tokens(data: str | None, config: RunConfig, tokenizer: Tokenizer, display: Display) -> TokenSet | None:
    """Training text in the model's own tokens. Text that was asked for must be there; the run's own may be gone."""
    try:
        dataset = open_dataset(data or config.data, vocab_size=config.model.vocab_size, say=display.say)
        dataset.require_length(config.batch.sequence_length)
    except DataError as error:
        if data is not None:
            raise
        display.say(f"cannot calibrate on the run's training text ({error}); --data SPEC names other text")
        return None
    if dataset.tokenizer.fingerprint == tokenizer.fingerprint:
        return dataset.train
    # of text cut by another tokenizer twice the tokens are enough: tokens differ in length, but not by that much
    tokens = dataset.train.read(0, min(len(dataset.train), 2 * config.quant.calibration_tokens))
    documents = np.split(tokens, np.flatnonzero(tokens == dataset.tokenizer.bos_id))
    bos = np.array([tokenizer.bos_id], dtype=np.uint16)
    pieces = [piece for d in documents for piece in (bos, tokenizer.encode(dataset.tokenizer.decode(d)))]
    return TokenSet([np.concatenate(pieces)])
