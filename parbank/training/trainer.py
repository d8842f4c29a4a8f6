"""The training loop.

    trainer = Trainer(config, runtime, dataset, out)
    trainer.warm_up()        # compiles everything, then restores its state
    trainer.train()          # until the budget is spent, or a signal stops it

The loop never drains the device, and waits for it on log steps only. See telemetry.py for numbers, budget.py for time.
"""

import copy
import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from parbank.config import to_dict
from parbank.data.batches import BatchStream
from parbank.data.dataset import Dataset
from parbank.data.prefetch import Prefetcher
from parbank.errors import CheckpointError, DataError, TrainingError
from parbank.model import GPT
from parbank.ops.rehearsal import can_rehearse, rehearsal
from parbank.optim.parallel_muon import ParallelMuon
from parbank.precision import Precision, autocast, scoring_precision, training_precision
from parbank.runtime import Runtime, seed_everything, versions
from parbank.training.averaging import Averages
from parbank.training.budget import Budget, Clock, suspended_seconds
from parbank.training.checkpoint import (
    MALFORMED,
    first_line,
    list_checkpoints,
    random_state,
    restore_random_state,
    save_checkpoint,
)
from parbank.training.compiled import count_lookups, keep_compiled_graphs
from parbank.training.config import RunConfig, Stage
from parbank.training.groups import load_optimizer, parameter_groups
from parbank.training.inductor import compile_model, find_compiler, wants_inductor
from parbank.training.passes import Passes, cut_windows, take_batch
from parbank.training.signals import watch_signals
from parbank.training.telemetry import Reading, Telemetry
from parbank.training.threads import Threads
from parbank.training.validation import Validator

Report = Callable[[Reading], None]


def new_model(config: RunConfig) -> GPT:
    """The untrained model of a run, in host memory: the same for the same seed."""
    seed_everything(config.seed)
    return GPT(config.model)


