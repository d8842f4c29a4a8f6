"""Launch configs: a small table per op and architecture, read by the launcher.

`@triton.autotune` would measure at run time, give each rank its own choice, and need a driver. Here the choice is a
constant that a test can compile ahead of time. `benchmarks/tune.py` times candidates on a GPU; the tables beside the
kernels hold its results.

A table maps an architecture to rows `(limit, Launch)`. The first row whose limit is at least the size applies; the
last row takes the rest. Each op defines what `size` means, such as the side of a matrix or the length of a row.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

ARCHITECTURES = {"sm80": 80, "sm90": 90, "sm100": 100}
"""Table name -> the compute capability it is compiled for in the tests."""

SHARED_LIMIT = {"sm80": 99 * 1024, "sm90": 227 * 1024, "sm100": 227 * 1024}
"""Bytes of shared memory a block may take. sm80 also serves 8.6, 8.9 and 12.0, which have 99 KiB (8.0 has 163)."""

ANY = 1 << 62  # the limit of a table's last row


@dataclass(frozen=True)
class Launch:
    """One way to launch a kernel: its tile constants and the compiler's two knobs."""

    blocks: Mapping[str, Any]
    """constexpr arguments of the kernel, by name."""
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further launch options of Triton, such as `launch_pdl` or `maxnreg`."""

    def kwargs(self) -> dict[str, Any]:
        """The keywords of a launch: `kernel[grid](..., **launch.kwargs())`."""
        return {**self.blocks, "num_warps": self.num_warps, "num_stages": self.num_stages, **self.options}


Rows = Sequence[tuple[int, Launch]]
_tables: dict[str, dict[str, Rows]] = {}
_forced: dict[str, Launch] = {}


def register(op: str, *, sm80: Rows, sm90: Rows | None = None, sm100: Rows | None = None) -> None:
    """Declares an op's tables. An architecture without its own takes the sm80 one, which runs everywhere."""
    _tables[op] = {"sm80": sm80, "sm90": sm90 or sm80, "sm100": sm100 or sm90 or sm80}


def tables() -> Mapping[str, Mapping[str, Rows]]:
    """Every table: op -> architecture -> rows. The ahead-of-time test walks it."""
    return _tables


def choose(op: str, size: int, device: torch.device) -> Launch:
    """The launch config of an op for a size on a device."""
    if op in _forced:
        return _forced[op]
    rows = _tables[op][architecture(device)]
    return next((launch for limit, launch in rows if size <= limit), rows[-1][1])


def architecture(device: torch.device) -> str:
    """The table a device reads. Consumer Blackwell (12.x) has Ampere's shared memory, so it is not sm100."""
    return "sm80" if device.type != "cuda" else _architecture(device.index or 0)


@lru_cache
def _architecture(index: int) -> str:
    major, _ = torch.cuda.get_device_capability(index)
    return {9: "sm90", 10: "sm100"}.get(major, "sm80")


@contextlib.contextmanager
def force(op: str, launch: Launch) -> Iterator[None]:
    """Uses one config for an op whatever its size: for tuning and for tests."""
    before = _forced.get(op)
    _forced[op] = launch
    try:
        yield
    finally:
        _forced.pop(op)
        if before is not None:
            _forced[op] = before
