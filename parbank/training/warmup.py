"""`parbank warmup`: compiles and keeps the kernels that a recipe needs."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from parbank.config import override
from parbank.data.dataset import Dataset
from parbank.data.shards import TokenSet
from parbank.eval.sampling import extend
from parbank.eval.score import tokens_together
from parbank.eval.windows import score_windows
from parbank.ops.rehearsal import can_rehearse
from parbank.quant.bank import MAX_Q
from parbank.quant.gptq import factorise, round_bank
from parbank.runtime import Runtime
from parbank.training.checks import check_settings
from parbank.training.compiled import Lookups, compile_folder, count_lookups, has_kernels
from parbank.training.config import RunConfig
from parbank.training.trainer import Trainer

Say = Callable[[str], None]

# The first step compiles. The second captures the pass as a graph, and the optimizer's step; the third replays them.
STEPS = 3


@dataclass(frozen=True)
class Warmed:
    """The result of a warm-up."""

    train_seconds: float
    score_seconds: float
    lookups: Lookups


def warm_up(config: RunConfig, runtime: Runtime, say: Say) -> Warmed | None:
    """Trains and scores on random tokens in the shapes of a run, so that all its code is compiled and kept. None on a
    CPU, where nothing is compiled. On several GPUs every rank must call it: code is kept per GPU."""
    check_settings(config, runtime)
    if not runtime.is_cuda:
        say(
            f"nothing to compile for {config.recipe} on this device ({runtime.device}): parbank has no kernels for it, and "
            "`parbank train` itself compiles a long run. On a machine with a CUDA GPU this command compiles for it (`parbank "
            "doctor` says what was found)"
        )
        return None
    say(f"compiling the training step of {config.recipe} for {runtime.device}; the first time takes a minute or more")
    config = override(config, f"train.warmup_steps={STEPS}", "train.validate_every=off")
    began = time.perf_counter()
    trainer = Trainer(config, runtime, random_data(config, config.batch.batch_tokens), compile_folder())
    try:
        trainer.warm_up()
        trained = time.perf_counter()
        say("scoring and sampling")
        _read(trainer, tokens=STEPS)
        runtime.synchronize()
    finally:
        trainer.close()
    return Warmed(trained - began, time.perf_counter() - trained, count_lookups())


@contextmanager
def compile_aside(config: RunConfig, runtime: Runtime, say: Say) -> Iterator[bool]:
    """Inside, a thread compiles the kernels of a step, or loads kernels that were kept, while the caller prepares its
    data. Yields whether it compiles, which leaves little of this process to the caller.

    It does so on a single GPU: several ranks talk to each other while they prepare data, and only one thread of a
    process may.
    """
    if not (runtime.is_cuda and runtime.world == 1 and can_rehearse()):
        yield False
        return
    compiles = not has_kernels()
    if compiles:
        say("compiling kernels beside the preparation of the data")
    with ThreadPoolExecutor(1) as aside:
        aside.submit(_rehearse_aside, config, runtime, say)
        yield compiles


def _rehearse_aside(config: RunConfig, runtime: Runtime, say: Say) -> None:
    """An error here costs time only: the warm-up meets it again, and raises it."""
    began = time.perf_counter()
    try:
        _rehearse_alone(config, runtime)
    except Exception as error:
        say(f"note: kernels could not be compiled ahead ({type(error).__name__}: {error}); the warm-up compiles them")
    else:
        if built := count_lookups().built:
            say(f"compiled {built} kernels in {time.perf_counter() - began:.1f} s")


def _rehearse_alone(config: RunConfig, runtime: Runtime) -> None:
    """Rehearses the step of a trainer that is then thrown away, and the work that follows training."""
    trainer = Trainer(config, runtime, random_data(config, config.batch.batch_tokens), compile_folder())
    try:
        trainer.rehearse(then=lambda: _read(trainer, tokens=1))  # a second token would capture a graph of nothing
    finally:
        trainer.close()


def _read(trainer: Trainer, *, tokens: int) -> None:
    """Runs the model as scoring and sampling do, a batch of windows and a few tokens one by one, and rounds as packing
    does."""
    config, runtime, model = trainer.config, trainer.runtime, trainer.model
    context = config.batch.sequence_length
    windows = random_data(config, tokens_together(config.model.vocab_size, runtime)).train
    score_windows(model, windows, context=context, stride=context, runtime=runtime)
    for _ in extend(model, [0], tokens, context=context, choose=lambda logits: 0):
        pass
    _round_once(runtime.device)


def _round_once(device: torch.device) -> None:
    """Rounds a small matrix as packing does. This also loads PyTorch's linear algebra, which takes a while on a GPU."""
    ones = torch.ones(1, 64, 64, device=device)
    prices = torch.zeros(1, 64, MAX_Q + 1, device=device)
    round_bank(ones, ones[:, :, :1], MAX_Q, factorise(torch.eye(64, device=device)[None]), prices)


class _RandomData:
    """The part of a data set that a trainer uses before it saves. A warm-up never saves, and needs no tokenizer."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.train = TokenSet([tokens])
        self.fingerprint = "random"


def random_data(config: RunConfig, count: int) -> Dataset:
    """At least `count` random tokens to train on, and at least one window of the recipe."""
    count = max(count, config.batch.sequence_length) + 1  # the last one's target
    tokens = np.random.default_rng(config.seed).integers(0, config.model.vocab_size, count, dtype=np.uint16)
    return cast(Dataset, _RandomData(tokens))