class Trainer:
    """A model, its optimizer, its data and its clock: everything that a checkpoint holds."""

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        dataset: Dataset,
        out: Path,
        threads: Threads | None = None,
        model: GPT | None = None,
    ) -> None:
        """`threads` chooses the number of threads; if None, torch's number stays. `model`: the result of
        `new_model`, if the caller has it already."""
        self.config, self.runtime, self.dataset, self.out = config, runtime, dataset, out
        self.model = (model or new_model(config)).to(runtime.device)
        quant, train = config.quant, config.train
        self.model.fp8, self.model.dropout, self.model.token_dropout = train.fp8, train.dropout, train.token_dropout
        self.fake = None
        if quant.qat_share:
            self.fake = self.model.banks.quantise_in_training(bits=quant.qat_bits, rounding=quant.qat_rounding)
        forward: Callable[..., Tensor] = self.model
        self.compiled = wants_inductor(config, runtime, sum(p.numel() for p in self.model.parameters()))
        if config.train.compile and runtime.is_cuda:
            keep_compiled_graphs()
            forward = torch.compile(self.model, dynamic=False)
        self.graphed = config.train.cuda_graph and runtime.is_cuda
        self.optimizer = ParallelMuon(
            parameter_groups(self.model, config.optim),
            max_norm=config.optim.clip or None,
            cuda_graph=self.graphed and runtime.world == 1,
        )
        self.averages = Averages(self.model, config.average)
        self.stream = self._make_stream()
        self.stages = config.batch.plan()
        count = self.passes_in(self.stages[-1])
        precision = self._choose_precision()
        self.passes = Passes(
            forward, self.model, runtime.device, count, graph=config.train.cuda_graph, precision=precision
        )
        self.batches = Prefetcher(self.stream, device=runtime.device, depth=config.batch.prefetch)
        self.isolated = config.model.bos_id if config.model.isolate_documents and runtime.is_cuda else None
        self.clock = Clock()
        self.budget = Budget(config.budget, config.batch.batch_tokens, self.clock)
        self.telemetry = Telemetry(runtime.device)
        self.validator = Validator(config, self.model, self.averages, dataset, runtime)
        self.threads = threads or Threads(torch.get_num_threads(), measures=False)
        self.step = self.skipped = 0
        self.stop_signal = 0
        self.stalled_seconds = 0.0
        self.recompilations = 0  # kernels and graphs built while the clock ran
        self.say: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
        self.rehearsed = False  # whether every kernel is ready
        self._untimed_wait = 0.0  # for batches of the warm-up, less that of training before a resume
        self._tried_to_compile = False
        self._skipping = False  # the last step seen was skipped
        self._stuck = False  # too many steps in a row were skipped
        self._validates = False  # a validation follows the current step
        self._last_save = time.monotonic()

    def train(self, report: Report = lambda reading: None) -> None:
        """Runs until the budget is spent or `stop_signal` is set. Then no step is in flight and the clock is stopped."""
        self.compile()
        self.threads.look(least_seconds=0.5)
        self.telemetry.restart()
        self.clock.start()
        self.validator.start(self.step, self.clock.seconds())
        suspended, built = suspended_seconds(), count_lookups().built
        self._last_save = time.monotonic()
        while (spent := self._agree_to_go_on(report)) is not None:
            share = self._schedule(spent)
            loss = self._accumulate_gradients(self._stage_at(spent))
            self._update_weights(share)
            self._record(loss, share)
            self.step += 1
            self._report(self._collect(), report)
            self.threads.look()
        self._report(self.telemetry.collect(drain=True), report)
        self.runtime.synchronize()
        self.clock.stop()
        self.recompilations += count_lookups().built - built
        if (asleep := suspended_seconds() - suspended) > 1:
            self.say(f"warning: the machine was suspended for {asleep:.0f} s, which the training clock does not count")
        self._end_if_lost()
        if self.fake is not None:
            self.fake.turn(False)  # the weights themselves are scored and packed

    def compile(self) -> None:
        """Compiles the passes on a CPU, if this run does: by a pass of every length. A failure costs speed only. A second
        call does nothing."""
        if not self.compiled or self._tried_to_compile:
            return
        self._tried_to_compile = True
        began = time.perf_counter()
        if find_compiler() is None:
            self._run_plainly("there is no C++ compiler; install g++ or clang++")
            return
        self.say(
            "compiling the training step, before the clock starts: up to a minute the first time, longer on a busy machine, a "
            "few seconds later on"
        )
        self.passes.use(compile_model(self.model, self.threads.most))
        rows, random = self.stream.micro_sequences, random_state()
        try:
            for length in self.config.batch.all_lengths():
                empty = torch.zeros(rows, self.stream.sequence_length + 1, dtype=torch.int64)
                self.passes.rehearse(cut_windows(empty, length))
        except Exception as error:  # whatever a compiler, its headers, its cache or the linker may do wrong
            self._run_plainly(f"compiling failed ({first_line(error)})")
        else:
            self.say(f"compiled in {time.perf_counter() - began:.1f} s")
        finally:
            self.model.zero_grad(set_to_none=True)
            restore_random_state(random)

    def _run_plainly(self, why: str) -> None:
        self.compiled = False
        self.passes.use(self.model)
        self.say(
            f"note: {why}. Training runs as plain PyTorch, about a quarter slower; train.compile=false does so silently"
        )

    def warm_up(self) -> None:
        """Runs real steps, so that everything is compiled and allocated, and then restores the earlier state."""
        self.compile()
        if not self.config.train.warmup_steps:
            return
        before = copy.deepcopy(self.state_dict())
        self.threads.look(least_seconds=0.5)
        if self.runtime.is_cuda and not self.rehearsed and can_rehearse():
            self.rehearse()
        for stage in self.stages:
            for _ in range(self.config.train.warmup_steps):
                self._schedule(0.0)
                self._accumulate_gradients(stage)
                self._update_weights(1.0)
        if self.validator.is_on:
            self.validator.measure()
        self.load_state_dict(before)
        self.runtime.synchronize()

    def rehearse(self, then: Callable[[], None] = lambda: None) -> None:
        """Compiles every kernel of a step, and of `then`, in parallel. Weights and state are garbage afterwards."""
        with rehearsal(self.runtime.device):
            for length in self.config.batch.all_lengths():
                self._schedule(0.0)
                self.passes.rehearse(*take_batch(self.batches, length, self.isolated))
            self.optimizer.step()
            then()

    def _agree_to_go_on(self, report: Report, may_save: bool = True) -> float | None:
        """The share of the budget spent, equal on all ranks; None when any rank must stop. Saves when a checkpoint is due."""
        pending = self.telemetry.in_flight
        over = self._stuck or not self.budget.allows(self.step, pending)
        minutes = self.config.train.checkpoint_minutes
        due = may_save and minutes > 0 and time.monotonic() - self._last_save > 60 * minutes
        left = self.budget.seconds_left(self.step) if self.budget.limit is not None else math.inf
        validates = self.validator.is_due(self.step + 1, self.clock.seconds(), left)
        spent, over_any, signalled, save, validates_any = self.runtime.agree(
            [self.budget.spent(self.step, pending), float(over), float(self.stop_signal), float(due), float(validates)]
        )
        self.stop_signal, self._validates = int(signalled), bool(validates_any)
        if save and not over_any:
            self._report(self.telemetry.collect(drain=True), report)
            if not any(self.runtime.agree([float(not self._is_healthy())])):
                self.try_to_save()
                self.telemetry.restart()  # the next step did not take the time of saving
                return self._agree_to_go_on(report, may_save=False)  # but the clock did
        return None if over_any or signalled else spent

    def _collect(self) -> list[Reading]:
        """The steps that have finished. A validation ends with no step in flight, and its time is no step's."""
        if not self._validates:
            return self.telemetry.collect(wait=self._must_look())
        readings = self.telemetry.collect(drain=True)
        if self.fake is not None:
            self.fake.turn(False)  # the next step sets it again
        found = self.validator.measure()
        self.validator.start(self.step, self.clock.seconds())
        self.telemetry.restart()
        return [*readings[:-1], replace(readings[-1], val_bpb=found)]

    def _must_look(self) -> bool:
        """Log steps wait for the device. So does the second step: the clock needs one measured step before it allows
        more."""
        return self.step % self.config.train.log_every == 0 or not self.budget.knows_step_time

    def _schedule(self, spent: float) -> float:
        """Sets this step's learning rates and momentum, and switches quantisation on when due. Returns the learning rate
        as a share of its peak."""
        optim = self.config.optim
        rates = optim.rates(spent, self.step)
        if self.fake is not None:
            self.fake.turn(spent >= 1 - self.config.quant.qat_share)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * rates.lr_share
            group["weight_decay"] = group["peak_decay"] * rates.decay_share
            if group["algorithm"] == optim.matrix_algorithm:
                group["momentum"] = rates.momentum
        return rates.lr_share

    def _stage_at(self, spent: float) -> Stage:
        return next(stage for stage in self.stages if spent < stage.until)

    def _accumulate_gradients(self, stage: Stage) -> Tensor:
        """Forward and backward over this rank's share of the batch. Returns its mean loss, on the device.

        Shorter sequences are the stream's windows, cut. So the stream, its order and its position do not depend on
        lengths, and every token is still a target once an epoch.
        """
        count, before = self.passes_in(stage), self.batches.state_dict()
        self.passes.start(count)
        failure: DataError | None = None
        try:
            for length in stage.deal(count, self.runtime.rank, self.runtime.world):
                self.passes.add(*take_batch(self.batches, length, self.isolated))
        except DataError as error:
            failure = error
        self._end_if_unread(failure, before)
        loss = self.passes.loss
        # 0 * inf is NaN: a non-finite loss makes a gradient non-finite, so that the optimizer's check covers both
        grads = (p.grad for p in self.model.parameters() if p.grad is not None)
        min(grads, key=Tensor.numel).add_(0 * loss)
        return loss

    def _end_if_unread(self, failure: DataError | None, before: dict[str, Any]) -> None:
        """Raises an error on all ranks if one of them could not read its data. All are then at the end of the last whole step,
        where a checkpoint can be saved."""
        if not any(self.runtime.agree([float(failure is not None)])):
            return
        self.batches.rewind(before)
        failures = self.runtime.gather(None if failure is None else str(failure))
        raise DataError(next(said for said in failures if said is not None)) from failure

    def passes_in(self, stage: Stage) -> int:
        """Micro-batches a rank runs in one step of a stage."""
        stream = self.stream
        return stage.batch_tokens // (stream.sequence_length * stream.micro_sequences * stream.world)

    @property
    def precision(self) -> Precision:
        """The precision of the products in training."""
        return self.passes.precision

    def _choose_precision(self) -> Precision:
        """The same on all ranks: bfloat16 only where every rank's machine would choose it."""
        chosen = training_precision(self.config.train.precision, self.runtime.device)
        return "float32" if any(self.runtime.agree([float(chosen == "float32")])) else "bfloat16"

    def _restore_precision(self, kept: Any) -> None:
        """Continues with the precision in a checkpoint, unless the config names another one."""
        if self.config.train.precision != "auto":
            return
        # None is of an older version, which trained in the precision of scoring.
        kept = kept or scoring_precision(self.runtime.device)
        if kept not in get_args(Precision):
            raise ValueError(f"a precision of {kept!r}")
        self.passes.precision = kept

    def _restore_compiled(self, kept: bool) -> None:
        """Continues compiled if the run began so, unless the config says otherwise: the last bits depend on it."""
        if self.config.train.compile is None and not self.runtime.is_cuda and self.runtime.world == 1:
            self.compiled = bool(kept)

    @property
    def tokens(self) -> int:
        """Tokens trained on so far, by all ranks."""
        return int(self.batches.state_dict()["entry"]) * self.stream.sequence_length

    @property
    def wait_seconds(self) -> float:
        """Seconds of training in which the loop waited for a batch, also before a resume."""
        return self.batches.wait_seconds - self._untimed_wait

    def _update_weights(self, share: float) -> None:
        with nullcontext() if self.runtime.is_cuda else autocast(self.runtime.device, self.precision):
            self.optimizer.step()  # Newton-Schulz on a CPU follows autocast
        # A graph needs the gradients at the addresses that were captured.
        self.model.zero_grad(set_to_none=not self.graphed)
        if self.step < self.config.optim.warmup_steps:
            share = 1.0  # the rise of the learning rate is not the tail of the run
        self.averages.update(share)

    def _record(self, loss: Tensor, share: float) -> None:
        mean = self.runtime.sum(loss / self.runtime.world)
        last = self.optimizer.buffers  # not the optimizer's properties: they copy, and `record` copies, too
        self.telemetry.record(
            self.step, share, mean, last.grad_norm, last.skipped, last.skipped_in_a_row, tokens=self.tokens
        )

    def _report(self, readings: list[Reading], report: Report) -> None:
        for reading in readings:
            self._note_stall(reading)
            self.budget.observe(reading.seconds)
            self.skipped += reading.skipped
            self._skipping = reading.skipped_in_a_row > 0
            self._stuck |= reading.skipped_in_a_row >= self.config.train.max_skipped  # whatever is still in flight
            report(reading)

    def _note_stall(self, reading: Reading) -> None:
        """Warns if a step took far longer than any other, as after SIGSTOP: a budget in minutes counts that time."""
        if self.budget.limit is None or not self.budget.is_stall(reading.seconds):
            return
        self.stalled_seconds += reading.seconds
        self.say(
            f"warning: step {reading.step + 1} took {reading.seconds:.1f} s, far longer than any other; the process was "
            f"stopped, or the machine slept or was busy. The clock counts it: {reading.seconds / self.budget.limit:.0%} of the "
            "budget brought one step, and the learning rate has moved on"
        )

    def _end_if_lost(self) -> None:
        """Raises an error if continuing, or packing the weights, makes no sense. All ranks have the same readings here."""
        finite = not any(self.runtime.agree([float(not self._is_finite())]))
        if finite and not self._stuck:
            return
        wrong = f"loss or gradient was not finite for {self.config.train.max_skipped} steps in a row, up to step {self.step}"
        if finite:  # a skipped step changes nothing: these are the weights of the last good step
            kept = f"the weights of the last good step are in {self.save()}"
        else:
            wrong = wrong if self._stuck else f"the weights are not finite after step {self.step}"
            older = list_checkpoints(self.out / "checkpoint")
            kept = f"the last good checkpoint is {older[-1]}" if older else "there is no checkpoint from before"
        raise TrainingError(
            f"{wrong}; {kept}. Lower optim.matrix_lr, optim.embedding_lr or optim.scalar_lr, or look at the data"
        )

    def try_to_save(self) -> Path | None:
        """A checkpoint, or a warning where none can be written: the older checkpoint stays, and the run continues."""
        try:
            return self.save()
        except CheckpointError as error:
            self.say(f"warning: {error}. The run continues without it")
            return None

    def save(self) -> Path | None:
        """Writes a checkpoint. Every rank must call it; the first one writes."""
        state = self.state_dict()
        self._last_save = time.monotonic()
        if not self.runtime.is_main:
            return None
        about = {
            "config": to_dict(self.config),
            "tokenizer": self.dataset.tokenizer.model_bytes,
            "versions": versions(),
            "dataset": self.dataset.fingerprint,
        }
        return save_checkpoint(self.out / "checkpoint", {**about, **state}, keep=self.config.train.keep_checkpoints)

    def _is_healthy(self) -> bool:
        """Whether a checkpoint now would be better than the last: not while steps are being skipped."""
        return not self._skipping and self._is_finite()

    def _is_finite(self) -> bool:
        return all(bool(torch.isfinite(p).all()) for p in self.model.parameters())

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "seconds": self.clock.seconds(),
            "skipped": self.skipped,
            "stalled_seconds": self.stalled_seconds,
            "wait_seconds": self.wait_seconds,
            "threads": self.threads.now,
            "precision": self.precision,
            "compiled": self.compiled,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "averages": self.averages.state_dict(),
            "data": self.batches.state_dict(),
            "random": random_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.skipped = state["step"], state["skipped"]
        self.clock.set(state["seconds"])
        # An older checkpoint does not have these two.
        self.stalled_seconds = state.get("stalled_seconds", 0.0)
        self._untimed_wait = self.batches.wait_seconds - state.get("wait_seconds", 0.0)
        self.threads.restore(state.get("threads"))
        self._restore_precision(state.get("precision"))
        self._restore_compiled(state.get("compiled", False))
        self.model.load_state_dict(state["model"])
        load_optimizer(self.optimizer, state["optimizer"], self.model, self.config.optim, state.get("config"))
        self.averages.load_state_dict(state["averages"])
        self.batches.rewind(state["data"])
        restore_random_state(state["random"])

    def resume(self, state: dict[str, Any], path: Path) -> None:
        """Continues from a checkpoint of the same run. Another model or other data is refused before anything changes."""
        try:
            self._resume(state, path)
        except MALFORMED as error:
            raise CheckpointError(
                f"{path} is malformed ({first_line(error)}); use an older checkpoint, or start anew in another --out"
            ) from error

    def _resume(self, state: dict[str, Any], path: Path) -> None:
        counts = state["step"], state["skipped"]
        if not (all(type(n) is int and n >= 0 for n in counts) and 0 <= state["seconds"] < math.inf):
            raise ValueError(f"step {counts[0]!r} with {counts[1]!r} skipped after {state['seconds']!r} seconds")
        if state["dataset"] != self.dataset.fingerprint:
            raise CheckpointError(
                f"{path} was trained on other data than {self.config.data!r} now is; resume with the same text and "
                "tokenizer, or start again in another --out"
            )
        held = self.model.state_dict(), state["model"]
        mine, theirs = ({name: tuple(t.shape) for name, t in tensors.items()} for tensors in held)
        if mine != theirs:
            different = sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
            raise CheckpointError(
                f"{path} holds another model: {different[0]} is {theirs.get(different[0])} there and {mine.get(different[0])} "
                "here; resume with the config it was started with, or start again in another --out"
            )
        self.load_state_dict(state)

    def close(self) -> None:
        self.batches.close()

    def _make_stream(self) -> BatchStream:
        batch = self.config.batch
        micro = batch.micro_sequences(self.runtime.world)
        return BatchStream(
            self.dataset.train,
            sequence_length=batch.sequence_length,
            # if steps differ the stream counts passes: with a clock, the last step of a stage is not known in advance
            batch_sequences=micro * self.runtime.world if batch.stages else batch.sequences,
            micro_sequences=micro,
            rank=self.runtime.rank,
            world=self.runtime.world,
            seed=self.config.seed,
            order=batch.order,
            bos_id=self.config.model.bos_id,
        )

    def watch_signals(self) -> AbstractContextManager[None]:
        """Ctrl-C, SIGTERM and a closed terminal end training after the current step."""
        return watch_signals(lambda number: setattr(self, "stop_signal", number))
