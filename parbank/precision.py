"""The precision of a forward pass: the same in training, scoring and calibration."""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bfloat16 on CUDA, float32 elsewhere."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
