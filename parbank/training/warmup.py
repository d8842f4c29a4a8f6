"""`parbank warmup`: what a recipe compiles, compiled once and kept.

PyTorch keeps compiled graphs (AOTAutograd's, Inductor's) and Triton kernels in folders that two environment variables
name. By default those lie in the system's temporary folder, which a reboot or a container's end empties.
`use_compile_cache` names folders in parbank's own cache instead; `train`, `eval` and `warmup` all call it first.
"""

import hashlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch

import parbank
from parbank.config import override
from parbank.data.dataset import Dataset, default_cache
from parbank.data.shards import TokenSet
from parbank.eval.score import tokens_together
from parbank.eval.windows import score_windows
from parbank.runtime import Runtime
from parbank.training.config import RunConfig
from parbank.training.trainer import Trainer

Say = Callable[[str], None]
Start = Literal["cold", "warm", "none"]

# The first step compiles. The second captures the pass as a graph, and the optimizer's step; the third replays them.
STEPS = 3

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def compile_folder() -> Path:
    """Where compiled code is kept: one folder for each state of the ops' source.

    PyTorch's key for a compiled graph holds the names of our ops, but not the Python that says what their gradients and
    shapes are. A graph compiled before such a change would be found again after it, and would be wrong.
    """
    digest = hashlib.sha256()
    for path in sorted((Path(parbank.__file__).parent / "ops").glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return default_cache() / f"compiled-{digest.hexdigest()[:12]}"


def use_compile_cache() -> Path | None:
    """Has this process and its children keep compiled code in `compile_folder`; None where that cannot be written.

    To be called before anything is compiled: PyTorch and Triton read the variables then. What the user has set stays.
    """
    folder = compile_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:  # then PyTorch's own folders serve: a cache is no reason to refuse a run
        return None
    os.environ.setdefault(INDUCTOR, str(folder / "inductor"))
    # One folder for all GPUs of a machine: Triton's files are named by what they hold, and renamed when complete.
    os.environ.setdefault(TRITON, str(folder / "triton"))
    if torch.cuda.is_available():  # the import takes a second, and on a CPU nothing is compiled
        _cache_more()
    return folder


def _cache_more() -> None:
    """AOTAutograd refuses to keep a graph with a function it does not know. Two such stand where a model chooses its
    attention backend. Both are functions of their arguments, which are part of the graph's key. A third is the
    autograd.Function of ops/fp8.py; the folder's name is a hash of its source."""
    import torch._functorch.config as functorch
    from torch._inductor import config

    if hasattr(functorch, "autograd_cache_allow_custom_autograd_functions"):
        functorch.autograd_cache_allow_custom_autograd_functions = True

    names = ("torch.nn.attention._backend_from_string", "torch.nn.attention._sdpa_kernel")
    config.unsafe_marked_cacheable_functions = {
        **config.unsafe_marked_cacheable_functions,
        **dict.fromkeys(names, torch.__version__),
    }


@dataclass(frozen=True)
class Lookups:
    """How often this process has asked PyTorch's compile caches for a graph so far."""

    found: int
    built: int

    @property
    def start(self) -> Start:
        if self.built:
            return "cold"
        return "warm" if self.found else "none"


def count_lookups() -> Lookups:
    """What Inductor had to build is what takes the time. AOTAutograd's cache, asked first, may answer for both."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # absent where nothing was compiled
    if dynamo is None:
        return Lookups(0, 0)
    whole, parts = dynamo.counters["aot_autograd"], dynamo.counters["inductor"]
    return Lookups(
        found=max(whole["autograd_cache_hit"], parts["fxgraph_cache_hit"]),
        built=parts["fxgraph_cache_miss"] + parts["fxgraph_cache_bypass"],
    )


@dataclass(frozen=True)
class Warmed:
    """What a warm-up did."""

    train_seconds: float
    score_seconds: float
    lookups: Lookups


def warm_up(config: RunConfig, runtime: Runtime, say: Say) -> Warmed | None:
    """Trains and scores on random tokens in the shapes of a run, so that everything it will compile is compiled and
    kept. None on a CPU, where nothing is. Every rank of a run on several GPUs must call it: code is kept per GPU."""
    if not runtime.is_cuda:
        say(
            f"nothing to compile for {config.recipe} on this device ({runtime.device}): there parbank runs as plain PyTorch, and "
            "`parbank train` starts at once. On a machine with a CUDA GPU this command compiles for it (`parbank doctor` says what "
            "was found)"
        )
        return None
    say(f"compiling the training step of {config.recipe} for {runtime.device}; the first time takes a minute or more")
    config = override(config, f"train.warmup_steps={STEPS}")
    began = time.perf_counter()
    trainer = Trainer(config, runtime, random_data(config, config.batch.batch_tokens), compile_folder())
    try:
        trainer.warm_up()
        trained = time.perf_counter()
        say("scoring")
        tokens = random_data(config, tokens_together(config.model.vocab_size, runtime)).train
        context = config.batch.sequence_length
        score_windows(trainer.model, tokens, context=context, stride=context, runtime=runtime)
        runtime.synchronize()
    finally:
        trainer.close()
    return Warmed(trained - began, time.perf_counter() - trained, count_lookups())


class _RandomData:
    """What a trainer touches of a data set before it saves: a warm-up never saves, and so needs no tokenizer."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.train = TokenSet([tokens])
        self.fingerprint = "random"


def random_data(config: RunConfig, count: int) -> Dataset:
    """At least `count` random tokens to train on, and one window of the recipe in any case."""
    count = max(count, config.batch.sequence_length) + 1  # the last one's target
    tokens = np.random.default_rng(config.seed).integers(0, config.model.vocab_size, count, dtype=np.uint16)
    return cast(Dataset, _RandomData(tokens))
