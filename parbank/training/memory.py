"""The memory of a training step, estimated from the shape of a model, and the memory that is free.

On a CPU the estimate must come before the run: the kernel ends a process that takes too much, without a word.
"""

from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from parbank.cores import group_folders
from parbank.runtime import Runtime

Number = TypeVar("Number", float, NDArray[np.float64])

PARAMETER_BYTES = 32.0
"""Weights, gradients, momenta, averages and copies of one parameter."""
GPU_BYTES, GPU_LOGIT_BYTES = 32.0, 10.0
"""Activations of one token in bfloat16, by layer and channel, and by token of the vocabulary: `sprint` takes 14.8 GB for 98,304
tokens of 11 layers of 512 (benchmarks/results/sprint), 27 bytes with weights and logits; a margin of a fifth."""
CPU_BYTES, CPU_LOGIT_BYTES, CPU_MORE_LAYERS = 118.0, 15.0, 0.7
"""The same on a CPU, by the peak of resident memory in plain PyTorch: `sprint` takes 734 kB a token, `demo` 82 kB, and `demo`
with 8,192 tokens in its vocabulary 181 kB. Embeddings and head count as 0.7 layers. In float32 it is a little less."""
COMPILED = 0.37
"""The least share of that memory that passes compiled by Inductor take: for `demo` 0.37 in bfloat16 (30.5 kB a token), and
0.62 in float32."""


def activation_bytes(layers: Number, width: Number, hidden: Number, vocab: Number, *, cuda: bool) -> Number:
    """Memory of one token in a pass, forward and backward."""
    channels = (width + hidden) / 4
    if cuda:
        return GPU_BYTES * layers * channels + GPU_LOGIT_BYTES * vocab
    return CPU_BYTES * (layers + CPU_MORE_LAYERS) * channels + CPU_LOGIT_BYTES * vocab


def free_memory(place: Runtime) -> float:
    """Bytes that one rank may use now."""
    if place.is_cuda:
        return float(torch.cuda.mem_get_info(place.device)[0])
    return free_host_memory() / place.world


def free_host_memory(root: Path = Path("/")) -> float:
    """Bytes that the kernel can give without swapping, within the limits of the cgroups. Where it does not say: 4 GB."""
    found = [room for folder in group_folders("memory", root) if (room := _read_room(folder)) is not None]
    with suppress(OSError, ValueError, IndexError, StopIteration):
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        found.append(1024.0 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))))
    return max(0.0, min(found, default=4e9))


def _read_room(folder: Path) -> float | None:
    """The bytes that a cgroup (v2 or v1) has left: its limit less its use. Cached files make way, and do not count."""
    for limit, used, cached in (
        ("memory.max", "memory.current", "file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "cache"),
    ):
        with suppress(OSError, ValueError):
            most, now = (int((folder / name).read_text(encoding="ascii")) for name in (limit, used))
            lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
            files = sum(int(line.split()[1]) for line in lines if line.split()[0] == cached)
            return float(most - now + files)
    return None
