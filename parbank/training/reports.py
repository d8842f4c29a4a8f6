"""Training with reports: rows of metrics for the loggers, a bar or lines for the display."""

from collections.abc import Callable

from parbank.training.display import Display, format_seconds
from parbank.training.metrics import Metrics
from parbank.training.telemetry import Reading
from parbank.training.trainer import Report, Trainer

Loop = Callable[[Trainer, Report], None]
"""Runs a trainer to its end, and hands every reading on."""


def introduce(trainer: Trainer) -> str:
    """One line about the run that is about to start."""
    config, data = trainer.config, trainer.dataset
    parameters = sum(p.numel() for p in trainer.model.parameters())
    return (
        f"{config.recipe}: {parameters:,} parameters on {trainer.runtime.device} x {trainer.runtime.world}, "
        f"{len(data.train):,} training tokens, {len(data.val):,} validation tokens; "
        f"{config.batch.batch_tokens:,} tokens a step in {trainer.passes_in(trainer.stages[-1])} passes a rank"
        + (f", after {len(config.batch.stages)} stages of other batches" if config.batch.stages else "")
    )


def train_plainly(trainer: Trainer, report: Report) -> None:
    trainer.train(report)


def train_with_reports(trainer: Trainer, display: Display, loop: Loop = train_plainly) -> None:
    """The loop, with a row every log_every steps and after the first and the last step. Another `loop` may watch the
    readings, too."""
    first = trainer.step
    latest: Reading | None = None
    metrics = Metrics(trainer, display.say)

    def report(reading: Reading) -> None:
        nonlocal latest
        latest, done = reading, reading.step + 1
        due = done % trainer.config.train.log_every == 0 or done == first + 1
        if due:
            metrics.add(reading)
        left = format_seconds(trainer.budget.seconds_left(done))
        status = f"step {done:,}  loss {reading.loss:.4f}  {metrics.tokens_per_second:,.0f} tokens/s  {left} left"
        display.update(trainer.budget.spent(done), status, line=due)

    display.start("training")
    try:
        loop(trainer, report)
        if latest is not None and metrics.step <= latest.step:
            metrics.add(latest)
    finally:
        display.stop()
        metrics.close()
    if latest is not None:
        seconds = format_seconds(trainer.clock.seconds())
        display.say(f"trained {trainer.step:,} steps in {seconds}; the last had loss {latest.loss:.4f}")
