"""Says once that steps are skipped because gradients are not finite, and which parameter has them.

The count of skipped steps lies on the device. On a GPU it is copied to the host now and then and read when the copy
has arrived, so that no step waits.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parbank.optim.dtensor import local_of
from parbank.optim.layout import name_of

INTERVAL = 16  # steps between copies from a GPU

_log = logging.getLogger("parbank")


class SkipWatch:
    """Watches the number of steps skipped in a row."""

    def __init__(self) -> None:
        self._said = False
        self._steps = 0
        self._host: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def look(self, skipped_in_a_row: Tensor, groups: Sequence[dict[str, Any]]) -> None:
        """Called after each step."""
        if self._said:
            return
        count = self._poll(skipped_in_a_row) if skipped_in_a_row.is_cuda else int(skipped_in_a_row)
        if count:
            self._said = True
            _log.warning(
                "ParallelMuon skips steps, because a gradient is not finite (NaN or infinite): %s. Weights and state stay as "
                "they are until gradients are finite again. This is said once; optimizer.skipped_in_a_row counts such steps",
                _find_culprit(groups),
            )

    def _poll(self, counter: Tensor) -> int:
        """The count at an earlier step, or 0."""
        self._steps += 1
        if self._steps % INTERVAL or torch.cuda.is_current_stream_capturing():
            return 0
        if self._host is None or self._arrived is None:
            self._host, self._arrived = (
                torch.zeros((), dtype=counter.dtype, device="cpu", pin_memory=True),
                torch.cuda.Event(),
            )
        elif not self._arrived.query():
            return 0
        count = int(self._host)
        self._host.copy_(counter, non_blocking=True)
        self._arrived.record()
        return count


def _find_culprit(groups: Sequence[dict[str, Any]]) -> str:
    """Names the first parameter whose gradient is not finite here. Waits for the device."""
    for group in groups:
        for position, param in enumerate(group["params"]):
            if param.grad is not None and not torch.isfinite(local_of(param.grad)).all():
                return f"that of {name_of(group, position)} of shape {tuple(param.shape)}"
    return "that of another rank or of an earlier step, or all are finite and their norm is too large for float32"
