"""One run from text to artifact: open the data, refuse a model that cannot fit, train, score, pack, and score the packed
file.
"""

import json
import lzma
import shlex
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from parbank.artifact.record import read_back
from parbank.config import override, to_dict
from parbank.data.dataset import Dataset, open_dataset
from parbank.data.progress import say_nothing
from parbank.data.proof import NOT_PROVED
from parbank.data.sources import absolute_spec
from parbank.display import Display
from parbank.errors import ConfigError, DataError
from parbank.eval.compression import compressor_bpb
from parbank.eval.details import Examined, examine
from parbank.files import write_file, write_json
from parbank.gpu import other_processes
from parbank.runtime import Runtime
from parbank.threads import run_in_background, use_threads
from parbank.training.agreement import compare_settings, compare_state
from parbank.training.checkpoint import load_checkpoint
from parbank.training.checks import check_memory, check_settings, check_size
from parbank.training.compiled import forget_compiled_graphs, use_compile_cache
from parbank.training.config import RunConfig
from parbank.training.details import describe_place
from parbank.training.folder import open_folder
from parbank.training.laps import Laps
from parbank.training.metrics import Metrics
from parbank.training.pack import calibrate_model, pack_run
from parbank.training.reports import introduce, train_with_reports
from parbank.training.summary import describe_start, summarise, summarise_packed
from parbank.training.threads import plan_threads
from parbank.training.trainer import Trainer, new_model
from parbank.training.warmup import compile_aside

DETAILS, PAGE = "details for the page", "page"
"""Parts of the time after training that only the page of a run needs."""
WritePage = Callable[[Path, dict[str, Any]], object]


@dataclass(frozen=True)
class Result:
    """The end of a run: a summary, or a signal that stopped it with a checkpoint to resume from."""

    summary: dict[str, Any] | None
    stop_signal: int = 0


def run(
    config: RunConfig,
    runtime: Runtime,
    out: Path,
    *,
    resume: bool = False,
    quiet: bool = False,
    display: Display | None = None,
    threads: int | None = None,
    write_page: WritePage | None = None,
) -> Result:
    """Trains, scores and packs. Everything that a user keeps is in the folder `out`. `display` replaces the usual display,
    which prints nothing if `quiet`. `threads` are chosen by the free cores if None. `write_page` makes the page of the run
    from its folder and its summary."""
    setup = Laps()
    display = display or Display(enabled=runtime.is_main and not quiet)
    compare_settings(config, runtime, resume=resume)
    config = replace(config, data=absolute_spec(config.data))
    check_settings(config, runtime)
    check_memory(config, runtime, display)
    check_size(config, display)
    setup.end("checks")
    with use_threads(threads) as most, open_folder(out, resume, runtime) as folder:
        chosen = plan_threads(config, runtime, most, given=threads is not None, say=display.say)
        use_compile_cache()
        with ThreadPoolExecutor(1) as aside, compile_aside(config, runtime, display.say) as kernels:
            others = aside.submit(other_processes, runtime.device) if runtime.is_cuda and runtime.is_main else None
            dataset = _open_data(config, runtime, display, resume, apart=kernels.compiles)
            config = _fit_data(config, dataset)
            check_size(config, display, dataset.tokenizer)
            setup.end("data")
            model = new_model(config)
            setup.end("weights")
        setup.end("kernels")
        for process in others.result() if others else ():
            display.say(f"warning: {process} on this GPU; if it computes, training is slower: end it, or wait for it")
        trainer = Trainer(config, runtime, dataset, out, chosen, model)
        trainer.say, trainer.rehearsed = display.say, kernels.ready
        try:
            if folder.checkpoint is not None:
                trainer.resume(load_checkpoint(folder.checkpoint), folder.checkpoint)
                display.say(f"resuming from {folder.checkpoint} at step {trainer.step}")
            elif resume:
                display.say(f"no checkpoint in {out} to resume from; the run starts at its beginning")
            compare_state(trainer, folder.checkpoint)
            folder.started = True
            return _train(trainer, setup, display, write_page)
        finally:
            trainer.close()
            chosen.close()
            if trainer.compiled or config.train.compile:
                forget_compiled_graphs()


def _train(trainer: Trainer, setup: Laps, display: Display, write_page: WritePage | None) -> Result:
    """From the loaded state to the summary, or to a checkpoint if a signal stops the run."""
    out = trainer.out
    if trainer.runtime.is_main:
        # A summary is there only if the run has ended with this config: the old one goes first, the new one comes last.
        for name in ("summary.json", "details.json", "report.html"):
            (out / name).unlink(missing_ok=True)
        write_json(out / "config.json", to_dict(trainer.config))
        _write_details(out, describe_start(trainer), display, when="started_at")
    display.say(introduce(trainer))
    setup.end("model")
    trainer.compile()
    setup.end("compilation")
    if trainer.config.train.warmup_steps:
        display.say("warming up: the first steps compile and allocate, and are then undone")
    trainer.warm_up()
    setup.end("warm-up")
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in setup.seconds.items())
    display.say(f"ready after {setup.total:.1f} s of setup ({parts}); the clock starts now")
    with closing(Metrics(trainer, display.say)) as metrics:
        with trainer.watch_signals():
            try:
                train_with_reports(trainer, display, metrics=metrics)
            except DataError as error:  # such as a shard that was cut short
                raise DataError(f"{error}; {_keep(trainer)}") from error
            saved = trainer.save() if trainer.stop_signal else trainer.try_to_save()
            # A signal may come while the first rank saves: all ranks stop, or none.
            trainer.stop_signal = int(trainer.runtime.agree([float(trainer.stop_signal)])[0])
        if trainer.stop_signal:
            display.say(f"stopped at step {trainer.step}; saved {saved}; continue with: {_resume_command(out)}")
            return Result(None, trainer.stop_signal)
        return Result(finish(trainer, setup, display, metrics, write_page))


