"""What a step keeps on the device from one step to the next: hyperparameters, tables, counters, and cached views.

A captured step reads and writes this memory, so that it stays where it is as long as the device and the layout do.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from parbank.optim.hyper import HyperTable, send
from parbank.optim.kernels import Tables
from parbank.optim.memory import Views

MOST_CONSTANTS = 1024  # more than a step uses; where layers are left out at random, almost every step brings new flags


class Buffers:
    """The memory of one optimizer's steps."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.hyper = HyperTable(self.device)
        self.tables = Tables()
        self.staging: dict[int, Tensor] = {}
        """Memory that scattered gradients are copied to, by the id of a batch or of a member."""
        self.views = Views()
        self.captured = False
        """Whether the step under way is captured, or prepares a capture."""
        self.grad_norm = torch.zeros((), dtype=torch.float32, device=self.device)
        self.skipped = torch.zeros((), dtype=torch.bool, device=self.device)
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int64, device=self.device)
        self._constants: dict[tuple[float, ...], Tensor] = {}
        self._layouts = 0

    def move(self, device: torch.device) -> None:
        """Follows the parameters to their device."""
        if device != self.device:
            self.device = device
            self.hyper = HyperTable(device)
            self._constants.clear()
            for name in ("grad_norm", "skipped", "skipped_in_a_row"):
                setattr(self, name, getattr(self, name).to(device))

    def constant(self, values: Sequence[float]) -> Tensor:
        """Constant numbers on the device, sent once: a captured step must not send any."""
        key = tuple(values)
        if key not in self._constants:
            if len(self._constants) >= MOST_CONSTANTS:
                self._constants.clear()
            self._constants[key] = send(values, torch.float32, self.device)
        return self._constants[key]

    def forget_layout(self) -> None:
        """Drops everything that belongs to a layout."""
        self._constants.clear()
        self.tables.clear()
        self.staging.clear()
        self.views.clear()
        self._layouts += 1

    def reset_counters(self) -> None:
        for counter in (self.grad_norm, self.skipped, self.skipped_in_a_row):
            counter.zero_()

    def addresses(self) -> tuple[int, ...]:
        """Memory that a captured step reads and that is neither a parameter's nor its state's: the layout's and the tables' by
        their number, since other contents may come to the same address."""
        kept = (self.hyper.values, self.grad_norm, self.skipped, self.skipped_in_a_row)
        return (self._layouts, self.tables.sent, *(tensor.data_ptr() for tensor in kept))
