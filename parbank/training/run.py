"""One run from text to artifact: open the data, refuse what cannot fit, train, score, pack, score what was packed."""

import json
import math
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parbank.artifact.calibrate import calibrate
from parbank.artifact.code import code_bytes
from parbank.artifact.container import read_artifact
from parbank.artifact.load import TOKENIZER, artifact_meta
from parbank.artifact.pack import Packed, pack_solved, pack_tensors, unpack_tensors
from parbank.artifact.sizes import FEW_BITS, check_fits, expected_bytes, overhead_bytes
from parbank.config import from_dict, override, require, to_dict
from parbank.data.dataset import Dataset, open_dataset
from parbank.data.shards import TokenSet
from parbank.data.tokenizer import Tokenizer
from parbank.errors import CheckpointError, ConfigError, DataError
from parbank.eval.compression import compressor_bpb
from parbank.eval.sampling import sample_tokens
from parbank.eval.score import Score, score_chunked
from parbank.files import write_json
from parbank.model import GPT
from parbank.model.gpt import MAX_POSITIONS
from parbank.ops.fp8 import check_device
from parbank.quant.calibration import Calibration
from parbank.runtime import Runtime, check_seed, versions
from parbank.training.checkpoint import find_checkpoint, list_checkpoints, load_checkpoint
from parbank.training.config import RunConfig
from parbank.training.metrics import Display, MetricsWriter, format_seconds, memory_bytes
from parbank.training.telemetry import Reading
from parbank.training.trainer import Trainer
from parbank.training.warmup import count_lookups

SAMPLE_TOKENS = 120  # enough to see whether the model writes words, lines and indentation


@dataclass(frozen=True)
class Result:
    """How a run ended: with a summary, or stopped by a signal with a checkpoint to go on from."""

    summary: dict[str, Any] | None
    stop_signal: int = 0


