"""Compiled code kept between processes: Triton's kernels, and PyTorch's graphs where a run asks for torch.compile.

Both are kept in folders that two environment variables name. By default those lie in the system's temporary folder, which a reboot
or a container's end empties. `use_compile_cache` names folders in parbank's own cache instead; `train`, `eval` and `warmup`
all call it first.
"""

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import parbank
from parbank.files import default_cache
from parbank.ops import backend

Start = Literal["cold", "warm", "none"]

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
    _count_kernels()
    return folder


def keep_compiled_graphs() -> None:
    """Lets PyTorch keep the graphs of our models, which it would compile anew in every process otherwise.

    AOTAutograd refuses to keep a graph with a function it does not know. Two such stand where a model chooses its
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
    """What this process has asked the caches of compiled code for so far: Triton's kernels and PyTorch's graphs together."""

    found: int
    built: int

    @property
    def start(self) -> Start:
        if self.built:
            return "cold"
        return "warm" if self.found else "none"


_kernels = {True: 0, False: 0}  # by whether Triton found it


def _count_kernels() -> None:
    """Has Triton report each kernel that it compiles or finds. A program's own listener stays."""
    if backend.HAS_TRITON and not backend.INTERPRETED:
        from triton import knobs

        if knobs.compilation.listener is None:
            knobs.compilation.listener = _note_kernel


def _note_kernel(*, cache_hit: bool, **about: Any) -> None:
    _kernels[cache_hit] += 1


def count_lookups() -> Lookups:
    """Of a graph, what Inductor had to build is what takes the time. AOTAutograd's cache, asked first, may answer for both."""
    found, built = _kernels[True], _kernels[False]
    dynamo = sys.modules.get("torch._dynamo.utils")  # absent where nothing was compiled
    if dynamo is not None:
        whole, parts = dynamo.counters["aot_autograd"], dynamo.counters["inductor"]
        found += max(whole["autograd_cache_hit"], parts["fxgraph_cache_hit"])
        built += parts["fxgraph_cache_miss"] + parts["fxgraph_cache_bypass"]
    return Lookups(found, built)
