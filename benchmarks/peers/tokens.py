"""Our tokens for a peer's script: the windows that our own run visits, in its order, and our chunked score."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parbank.data.batches import BatchStream
from parbank.data.dataset import Dataset


class Windows:
    """The micro-batches of a run of ours with this seed, in order, as (inputs, targets) on the device."""

    def __init__(
        self, dataset: Dataset, *, length: int, batch_rows: int, rows: int, seed: int, device: torch.device
    ) -> None:
        self._stream = BatchStream(
            dataset.train, sequence_length=length, batch_sequences=batch_rows, micro_sequences=rows, seed=seed
        )
        self._buffer = np.empty(self._stream.shape, dtype=np.uint16)
        self._device = device

    def next(self) -> tuple[Tensor, Tensor]:
        self._stream.fill(self._buffer)
        batch = torch.from_numpy(self._buffer.astype(np.int64))
        if self._device.type == "cuda":
            batch = batch.pin_memory()
        batch = batch.to(self._device, non_blocking=True)
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


@dataclass(frozen=True)
class ChunkedScore:
    bpb: float
    loss: float
    """Nats per token."""


@torch.inference_mode()
def score_chunked(
    total_nats: Callable[[Tensor, Tensor], Tensor],
    dataset: Dataset,
    *,
    length: int,
    rows: int,
    ignored: int,
    device: torch.device,
) -> ChunkedScore:
    """What `parbank.eval.windows.score_chunked` computes, for any model: every target once, bytes counted by our tokenizer.

    `total_nats(inputs, targets)` is the sum over the targets that are not `ignored`. Every batch has the same shape, so
    that a compiled model is compiled once; the last one is filled up with ignored targets.
    """
    tokens = dataset.val.read(0, len(dataset.val)).astype(np.int64)
    targets = len(tokens) - 1
    windows = math.ceil(targets / length)
    padded = math.ceil(windows / rows) * rows * length
    inputs = np.zeros(padded, dtype=np.int64)
    wanted = np.full(padded, ignored, dtype=np.int64)
    inputs[:targets], wanted[:targets] = tokens[:-1], tokens[1:]
    nats = torch.zeros((), dtype=torch.float64, device=device)
    for x, y in zip(inputs.reshape(-1, rows, length), wanted.reshape(-1, rows, length), strict=True):
        nats += total_nats(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)).double()
    size = int(dataset.tokenizer.count_bytes(tokens[1:], tokens[:-1]).sum())
    return ChunkedScore(float(nats) / math.log(2) / size, float(nats) / targets)
