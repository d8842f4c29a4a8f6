"""`parbank warmup`: compiles and keeps the kernels that a recipe needs."""

import hashlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from parbank.config import override, to_dict
from parbank.data.dataset import Dataset
from parbank.data.progress import Say
from parbank.data.shards import TokenSet
from parbank.eval.details import PROMPT_TOKENS
from parbank.eval.sampling import extend
from parbank.eval.score import window_tokens_together
from parbank.eval.windows import score_windows
from parbank.gpu import on_device
from parbank.model import GPT
from parbank.ops.rehearsal import can_rehearse, rehearsal
from parbank.quant.bank import MAX_Q
from parbank.quant.gptq import factorise, round_bank
from parbank.runtime import Runtime
from parbank.training.checks import check_settings
from parbank.training.compiled import Lookups, compile_folder, count_lookups, has_kernels, note_kernels
from parbank.training.config import RunConfig
from parbank.training.trainer import Trainer

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
    say(f"compiling the kernels of {config.recipe} for {runtime.device}; the first time takes about half a minute")
    config = override(config, f"train.warmup_steps={STEPS}", "train.validate_every=off")
    began = time.perf_counter()
    rehearsed = runtime.world == 1 and can_rehearse() and _rehearse_aside(config, runtime, say, cold=True)
    trainer = Trainer(config, runtime, random_data(config, config.batch.batch_tokens), compile_folder())
    trainer.rehearsed = rehearsed
    try:
        trainer.warm_up()
        trained = time.perf_counter()
        say("scoring and sampling")
        _read(trainer, tokens=STEPS)
        runtime.synchronize()
    finally:
        trainer.close()
    note_kernels(_name_work(config, runtime))
    return Warmed(trained - began, time.perf_counter() - trained, count_lookups())


@dataclass
class TrainingKernels:
    """The kernels that a thread compiles or loads."""

    compiles: bool = False
    """Whether none were kept. Compiling leaves little of this process to other threads."""
    ready: bool = False
    """Whether a step of training finds all its kernels. Known at the end of `compile_aside`."""


@contextmanager
def compile_aside(config: RunConfig, runtime: Runtime, say: Say) -> Iterator[TrainingKernels]:
    """Inside, a thread compiles the kernels of a step, or loads kernels that were kept, while the caller prepares its
    data and its weights in host memory.

    It does so on a single GPU: several ranks talk to each other while they prepare data, and only one thread of a
    process may.
    """
    if not (runtime.is_cuda and runtime.world == 1 and can_rehearse()):
        yield TrainingKernels()
        return
    kernels = TrainingKernels(compiles=not has_kernels(_name_work(config, runtime)))
    if kernels.compiles:
        say("compiling kernels beside the preparation of the data")
    with ThreadPoolExecutor(1) as aside:
        done = aside.submit(_rehearse_aside, config, runtime, say, cold=kernels.compiles)
        yield kernels
    kernels.ready = done.result()
    if kernels.ready:
        note_kernels(_name_work(config, runtime))
    torch.cuda.manual_seed(config.seed)  # a rehearsal may draw from the GPU's generator, after the caller has set it


def _name_work(config: RunConfig, runtime: Runtime) -> str:
    """A hash of everything that the kernels of a run depend on."""
    train, quant = config.train, config.quant
    parts: list[Any] = [to_dict(config.model), to_dict(config.batch), to_dict(config.optim), str(torch.__version__)]
    parts += [
        train.precision,
        train.compile,
        train.fp8,
        train.dropout,
        train.token_dropout,
        quant.qat_share,
        quant.qat_bits,
    ]
    parts.append(torch.cuda.get_device_name(runtime.device) if torch.cuda.is_available() else "")
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _rehearse_aside(config: RunConfig, runtime: Runtime, say: Say, *, cold: bool) -> bool:
    """Whether it succeeded. An error here costs time only: the warm-up meets it again, and raises it."""
    began, before = time.perf_counter(), count_lookups().built
    try:
        _rehearse_alone(config, runtime, cold=cold)
    except Exception as error:
        say(f"note: kernels could not be compiled ahead ({type(error).__name__}: {error}); the warm-up compiles them")
        return False
    if built := count_lookups().built - before:
        say(f"compiled {built} kernels in {time.perf_counter() - began:.1f} s")
    return True


def _rehearse_alone(config: RunConfig, runtime: Runtime, *, cold: bool) -> None:
    """Rehearses the step of a trainer that is then thrown away, and the work that follows training unless all its
    kernels seem to be kept: then it takes longer to rehearse than to run. The weights get no values: nothing reads the
    results, and the random generators belong to the trainer that trains."""
    with torch.device("meta"):
        model = GPT(config.model)
    with on_device(runtime.device):  # a new thread starts on the first GPU
        model.allocate(runtime.device)
        data, built = random_data(config, config.batch.batch_tokens), count_lookups().built
        trainer = Trainer(config, runtime, data, compile_folder(), model=model)
        try:
            trainer.rehearse(then=lambda: _read(trainer, tokens=1) if cold else None)
            if not cold and count_lookups().built > built:  # kernels of other shapes were kept
                with rehearsal(runtime.device):
                    _read(trainer, tokens=1)
        finally:
            trainer.close()


def _read(trainer: Trainer, *, tokens: int) -> None:
    """Does what follows training: scores a batch of windows, samples `tokens` tokens after a prompt, and rounds as packing
    does. A rehearsal samples one token: the second one would capture an empty graph."""
    config, runtime, model = trainer.config, trainer.runtime, trainer.model
    context = config.batch.sequence_length
    windows = random_data(config, window_tokens_together(model, runtime)).train
    score_windows(model, windows, context=context, stride=context, runtime=runtime)
    for prompt in ([0], [0] * (1 + PROMPT_TOKENS)):
        for _ in extend(model, prompt, tokens, context=context, choose=lambda logits: 0):
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
