"""The precision of a forward pass: autocast to bfloat16, or none.

Scoring, sampling and calibration use bfloat16 on CUDA and float32 on a CPU, whatever the CPU. So the score of an
artifact does not depend on the kind of CPU. Training uses bfloat16 on a CPU, too, if the CPU multiplies it in hardware:
products are 2.1 times as fast as in float32 (docs/log/cpu.md).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["float32", "bfloat16"]
PrecisionChoice = Literal["auto", "float32", "bfloat16"]

_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")
"""CPU instructions that multiply bfloat16, as PyTorch names them. Arm's are left out: their speed was not measured."""


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions that multiply bfloat16. Without them it is slower than float32."""
    return any(torch.cpu.get_capabilities().get(name, False) for name in _INSTRUCTIONS)


def scoring_precision(device: torch.device) -> Precision:
    """bfloat16 on CUDA, float32 elsewhere."""
    return "bfloat16" if device.type == "cuda" else "float32"


def training_precision(choice: PrecisionChoice, device: torch.device) -> Precision:
    """The precision that a choice stands for on this machine. auto: bfloat16 on CUDA and on a CPU that multiplies it."""
    if choice != "auto":
        return choice
    return "bfloat16" if device.type == "cuda" or (device.type == "cpu" and multiplies_bfloat16()) else "float32"


def autocast(device: torch.device, precision: Precision | None = None) -> AbstractContextManager[object]:
    """Casts products to `precision`; None: to that of scoring."""
    reduced = (precision or scoring_precision(device)) == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16) if reduced else nullcontext()


def as_they_are(device: torch.device) -> AbstractContextManager[object]:
    """Disables autocast inside an op: it would change the dtype of the op's products."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
