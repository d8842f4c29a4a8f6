"""Compiled code kept between processes: Triton's kernels, and PyTorch's graphs if a run uses torch.compile.

Two environment variables name the folders. By default they lie in the system's temporary folder, which a reboot or
the end of a container empties. `use_compile_cache` sets them to folders in parbank's cache. Every command
that runs a model calls it first.
"""

import hashlib
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import parbank
from parbank.files import default_cache
from parbank.ops import backend

Start = Literal["cold", "warm", "none"]

NOTES, IMPORTED = "rehearsed", "imported"
INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


def code_digest() -> str:
    """A hash of the ops' source."""
    digest = hashlib.sha256()
    for path in sorted((Path(parbank.__file__).parent / "ops").glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def compile_folder() -> Path:
    """The folder for compiled code: one for each version of the ops' source.

    PyTorch's key for a compiled graph contains the names of our ops, but not the Python code of their gradients and
    shapes. A graph compiled before such a change would be found after it, and would be wrong.
    """
    return default_cache() / f"compiled-{code_digest()}"


def use_compile_cache() -> Path | None:
    """Makes this process and its children keep compiled code in `compile_folder`. Returns None if that cannot be
    written.

    Call it before anything is compiled: PyTorch and Triton read the variables then. Variables that the user has set
    stay.
    """
    folder = compile_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:  # use PyTorch's own folders then: a missing cache is no reason to refuse a run
        return None
    os.environ.setdefault(INDUCTOR, str(folder / "inductor"))
    # One folder for all GPUs of a machine: Triton names files by their content and renames them when complete.
    os.environ.setdefault(TRITON, str(folder / "triton"))
    count_kernels()
    return folder


def kernel_folder() -> Path:
    """The folder in which Triton keeps compiled kernels."""
    return Path(os.environ.get(TRITON) or Path.home() / ".triton" / "cache")


def has_kernels(work: str) -> bool:
    """Whether the kernels of some work, or imported kernels, were kept where this process looks for them. A guess,
    by which a run arranges its start."""
    try:
        noted = any((compile_folder() / NOTES / name).exists() for name in (work, IMPORTED))
        return noted and any(kernel_folder().iterdir())
    except OSError:
        return False


def note_kernels(work: str) -> None:
    """Notes that the kernels of some work are kept. Kernels of other shapes, such as those of a probe, prove nothing."""
    with suppress(OSError):
        folder = compile_folder() / NOTES
        folder.mkdir(parents=True, exist_ok=True)
        (folder / work).touch()


def keep_compiled_graphs() -> None:
    """Lets PyTorch cache the graphs of our models, which it would otherwise compile in every process.

    AOTAutograd does not cache a graph with an unknown function. Two such functions choose the attention backend. Both
    depend on their arguments alone, which are part of the graph's key. A third is the autograd.Function of
    ops/fp8.py; the folder's name is a hash of its source.
    """
    import torch._functorch.config as functorch
    from torch._inductor import config

    if hasattr(functorch, "autograd_cache_allow_custom_autograd_functions"):
        functorch.autograd_cache_allow_custom_autograd_functions = True

    names = ("torch.nn.attention._backend_from_string", "torch.nn.attention._sdpa_kernel")
    config.unsafe_marked_cacheable_functions = {
        **config.unsafe_marked_cacheable_functions,
        **dict.fromkeys(names, torch.__version__),
    }


def forget_compiled_graphs() -> None:
    """Makes PyTorch forget the graphs of this process; those on disk stay. It compiles a function for eight models, and
    runs it uncompiled for any further one, with a warning in the log alone."""
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:  # else nothing was compiled
        dynamo.reset()


@dataclass(frozen=True)
class Lookups:
    """Counts this process's lookups in the caches of compiled code: Triton's kernels and PyTorch's graphs together."""

    found: int
    built: int

    @property
    def start(self) -> Start:
        if self.built:
            return "cold"
        return "warm" if self.found else "none"


_kernels = {True: 0, False: 0}  # by whether Triton found it
_entries: set[Path] = set()


def count_kernels() -> None:
    """Makes Triton report each kernel that it compiles or finds, for `count_lookups`. A program's own listener stays."""
    if backend.HAS_TRITON and not backend.INTERPRETED:
        from triton import knobs

        if knobs.compilation.listener is None:
            knobs.compilation.listener = _note_kernel


def _note_kernel(*, cache_hit: bool, metadata_group: Mapping[str, str], **about: Any) -> None:
    _kernels[cache_hit] += 1
    _entries.update(Path(file).parent for file in metadata_group.values())


def used_kernels() -> frozenset[Path]:
    """The entries of Triton's cache that this process has compiled or found."""
    return frozenset(_entries)


def count_lookups() -> Lookups:
    """Counts a graph as built if Inductor had to build it, which takes the time. AOTAutograd's cache is asked first and
    may answer for both."""
    found, built = _kernels[True], _kernels[False]
    dynamo = sys.modules.get("torch._dynamo.utils")  # absent where nothing was compiled
    if dynamo is not None:
        whole, parts = dynamo.counters["aot_autograd"], dynamo.counters["inductor"]
        found += max(whole["autograd_cache_hit"], parts["fxgraph_cache_hit"])
        built += parts["fxgraph_cache_miss"] + parts["fxgraph_cache_bypass"]
    return Lookups(found, built)
