"""The part of cuBLASLt's C interface that product.py needs, through ctypes, from the library that PyTorch has loaded.

cuBLAS stores matrices by columns. A row-major matrix read by columns is its transpose, so the row-major product D = A
B is computed as D^T = B^T A^T: b is the library's first factor and a its second.
"""

import ctypes
import functools
import os
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parbank.errors import ParbankError

COMPUTE_32F = 68  # CUBLAS_COMPUTE_32F: sums in float32
DATA_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
DESC_TRANSA, DESC_TRANSB = 3, 4  # CUBLASLT_MATMUL_DESC_*
PREF_MAX_WORKSPACE_BYTES, PREF_REDUCTION_SCHEME_MASK = 1, 3  # CUBLASLT_MATMUL_PREF_*
PREF_MIN_ALIGNMENT_A_BYTES = 5  # and 6, 7 and 8 for B, C and D
# A long sum may be split. Of the ways to add up the parts (cublasLtReductionScheme_t) only this is let in besides not
# splitting at all: parts in float32 in the workspace, added in a separate pass. The others round parts to 16 bits, and
# the one in place adds them in the output itself.
REDUCTION_COMPUTE_TYPE = 2
STATUS = {
    3: "allocation failed",
    7: "invalid value",
    8: "architecture mismatch",
    13: "execution failed",
    14: "internal error",
    15: "not supported",
}
ALIGNMENT = 256  # bytes: the library's default assumption, and more than any algorithm needs


class CublasError(ParbankError):
    """A status that is not success."""


@dataclass(frozen=True)
class Operand:
    """How a matrix is stored: by rows or by columns, and the step from one line to the next."""

    rows: int
    cols: int
    step: int
    by_columns: bool
    alignment: int
    """The power of two in bytes, up to ALIGNMENT, that its address is a multiple of."""


def lie(x: Tensor) -> Operand | None:
    """The storage of x; None where neither rows nor columns are contiguous, or where lines overlap."""
    rows, cols = x.shape
    down, right = x.stride()
    alignment = min(ALIGNMENT, x.data_ptr() & -x.data_ptr())
    if (right == 1 or cols == 1) and (down >= cols or rows == 1):
        return Operand(rows, cols, down if rows > 1 else cols, False, alignment)
    if (down == 1 or rows == 1) and right >= rows:
        return Operand(rows, cols, right, True, alignment)
    return None


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _Result(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


_FUNCTIONS: dict[str, list[Any]] = {
    "cublasLtMatmulDescCreate": [POINTER(c_void_p), c_int, c_int],
    "cublasLtMatmulDescSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatrixLayoutCreate": [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64],
    "cublasLtMatmulPreferenceCreate": [POINTER(c_void_p)],
    "cublasLtMatmulPreferenceSetAttribute": [c_void_p, c_int, c_void_p, c_size_t],
    "cublasLtMatmulPreferenceDestroy": [c_void_p],
    # handle, description, the four layouts, preference, how many are wanted, where to, how many came
    "cublasLtMatmulAlgoGetHeuristic": [*[c_void_p] * 7, c_int, POINTER(_Result), POINTER(c_int)],
    # handle, description, alpha, a and b with layouts, beta, c and d with layouts, algorithm, workspace and size, stream
    "cublasLtMatmul": [*[c_void_p] * 14, c_size_t, c_void_p],
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with the argument types of the functions used."""
    for name, types in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, c_int
    return library


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library that PyTorch uses, and no other of that name: RTLD_NOLOAD finds only loaded libraries."""
    if torch.version.cuda is None or not hasattr(os, "RTLD_NOLOAD"):
        return None
    try:
        return declare(ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}", mode=os.RTLD_NOLOAD))
    except (OSError, AttributeError):  # linked into PyTorch, or another system; a function that is not there
        return None


class Matmul:
    """One product of given operands, and the algorithms that the library proposes for it, its own first choice first.

    Its objects in the library are small and live as long as the process: one set per shape of the program.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        handle: int,
        dtype: torch.dtype,
        a: Operand,
        b: Operand,
        c: Operand | None,
        *,
        wanted: int,
        workspace: int,
    ) -> None:
        self._library, self._type = library, DATA_TYPES[dtype]
        self._described = c_void_p()
        self._call("cublasLtMatmulDescCreate", byref(self._described), COMPUTE_32F, DATA_TYPES[torch.float32])
        self._set(self._described, DESC_TRANSA, c_int(b.by_columns), "Desc")
        self._set(self._described, DESC_TRANSB, c_int(a.by_columns), "Desc")
        self._a, self._b = self._layout(a), self._layout(b)
        self._d = self._layout(Operand(a.rows, b.cols, b.cols, False, ALIGNMENT))
        self._c = self._d if c is None else self._layout(c)
        self._alpha, self._beta = c_float(1), c_float(0 if c is None else 1)
        self._results = self._propose(handle, (b, a, c), wanted, workspace)

    def __len__(self) -> int:
        return len(self._results)

    def run(
        self, index: int, tensors: tuple[Tensor, Tensor, Tensor | None], out: Tensor, handle: int, stream: int
    ) -> None:
        """out = a b + c by one of the algorithms. The workspace goes back to the allocator at once, as any tensor of the stream."""
        a, b, c = tensors
        result = self._results[index]
        room = torch.empty(result.workspace, dtype=torch.uint8, device=out.device) if result.workspace else None
        self._call(
            "cublasLtMatmul", handle, self._described,
            byref(self._alpha), b.data_ptr(), self._b, a.data_ptr(), self._a,
            byref(self._beta), (out if c is None else c).data_ptr(), self._c, out.data_ptr(), self._d,
            byref(result.algorithm), None if room is None else room.data_ptr(), result.workspace, stream,
        )  # fmt: skip

    def _propose(
        self, handle: int, operands: tuple[Operand, Operand, Operand | None], wanted: int, workspace: int
    ) -> list[_Result]:
        preference = c_void_p()
        self._call("cublasLtMatmulPreferenceCreate", byref(preference))
        try:
            self._set(preference, PREF_MAX_WORKSPACE_BYTES, c_uint64(workspace), "Preference")
            self._set(preference, PREF_REDUCTION_SCHEME_MASK, c_uint32(REDUCTION_COMPUTE_TYPE), "Preference")
            for attribute, operand in enumerate(operands, PREF_MIN_ALIGNMENT_A_BYTES):
                if operand is not None:
                    self._set(preference, attribute, c_uint32(operand.alignment), "Preference")
            results, count = (_Result * wanted)(), c_int()
            layouts = self._b, self._a, self._c, self._d
            self._call(
                "cublasLtMatmulAlgoGetHeuristic",
                handle,
                self._described,
                *layouts,
                preference,
                wanted,
                results,
                byref(count),
            )
        finally:
            self._call("cublasLtMatmulPreferenceDestroy", preference)
        usable = [result for result in results[: count.value] if result.state == 0]
        if not usable:
            raise CublasError("cuBLASLt proposes no algorithm")
        return usable

    def _layout(self, x: Operand) -> c_void_p:
        shape = (x.rows, x.cols) if x.by_columns else (x.cols, x.rows)
        made = c_void_p()
        self._call("cublasLtMatrixLayoutCreate", byref(made), self._type, *shape, x.step)
        return made

    def _set(self, of: c_void_p, attribute: int, value: Any, kind: str) -> None:
        self._call(f"cublasLtMatmul{kind}SetAttribute", of, attribute, byref(value), ctypes.sizeof(value))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise CublasError(f"{name} returned {status} ({STATUS.get(status, 'see cublasStatus_t')})")
