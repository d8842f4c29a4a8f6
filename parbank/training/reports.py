"""Training with reports: rows of metrics for the loggers, a bar or lines for the display."""

import math
from collections.abc import Callable, Sequence
from contextlib import closing

from parbank.display import Display, format_seconds
from parbank.training.metrics import Metrics
from parbank.training.telemetry import Reading
from parbank.training.trainer import Report, Trainer

BLOCKS = "▁▂▃▄▅▆▇█"

Loop = Callable[[Trainer, Report], None]
"""Runs a trainer to its end, and passes every reading to the report."""


def introduce(trainer: Trainer) -> str:
    """One line about the run that is about to start."""
    config, data = trainer.config, trainer.dataset
    parameters, main = sum(p.numel() for p in trainer.model.parameters()), trainer.stages[-1]
    return (
        f"{config.recipe}: {parameters:,} parameters on {trainer.runtime.device} x {trainer.runtime.world}, "
        f"{len(data.train):,} training tokens, {len(data.val):,} validation tokens; "
        f"{config.batch.batch_tokens:,} tokens a step in {trainer.passes_in(main)} passes a rank"
        + (f", in windows of {main.describe_lengths()}" if config.batch.mixed_lengths else "")
        + (f", after {len(config.batch.stages)} stages of other batches" if config.batch.stages else "")
    )


def train_plainly(trainer: Trainer, report: Report) -> None:
    trainer.train(report)


def train_with_reports(
    trainer: Trainer, display: Display, loop: Loop = train_plainly, metrics: Metrics | None = None
) -> None:
    """The loop, with a row every log_every steps, after the first and the last step, and with every validation. Another
    `loop` may watch the readings, too. `metrics` stay open; if not given, they are made and closed here."""
    if metrics is None:
        with closing(Metrics(trainer, display.say)) as own:
            return train_with_reports(trainer, display, loop, own)
    first = trainer.step
    latest: Reading | None = None
    validated: list[float] = []

    def report(reading: Reading) -> None:
        nonlocal latest
        latest, done = reading, reading.step + 1
        due = done % trainer.config.train.log_every == 0 or done == first + 1 or reading.val_bpb is not None
        if due:
            metrics.add(reading)
        if reading.val_bpb is not None:
            validated.append(reading.val_bpb)
        left = format_seconds(trainer.budget.seconds_left(done))
        score = describe_validation(validated, curve=display.console.is_terminal)
        status = (
            f"step {done:,}  loss {reading.loss:.4f}  {score}{metrics.tokens_per_second:,.0f} tokens/s  {left} left"
        )
        display.update(trainer.budget.spent(done), status, line=due)

    display.start("training")
    try:
        loop(trainer, report)
        if latest is not None and metrics.step <= latest.step:
            metrics.add(latest)
    finally:
        display.stop()
    if latest is not None:
        seconds = format_seconds(trainer.clock.seconds())
        display.say(f"trained {trainer.step:,} steps in {seconds}; the last had loss {latest.loss:.4f}")


def describe_validation(scores: Sequence[float], *, curve: bool) -> str:
    """The last score for the status line, and on a terminal the curve so far; empty before the first."""
    if not scores:
        return ""
    return f"val {scores[-1]:.4f}  " + (f"{sparkline(scores)}  " if curve and len(scores) > 1 else "")


def sparkline(values: Sequence[float], width: int = 12) -> str:
    """The last values as blocks of eight heights; a gap for one that is not finite."""
    shown = values[-width:]
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite) or 1.0
    return "".join(BLOCKS[round(7 * (v - low) / span)] if math.isfinite(v) else " " for v in shown)
