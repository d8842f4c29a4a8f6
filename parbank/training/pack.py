"""The artifact of a run's model: calibrated on its training text, packed under its cap or another."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from parbank.artifact.calibrate import calibrate
from parbank.artifact.container import check_target, is_artifact
from parbank.artifact.model import pack_model
from parbank.artifact.pack import Packed, unpack_tensors
from parbank.config import override
from parbank.data.dataset import Dataset, open_dataset
from parbank.data.progress import Say
from parbank.data.shards import TokenSet
from parbank.data.tokenizer import Tokenizer
from parbank.display import Display
from parbank.errors import ConfigError, DataError
from parbank.eval.windows import score_chunked
from parbank.model import GPT
from parbank.quant.calibration import Calibration
from parbank.runtime import Runtime
from parbank.training.checkpoint import find_checkpoint
from parbank.training.config import RunConfig
from parbank.training.load import describe_run, load_trained

_MEASURED_TOKENS = 1 << 14  # two passes over them take a second for the golf model on a CPU


def calibrate_model(
    model: GPT, config: RunConfig, tokens: TokenSet, runtime: Runtime, display: Display
) -> Calibration | None:
    """The calibration for the solver; empty if the solver does not need it. Every rank takes part."""
    if config.quant.method != "solver" or not config.quant.calibration_tokens:
        return None
    with display.progress("calibrating") as progress:
        return calibrate(
            model,
            tokens,
            config.quant,
            context=config.batch.sequence_length,
            runtime=runtime,
            progress=progress,
        )


def pack_run(
    model: GPT,
    config: RunConfig,
    tokenizer: Tokenizer,
    calibration: Calibration | None,
    out: Path,
    *,
    max_bytes: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Packed:
    """The artifact of a model's current weights, under the run's cap or another, written to `out`."""
    return pack_model(
        model.state_dict(),
        describe_run(config),
        tokenizer.model_bytes,
        config.quant,
        calibration,
        max_bytes=config.budget.max_bytes if max_bytes is None else max_bytes,
        count_code=config.budget.count_code,
        out=out,
        say=say,
    )


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
    """Packs a checkpoint under a given cap, with the run's settings of quant or other `settings`. Calibrates on the
    run's training text, or on that of `data`. Writes the file atomically; by default beside the run's own artifact,
    not over it, since the summary holds that one's score."""
    if max_bytes < 1:
        raise ConfigError(f"--max-bytes must be positive, got {max_bytes}")
    if is_artifact(path):
        raise ConfigError(f"{path} is packed already; give the checkpoint it came from, or its run folder")
    file = find_checkpoint(path)
    folder = file.parent.parent if file.parent.name == "checkpoint" else file.parent
    target = out or folder / f"model-{max_bytes}.pbk"
    check_target(target)
    runtime, display = runtime or Runtime(device=torch.device("cpu")), display or Display(enabled=False)
    model, tokenizer, config = load_trained(file, runtime.device)
    for setting in settings:
        if not setting.startswith("quant."):
            raise ConfigError(f"--set {setting}: packing has settings of quant alone, such as quant.method=rows")
    config = override(config, *settings)
    tokens = _training_tokens(data, config, tokenizer, display)
    measured = None if tokens is None else calibrate_model(model, config, tokens, runtime, display)
    packed = pack_run(model, config, tokenizer, measured, target, max_bytes=max_bytes, say=display.say)
    if tokens is not None:
        display.say(_measure_loss(model, packed, tokens, tokenizer, config, runtime))
    return target, packed


def _measure_loss(
    model: GPT, packed: Packed, tokens: TokenSet, tokenizer: Tokenizer, config: RunConfig, runtime: Runtime
) -> str:
    """The loss before and after packing on the end of the training text. The solver's own estimate is too low for a model
    that was trained for a short time, since its gradients are far from zero."""
    count = min(len(tokens), _MEASURED_TOKENS + 1)
    few = TokenSet([tokens.read(len(tokens) - count, count)])

    def score() -> float:
        return score_chunked(model, few, tokenizer, context=config.batch.sequence_length, runtime=runtime).loss

    before = score()
    model.load_state_dict(unpack_tensors(packed.artifact))
    after = score()
    return (
        f"measured on {count - 1:,} tokens of the training text: {before:.4f} nats a token before packing, {after:.4f} after, "
        f"which costs {round(after - before, 5) + 0.0:+.5f}"  # + 0.0: without a sign before zero
    )


def _training_tokens(data: str | None, config: RunConfig, tokenizer: Tokenizer, display: Display) -> TokenSet | None:
    """Training text encoded by the model's tokenizer. Text named by the user must exist; the run's own may be gone."""
    context, count = config.batch.sequence_length, max(config.quant.calibration_tokens, _MEASURED_TOKENS + 1)
    try:
        return open_training_tokens(data or config.data, tokenizer, context=context, count=count, say=display.say)
    except DataError as error:
        if data is not None:
            raise
        display.say(
            f"nothing is calibrated or measured: the run's training text cannot be read ({error}); --data SPEC names other text"
        )
        return None


def open_training_tokens(spec: str, tokenizer: Tokenizer, *, context: int, count: int, say: Say) -> TokenSet:
    """The training part of a data spec in the tokens of `tokenizer`: more than `context` of them, and enough for `count`."""
    dataset = open_dataset(spec, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.config, say=say)
    tokens = _encode_again(dataset, tokenizer, count)
    if len(tokens) <= context:
        raise DataError(
            f"{spec} is too short to calibrate on: its training part has {len(tokens)} tokens, and a window needs "
            f"{context + 1}; give more text"
        )
    return tokens


def _encode_again(dataset: Dataset, tokenizer: Tokenizer, count: int) -> TokenSet:
    if dataset.tokenizer.fingerprint == tokenizer.fingerprint:
        return dataset.train
    # Twice as many tokens of another tokenizer are enough: tokens differ in length, but not by that much.
    tokens = dataset.train.read(0, min(len(dataset.train), 2 * count))
    documents = np.split(tokens, np.flatnonzero(tokens == dataset.tokenizer.bos_id))
    bos = np.array([tokenizer.bos_id], dtype=np.uint16)
    pieces = [piece for d in documents for piece in (bos, tokenizer.encode(dataset.tokenizer.decode(d)))]
    return TokenSet([np.concatenate(pieces)])
