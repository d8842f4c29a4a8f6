"""Banks: all weight matrices of one shape, stacked in one contiguous (N, rows, cols) parameter. (Idea: parameter-golf
#399; matrices stored transposed: modded-nanogpt #109.)

An optimizer that works on whole matrices sees a few large batches instead of dozens of small products, and a rank can
own a slice of a bank. Two matrices whose shapes are each other's transpose share a bank: the second is stored
transposed and read through a view. Each slot keeps the matrix's name and logical shape. So checkpoints keep plain
per-layer names, and a shape-dependent learning rate uses the logical shape.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from parbank.model.qat import FakeQuantiser, Rounding


@dataclass(frozen=True)
class Slot:
    """One matrix of a bank."""

    name: str
    transposed: bool


class Banks(nn.Module):
    """Stores matrices in banks by shape, and returns them by name.

    The names are those of plain parameters of the model; `split` and `join` translate.
    """

    def __init__(self, shapes: dict[str, tuple[int, int]]) -> None:
        """`shapes` maps each matrix's name to its logical (rows, cols). Its order is the order inside the banks."""
        super().__init__()
        self.entries: dict[str, list[Slot]] = {}
        for name, (rows, cols) in shapes.items():
            key, mirrored = f"{rows}x{cols}", f"{cols}x{rows}"
            if mirrored in self.entries and mirrored != key:
                self.entries[mirrored].append(Slot(name, transposed=True))
            else:
                self.entries.setdefault(key, []).append(Slot(name, transposed=False))
        for key, entries in self.entries.items():
            rows, cols = map(int, key.split("x"))
            self.register_parameter(key, nn.Parameter(torch.empty(len(entries), rows, cols)))
        self.transposed = {key: tuple(slot.transposed for slot in slots) for key, slots in self.entries.items()}
        """Per bank: which of its matrices are stored transposed."""
        self.fake: FakeQuantiser | None = None
        """Set for quantisation-aware training."""

    def bank(self, key: str) -> nn.Parameter:
        return self.get_parameter(key)

    def matrices(
        self, dtype: torch.dtype | None = None, gains: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Every matrix in its logical orientation, as views of the banks cast to `dtype`.

        `gains` maps names of some matrices to a gain per output channel, which multiplies the rows.

        A whole bank is cast in one pass, and the backward of unbind is one stack. Reading `bank[i]` layer by layer
        would fill a full-size zero tensor for every layer's gradient. Gains are applied to a run of matrices at a
        time for the same reason: a product per layer is a launch of two microseconds with a gap, once forward and
        three times backward.
        """
        found = {}
        for key, entries in self.entries.items():
            bank: Tensor = getattr(self, key)  # torch.func.functional_call replaces the parameter by a plain tensor
            if self.fake is not None:
                bank = self.fake(key, bank)
            if dtype is not None:
                bank = bank.to(dtype)
            for run, part in _split_runs(entries, bank, gains or {}):
                for entry, matrix in zip(run, part.unbind(0)):
                    found[entry.name] = matrix.mT if entry.transposed else matrix
        return found

    def quantise_in_training(self, *, bits: int, rounding: Rounding) -> FakeQuantiser:
        """Adds quantisation-aware training between the banks and their readers; see qat.py."""
        self.fake = FakeQuantiser(self.transposed, bits=bits, rounding=rounding).to(next(self.parameters()).device)
        return self.fake

    def split(self, tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
        """Replaces banks (weights, averages) by named logical matrices, as views. In `tensors` a bank is named prefix +
        "512x512"."""
        rest = dict(tensors)
        for key, entries in self.entries.items():
            for entry, matrix in zip(entries, rest.pop(prefix + key).unbind(0)):
                rest[entry.name] = matrix.mT if entry.transposed else matrix
        return rest

    def join(self, tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
        """The inverse of `split`. A bank that lacks a matrix is left out, so that load_state_dict reports it."""
        rest = dict(tensors)
        for key, entries in self.entries.items():
            if all(entry.name in rest for entry in entries):
                matrices = [(rest.pop(entry.name), entry.transposed) for entry in entries]
                rest[prefix + key] = torch.stack([m.mT if transposed else m for m, transposed in matrices])
        return rest


def _split_runs(slots: list[Slot], bank: Tensor, gains: Mapping[str, Tensor]) -> Iterator[tuple[list[Slot], Tensor]]:
    """Runs of neighbouring matrices with one orientation, with or without gains, and with the gains applied."""
    runs = [list(run) for _, run in groupby(slots, key=lambda slot: (slot.name in gains, slot.transposed))]
    for run, part in zip(runs, bank.split([len(run) for run in runs])):
        if run[0].name not in gains:
            yield run, part
            continue
        gain = torch.stack([gains[slot.name] for slot in run]).to(bank.dtype)
        yield run, part * (gain[:, None, :] if run[0].transposed else gain[:, :, None])