def _keep(trainer: Trainer) -> str:
    """Saves the weights of the last whole step and says how to continue. Every rank must call it."""
    saved = trainer.try_to_save()
    kept = f"step {trainer.step} is saved as {saved}" if saved else "older checkpoints are kept"
    return f"{kept}; once the data is back, continue with: {_resume_command(trainer.out)}"


def _resume_command(out: Path) -> str:
    return f"parbank train --resume --out {shlex.quote(str(out))}"


def finish(
    trainer: Trainer,
    setup: Laps,
    display: Display,
    metrics: Metrics,
    write_page: WritePage | None = None,
) -> dict[str, Any]:
    """Scores the averaged weights, packs them, and scores the packed file. The last score is the result."""
    config, runtime, dataset = trainer.config, trainer.runtime, trainer.dataset
    laps = Laps()
    with trainer.averages.applied():
        text = dataset.val_text() if runtime.is_main else b""
        # xz takes seconds on one core, or minutes: it runs in parallel with everything below, and does not delay an error.
        compress = partial(compressor_bpb, text, display.say)
        compressed = run_in_background(compress, "parbank-compressors") if runtime.is_main else None
        before = _examine(trainer, display, "scoring").score
        laps.end("scoring")
        display.say(f"val bpb {before.bpb:.4f} before packing; packing")
        path = trainer.out / "model.pbk"
        measured = calibrate_model(trainer.model, config, dataset.train, runtime, display)
        laps.end("calibration")
        packed, details, recorded = None, dict[str, Any](), 0.0
        if runtime.is_main:
            packed = pack_run(trainer.model, config, dataset.tokenizer, measured, path, say=display.say)
            tensors, details, recorded = read_back(path, trainer.model.state_dict(), measured)
            trainer.model.load_state_dict(tensors)
        for parameter in trainer.model.parameters():
            runtime.broadcast(parameter.data)
        laps.end("packing")
        laps.move(recorded, "packing", DETAILS)
        after = _examine(trainer, display, "scoring the packed model, and writing samples", detailed=True)
        laps.end("scoring the packed model")
        laps.move(after.sample_seconds, "scoring the packed model", "sample")
        laps.move(after.detail_seconds, "scoring the packed model", DETAILS)
        summary = summarise(trainer, before, after.score, setup.seconds)
        if packed is not None and compressed is not None:
            display.say("compressing the same text with zlib, xz and zstd")
            summary |= summarise_packed(packed, text, after.details["samples"][0]["text"])
            summary["compressors_bpb"] = _wait_for(compressed, display)
        laps.end("compressors")
    if runtime.is_main:
        _write_details(trainer.out, details | after.details, display, metrics=metrics)
    laps.end(DETAILS)
    if runtime.is_main and write_page is not None:
        _write_page(write_page, trainer.out, summary | _describe_finish(laps), display)
        laps.end(PAGE)
    summary |= _describe_finish(laps)
    if runtime.is_main:
        write_json(trainer.out / "summary.json", summary)
    return summary


def _describe_finish(laps: Laps) -> dict[str, Any]:
    """The entries of a summary about the time after training."""
    return {"finish_seconds": laps.total, "finish_parts": dict(laps.seconds)}


def _write_details(
    out: Path, details: dict[str, Any], display: Display, *, metrics: Metrics | None = None, when: str = "ended_at"
) -> None:
    """Writes details.json. If that fails, the run goes on with a warning."""
    try:
        details |= describe_place(when)
        if metrics is not None:
            metrics.write_details(details)
        write_file(out / "details.json", json.dumps(details).encode())
    except Exception as error:
        display.say(f"warning: details.json could not be written ({type(error).__name__}: {error})")


def _write_page(write: WritePage, out: Path, summary: dict[str, Any], display: Display) -> None:
    """Writes the page of the run. If that fails, the run goes on with a warning."""
    try:
        write(out, summary)
    except Exception as error:
        display.say(f"warning: the page of the run could not be written ({type(error).__name__}: {error})")


def _wait_for(compressed: Future[dict[str, float]], display: Display) -> dict[str, float]:
    """Waits for the compressors. If they fail, the run goes on with a note."""
    try:
        return compressed.result()
    except (MemoryError, OSError, lzma.LZMAError) as error:
        display.say(f"note: the text could not be compressed for comparison ({type(error).__name__}: {error})")
        return {}


def _open_data(config: RunConfig, runtime: Runtime, display: Display, resume: bool, *, apart: bool) -> Dataset:
    """The first rank prepares missing data; the others then find it ready. Too little text is refused. `apart`: in another
    process, beside threads that compile here."""
    elsewhere = "; if the run's text lies elsewhere now, say where by --data" if resume else ""

    def work() -> Dataset:
        length, say = config.batch.sequence_length, display.say if display.enabled else say_nothing
        dataset = open_dataset(
            config.data,
            vocab_size=config.model.vocab_size,
            tokenizer=config.tokenizer,
            sequence_length=length,
            say=say,
            apart=apart,
        )
        if dataset.text == NOT_PROVED:
            say(
                f"note: nothing compared the validation tokens of {config.data} with its text; the result says `not proved`"
            )
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


def _examine(trainer: Trainer, display: Display, title: str, *, detailed: bool = False) -> Examined:
    with display.progress(title) as progress:
        return examine(
            trainer.model,
            trainer.dataset.val,
            trainer.dataset.tokenizer,
            context=trainer.config.batch.sequence_length,
            runtime=trainer.runtime,
            detailed=detailed,
            progress=progress,
            say=display.say,
        )