class Laps:
    """What each part of something that has just begun takes."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def end(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part], self._last = now - self._last, now

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def run(
    config: RunConfig, runtime: Runtime, out: Path, *, resume: bool = False, display: Display | None = None
) -> Result:
    """Trains, scores and packs. Everything a user keeps is in the folder `out`."""
    setup = Laps()
    display = display or Display(enabled=runtime.is_main)
    check_seed(config.seed)
    check_device(config.train.fp8, runtime.device)
    require(
        config.batch.sequence_length <= MAX_POSITIONS,
        f"batch.sequence_length is {config.batch.sequence_length}; a model has {MAX_POSITIONS} positions at most",
    )
    check_size(config, display)
    with _open_folder(out, resume, runtime) as checkpoint:
        dataset = _open_data(config, runtime, display, resume)
        config = _fit_data(config, dataset)
        check_size(config, display, dataset.tokenizer)
        setup.end("data")
        trainer = Trainer(config, runtime, dataset, out)
    try:
        if checkpoint is not None:
            trainer.resume(load_checkpoint(checkpoint), checkpoint)
            display.say(f"resuming from {checkpoint} at step {trainer.step}")
        if runtime.is_main:
            write_json(out / "config.json", to_dict(config))
        display.say(_introduction(trainer))
        setup.end("model")
        trainer.warm_up()
        setup.end("warm-up")
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in setup.seconds.items())
        display.say(f"ready after {setup.total:.1f} s of setup ({parts}); the clock starts now")
        waited = trainer.batches.wait_seconds  # the warm-up's, which is no part of training
        with trainer.watch_signals():
            _train_with_reports(trainer, display)
            saved = trainer.save()
        if trainer.stop_signal:
            again = f"parbank train --resume --out {shlex.quote(str(out))}"
            display.say(f"stopped at step {trainer.step}; saved {saved}; go on with: {again}")
            return Result(None, trainer.stop_signal)
        waited = trainer.batches.wait_seconds - waited
        return Result(finish(trainer, setup, waited, display))
    finally:
        trainer.close()


def finish(trainer: Trainer, setup: Laps, wait_seconds: float, display: Display) -> dict[str, Any]:
    """Scores the averaged weights, packs them, and scores what came out of the file: that is the result."""
    config, runtime, dataset = trainer.config, trainer.runtime, trainer.dataset
    with trainer.averages.applied():
        before = _score(trainer, display, "scoring")
        display.say(f"val bpb {before.bpb:.4f} before packing; packing")
        path = trainer.out / "model.pbk"
        measured = calibrate_model(trainer.model, config, dataset.train, runtime, display)
        packed = (
            pack_model(trainer.model, config, dataset.tokenizer, measured, say=display.say) if runtime.is_main else None
        )
        if packed is not None:
            packed.write(path)
            trainer.model.load_state_dict(unpack_tensors(read_artifact(path)))
        for parameter in trainer.model.parameters():
            runtime.broadcast(parameter.data)
        after = _score(trainer, display, "scoring the packed model")
        summary = _summarise(trainer, before, after, setup, wait_seconds)
        if packed is not None:
            display.say("writing a sample, and compressing the same text with zlib, xz and zstd")
            summary |= _packed_summary(trainer, packed)
    if runtime.is_main:
        write_json(trainer.out / "summary.json", summary)
    return summary


def calibrate_model(
    model: GPT, config: RunConfig, tokens: TokenSet, runtime: Runtime, display: Display
) -> Calibration | None:
    """What the solver needs to know of the loss; nothing where it is not asked for. Every rank takes part."""
    if config.quant.method != "solver" or not config.quant.calibration_tokens:
        return None
    with display.progress("calibrating") as progress:
        return calibrate(
            model,
            tokens,
            context=config.batch.sequence_length,
            count=config.quant.calibration_tokens,
            runtime=runtime,
            progress=progress,
        )


def pack_model(
    model: GPT,
    config: RunConfig,
    tokenizer: Tokenizer,
    calibration: Calibration | None = None,
    *,
    max_bytes: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Packed:
    """The artifact of a model's current weights, under the run's cap or another."""
    cap = config.budget.max_bytes if max_bytes is None else max_bytes
    extra = {TOKENIZER: tokenizer.to_bytes()}
    code = code_bytes() if config.budget.count_code else 0
    tensors, meta = model.state_dict(), describe_run(config)
    if config.quant.method == "rows":
        return pack_tensors(tensors, config.quant, max_bytes=cap, meta=meta, extra_sections=extra, code_bytes=code)
    return pack_solved(
        tensors,
        config.quant,
        calibration or Calibration(),
        max_bytes=cap,
        meta=meta,
        extra_sections=extra,
        code_bytes=code,
        say=say,
    )


def check_size(config: RunConfig, display: Display, tokenizer: Tokenizer | None = None) -> None:
    """Refuses, before any work is done, a model that no tokenizer would let fit; with the tokenizer, one that could not be
    promised to fit."""
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in GPT(config.model).state_dict().items()}
    # a SentencePiece model of n pieces takes at least 10 n bytes (score 4, text 1, tags and lengths 5) and about 18 n; twice
    # that is more than any we have seen
    model = bytes(10 * config.model.vocab_size) if tokenizer is None else tokenizer.to_bytes()
    overhead, cap = overhead_bytes(describe_run(config), {TOKENIZER: model}), config.budget.max_bytes
    code = code_bytes() if config.budget.count_code else 0
    reserve = 26 * config.model.vocab_size + 4096 if tokenizer is None else 0
    check_fits(shapes, config.quant, cap, overhead=overhead, code_bytes=code, reserve=reserve)
    if tokenizer is not None:
        return
    parameters = sum(math.prod(shape) for shape in shapes.values())
    overhead += code + 8 * config.model.vocab_size
    bits = 8 * max(cap - overhead, 0) / parameters
    expected = expected_bytes(shapes, config.quant, overhead=overhead)
    if config.quant.method == "solver" and bits < FEW_BITS:
        display.say(
            f"note: {cap:,} bytes leave {bits:.1f} bits for each of {parameters:,} parameters; a smaller model (model.width, "
            "model.layers) would probably do better at this cap"
        )
    elif expected > cap:
        display.say(
            f"note: at {config.quant.matrix_bits} bits the artifact may come to {expected:,} bytes; where it does, matrices are "
            f"stored more coarsely until it fits {cap:,}"
        )


def load_run_config(out: Path, *assignments: str) -> RunConfig:
    """The config of an earlier run, with changes."""
    try:
        values = json.loads((out / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{out} holds no run to resume ({error}); give --out the folder of an earlier run"
        ) from error
    return override(from_dict(RunConfig, values), *assignments)


@contextmanager
def _open_folder(out: Path, resume: bool, runtime: Runtime) -> Iterator[Path | None]:
    """The checkpoint to go on from, or None in a folder that no run has used. That it can be written is tried at once, not
    after the data is prepared; when what follows fails, the folder goes again."""
    if resume:
        yield find_checkpoint(out)
        return
    if list_checkpoints(out / "checkpoint") or (out / "summary.json").exists():
        raise ConfigError(f"{out} already holds a run; go on with it by --resume, or choose another --out")
    if not runtime.is_main:
        yield None
        return
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    metrics = out / "metrics.jsonl"
    try:
        out.mkdir(parents=True, exist_ok=True)
        metrics.touch()
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror or error}; choose another --out") from error
    try:
        yield None
    except BaseException:
        with suppress(OSError):  # a folder that somebody else has put something into meanwhile stays
            if made:
                metrics.unlink()
            for folder in made:
                folder.rmdir()
        raise


def _open_data(config: RunConfig, runtime: Runtime, display: Display, resume: bool) -> Dataset:
    """The first rank prepares what is missing; the others then find it ready. Too little text is refused."""
    elsewhere = "; if the run's text lies elsewhere now, say where by --data" if resume else ""

    def work() -> Dataset:
        dataset = open_dataset(config.data, vocab_size=config.model.vocab_size, say=display.say)
        dataset.require_length(config.batch.sequence_length)
        return dataset

    try:
        return runtime.in_turn(work)
    except DataError as error:
        raise DataError(f"{error}{elsewhere}") from error


def _fit_data(config: RunConfig, dataset: Dataset) -> RunConfig:
    """Ready-made shards bring their own vocabulary: the model must have the same."""
    tokenizer = dataset.tokenizer
    if tokenizer.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f"the data has a vocabulary of {tokenizer.vocab_size} tokens and the model one of {config.model.vocab_size}; "
            f"add --set model.vocab_size={tokenizer.vocab_size}"
        )
    return override(config, f"model.bos_id={tokenizer.bos_id}")


def _introduction(trainer: Trainer) -> str:
    config, data = trainer.config, trainer.dataset
    parameters = sum(p.numel() for p in trainer.model.parameters())
    return (
        f"{config.recipe}: {parameters:,} parameters on {trainer.runtime.device} x {trainer.runtime.world}, "
        f"{len(data.train):,} training tokens, {len(data.val):,} validation tokens; "
        f"{config.batch.batch_tokens:,} tokens a step in {trainer.passes_in(trainer.stages[-1])} passes a rank"
        + (f", after {len(config.batch.stages)} stages of other batches" if config.batch.stages else "")
    )


def _train_with_reports(trainer: Trainer, display: Display) -> None:
    """The loop, with a row of metrics every log_every steps and a line or a bar for the person watching."""
    config, first = trainer.config, trainer.step
    writer = MetricsWriter(trainer.out, resume_step=first) if trainer.runtime.is_main else None
    last = {
        "step": first,
        "tokens": trainer.tokens,
        "seconds": trainer.clock.seconds(),
        "wait": trainer.batches.wait_seconds,
    }
    latest: Reading | None = None

    def log(reading: Reading) -> None:
        """One row, over the steps since the last one."""
        done = reading.step + 1
        seconds = trainer.clock.seconds()
        rate = (reading.tokens - last["tokens"]) / max(seconds - last["seconds"], 1e-9)
        wait = (trainer.batches.wait_seconds - last["wait"]) / (done - last["step"])
        last.update(step=done, tokens=reading.tokens, seconds=seconds, wait=trainer.batches.wait_seconds, rate=rate)
        if writer is not None:
            row = {"step": done, "tokens": reading.tokens, "seconds": seconds, "loss": reading.loss}
            row |= {
                "lr": reading.lr_share * config.optim.matrix_lr,
                "grad_norm": reading.grad_norm,
                "tokens_per_second": rate,
            }
            row |= {"data_wait": wait, "memory": memory_bytes(trainer.runtime.device), "skipped": trainer.skipped}
            writer.write(row)

    def report(reading: Reading) -> None:
        nonlocal latest
        latest, done = reading, reading.step + 1
        due = done % config.train.log_every == 0 or done == first + 1
        if due:
            log(reading)
        left = format_seconds(trainer.budget.seconds_left(done))
        status = f"step {done:,}  loss {reading.loss:.4f}  {last['rate']:,.0f} tokens/s  {left} left"
        display.update(trainer.budget.spent(done), status, line=due)

    display.start("training")
    try:
        trainer.train(report)
        if latest is not None and last["step"] <= latest.step:  # the last step has a row, wherever it falls
            log(latest)
    finally:
        display.stop()
        if writer is not None:
            writer.close()
    if latest is not None:
        seconds = format_seconds(trainer.clock.seconds())
        display.say(f"trained {trainer.step:,} steps in {seconds}; the last had loss {latest.loss:.4f}")


def _score(trainer: Trainer, display: Display, title: str) -> Score:
    with display.progress(title) as progress:
        return score_chunked(
            trainer.model,
            trainer.dataset.val,
            trainer.dataset.tokenizer,
            context=trainer.config.batch.sequence_length,
            runtime=trainer.runtime,
            progress=progress,
        )


def _summarise(trainer: Trainer, before: Score, after: Score, setup: Laps, wait_seconds: float) -> dict[str, Any]:
    config, runtime, dataset = trainer.config, trainer.runtime, trainer.dataset
    seconds = trainer.clock.seconds()
    tokens = trainer.tokens
    return {
        "recipe": config.recipe,
        "val_bpb": after.bpb,
        "val_loss": after.loss,
        "val_bpb_before_packing": before.bpb,
        "val_bytes": after.bytes,
        "val_tokens": after.tokens,
        "val_text_sha256": dataset.val_text_sha256,
        "dataset": dataset.fingerprint,
        "max_bytes": config.budget.max_bytes,
        "steps": trainer.step,
        "skipped_steps": trainer.skipped,
        "tokens": tokens,
        "tokens_per_second": tokens / max(seconds, 1e-9),
        "train_seconds": seconds,
        "setup_seconds": setup.total,
        "setup_parts": setup.seconds,
        "compile_cache": count_lookups().start,
        "data_wait_seconds": wait_seconds,
        "memory_bytes": memory_bytes(runtime.device),
        "params": sum(p.numel() for p in trainer.model.parameters()),
        "seed": config.seed,
        "world_size": runtime.world,
        "device": torch.cuda.get_device_name(runtime.device) if runtime.is_cuda else "cpu",
        "versions": versions(),
    }


def _packed_summary(trainer: Trainer, packed: Packed) -> dict[str, Any]:
    """The part of the summary that only the first rank knows."""
    config, dataset = trainer.config, trainer.dataset
    code = code_bytes() if config.budget.count_code else 0
    tokens_out = list(
        sample_tokens(trainer.model, dataset.tokenizer, tokens=SAMPLE_TOKENS, context=config.batch.sequence_length)
    )
    return {
        "artifact_bytes": packed.size,
        "code_bytes": code,
        "matrix_q": packed.matrix_q,
        "compressors_bpb": compressor_bpb(dataset.val_text()),
        "sample": dataset.tokenizer.decode(tokens_out),
    }


def describe_run(config: RunConfig) -> dict[str, Any]:
    """What the artifact of a run says about itself."""
    return artifact_meta(
        config.model, context=config.batch.sequence_length, data=config.data, recipe=config.recipe, seed=config.seed
    )
