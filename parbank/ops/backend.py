"""Chooses the implementation of an op: its Triton kernel, or the plain-PyTorch reference.

The choice is made when parbank is imported and kept in one module global. `torch.compile` reads it as a guarded
constant, so `set_backend` is honoured, and traces a public op without a graph break. With kernels the graph holds one
`torch.library` op. Without them it holds plain PyTorch, which Inductor may fuse.

`PARBANK_OPS=auto|triton|reference` in the environment, `set_backend` and `use_backend` set the choice. `auto` takes
the kernels on NVIDIA GPUs from compute capability 8.0 and the reference elsewhere, tensor by tensor: a CPU or float64
tensor takes the reference. `triton` is an error where Triton cannot run.

Kernel files import `triton` and `tl` from here. Where Triton cannot be imported, both are placeholders that let
`@triton.jit` functions be defined but not launched. So an op stays in one file.
"""

import dataclasses
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parbank.errors import ConfigError, DeviceError, ParbankError, is_out_of_memory

BACKENDS = ("auto", "triton", "reference")
GLUON_VERSIONS = ("3.6", "3.7")
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The kernels are built and tested for 8.0, 9.0 and 10.0; before 8.0 there is no bfloat16 product.
MIN_CAPABILITY = (8, 0)

_log = logging.getLogger("parbank")


class _Absent:
    """Placeholder for `triton` and `triton.language`: decorators and annotations pass through, nothing runs."""

    def __getattr__(self, name: str) -> "_Absent":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


def _load_triton() -> tuple[Any, ...]:
    """Imports all that the kernels use of Triton, and whether it runs in interpreter mode. Raises many kinds of errors
    where the installed Triton is broken (another glibc, half an upgrade) or too old."""
    import triton
    import triton.language
    from triton import knobs
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.tools.tensor_descriptor import TensorDescriptor

    interpreted = bool(knobs.runtime.interpret)
    return triton, triton.language, TensorDescriptor, gdc_wait, gdc_launch_dependents, interpreted


def _load_gluon() -> tuple[Any, ...]:
    """Imports Gluon, Triton's lower-level language, in which a kernel assigns work to warps. Gluon is experimental:
    another version may compile the same lines differently. So only versions that the kernels were tested with are
    accepted."""
    if not triton.__version__.startswith(GLUON_VERSIONS):
        raise ImportError(f"Triton {triton.__version__}, and they were tried with {', '.join(GLUON_VERSIONS)}")
    from triton.experimental import gluon
    from triton.experimental.gluon import language
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return gluon, language, hopper, TensorDescriptor


triton: Any
tl: Any
gl: Any
gluon: Any
hopper: Any
gluon = gl = hopper = gluon_descriptor = _Absent()
HAS_GLUON = False
"""Whether Gluon kernels can be defined. Each has a Triton kernel as its fallback."""
triton = tl = TensorDescriptor = gdc_wait = gdc_launch_dependents = _Absent()
INTERPRETED = False
"""Triton decides at decoration whether a kernel is interpreted, so this holds for the whole process."""
_missing = ""
"""Why Triton cannot be used, in words."""
if importlib.util.find_spec("triton") is None:
    _missing = "Triton is not installed (pip install 'parbank[triton]')"
else:
    try:
        triton, tl, TensorDescriptor, gdc_wait, gdc_launch_dependents, INTERPRETED = _load_triton()
    except Exception as error:
        remedy = "the kernels need 3.6 or later (pip install --upgrade 'parbank[triton]')"
        if is_out_of_memory(error):
            remedy = "this machine has too little memory: end other programs"
        _missing = f"the installed Triton cannot be used ({type(error).__name__}: {error}); {remedy}"
HAS_TRITON = not _missing
if HAS_TRITON:
    try:
        gluon, gl, hopper, gluon_descriptor = _load_gluon()
        HAS_GLUON = True
    except Exception as error:
        _log.info("kernels in Gluon are left out: %s: %s", type(error).__name__, error)


@dataclass
class _State:
    active: str = "reference"
    strict: bool = False
    """Whether `triton` was asked for by name: a tensor that the kernels do not take is then an error."""
    complaint: str = ""
    """The error in PARBANK_OPS: stored at import and raised by the first op, where a caller can catch it."""
    complaint_type: type[ParbankError] = ParbankError


_state = _State()


def set_backend(name: str) -> None:
    """Chooses the implementation for every op from here on. Code already compiled is compiled again."""
    if name not in BACKENDS:
        raise ConfigError(f"unknown ops backend {name!r}; use one of {', '.join(BACKENDS)}")
    obstacle = why_no_kernels()
    if name == "triton" and obstacle:
        raise DeviceError(f"the ops backend 'triton' was asked for, but {obstacle}; or use 'auto' or 'reference'")
    # Only the tests of the ops use the interpreter, and they ask for it by name. Under `auto` it would slow all other tests.
    plain = name == "reference" or bool(obstacle) or (INTERPRETED and name == "auto")
    _state.active, _state.strict, _state.complaint = "reference" if plain else "triton", name == "triton", ""


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """`set_backend` for the length of a with-block."""
    before = dataclasses.replace(_state)
    set_backend(name)
    try:
        yield
    finally:
        _state.active, _state.strict, _state.complaint = before.active, before.strict, before.complaint


def active_backend() -> str:
    """`triton` or `reference`."""
    return _state.active


def why_no_kernels() -> str:
    """Why the kernels cannot run in this process, in words; empty where they can."""
    if not HAS_TRITON:
        return _missing
    if INTERPRETED:
        return ""
    if torch.version.hip is not None:
        return "the kernels are for NVIDIA GPUs and this PyTorch is built for AMD"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]} and the kernels need 8.0"
    return ""


def use_triton(*tensors: Tensor | None) -> bool:
    """Whether a call on these tensors takes the kernel. Pass the op's floating-point tensors, not indices or masks;
    Nones are skipped.

    Written for Dynamo: it reads constants and tensor properties only, so a compiled graph holds nothing of it.
    """
    if _state.complaint:
        raise _state.complaint_type(_state.complaint)
    if _state.active == "reference":
        return False
    for tensor in tensors:
        if tensor is not None and not _fits(tensor):
            if _state.strict:
                raise ParbankError(
                    f"the ops backend 'triton' was asked for, but got {tensor.dtype} on {tensor.device}; the kernels take "
                    "float32, float16 and bfloat16 on CUDA: move or cast the tensor, or set the backend to 'auto'"
                )
            return False
    return True


def _fits(tensor: Tensor) -> bool:
    return (tensor.is_cuda or INTERPRETED) and tensor.dtype in KERNEL_DTYPES


def _resolve() -> None:
    try:
        set_backend(os.environ.get("PARBANK_OPS") or "auto")
    except ParbankError as error:
        _state.complaint, _state.complaint_type = f"PARBANK_OPS: {error}", type(error)
        return
    if _state.active == "reference":
        # A Triton that fails to import is worth a warning on any machine; a missing one only on a GPU.
        loss = not HAS_TRITON and (torch.cuda.is_available() or importlib.util.find_spec("triton") is not None)
        level = logging.WARNING if loss else logging.INFO
        _log.log(level, "ops run in plain PyTorch: %s", why_no_kernels() or "by choice")


_resolve()
