"""Forward and backward over one micro-batch, launch by launch or replayed as one CUDA graph.

A pass of the golf model is about six hundred launches, and Python needs almost as long to make them as the GPU to run
them (docs/log/step.md). A graph makes them one. Its memory stays in place: the batch is copied in,
gradients are accumulated in place, and the loss is added to a total.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from parbank.data.prefetch import Prefetcher
from parbank.graphs import Graphs, Places, addresses
from parbank.model.gpt import document_lengths
from parbank.precision import Precision, autocast


def cut_windows(batch: Tensor, length: int) -> Tensor:
    """(rows, L + 1) as (rows * L / length, length + 1): the same targets, each with less context."""
    if batch.shape[1] == length + 1:
        return batch
    return batch.unfold(1, length + 1, length).reshape(-1, length + 1)


def take_batch(batches: Prefetcher, length: int, bos_id: int | None = None) -> list[Tensor]:
    """The next micro-batch in windows of `length` tokens. With a `bos_id` also the lengths of its documents. They are
    counted on the host: counting on the GPU would make the host wait."""
    batch = cut_windows(batches.next(), length)
    if bos_id is None:
        return [batch]
    lengths = document_lengths(batches.last_on_host[:, :-1], bos_id, length)
    return [batch, lengths.to(batch.device, non_blocking=True)]


class Passes:
    """Sums the loss and the gradients of the micro-batches of one step."""

    def __init__(
        self,
        forward: Callable[..., Tensor],
        model: nn.Module,
        device: torch.device,
        count: int,
        *,
        graph: bool,
        precision: Precision,
    ) -> None:
        """`count` passes make a step; each loss and gradient is divided by it."""
        self._forward, self._device, self._count = forward, device, count
        self.precision = precision
        self._parameters = list(model.parameters())
        self._total = torch.zeros((), device=device)
        self._graphs = Graphs(enabled=graph and device.type == "cuda")

    def start(self, count: int | None = None) -> None:
        """Starts a step of `count` passes: the loss starts at zero. The optimizer clears the gradients."""
        self._count = count or self._count
        self._total.zero_()

    def use(self, forward: Callable[..., Tensor]) -> None:
        """Computes the loss by another function of the same model from here on, such as a compiled one."""
        self._forward = forward

    @property
    def loss(self) -> Tensor:
        """The mean over the passes since `start`, on the device; the next `start` overwrites it."""
        return self._total

    @property
    def captures(self) -> int:
        """The number of captured graphs."""
        return self._graphs.captures

    def add(self, batch: Tensor, *lengths: Tensor) -> None:
        """Forward and backward of one micro-batch (rows, length + 1), with the lengths of its documents where the model
        takes them. Lengths of another shape are another graph."""
        self._graphs.run(self._run, [batch, *lengths], key=(self._count,), places=self._places)

    def rehearse(self, batch: Tensor, *lengths: Tensor) -> None:
        """The same launch by launch, without a graph: see `parbank.ops.rehearsal`."""
        self._run(batch, *lengths)

    def _run(self, batch: Tensor, *lengths: Tensor) -> None:
        more = {"lengths": lengths[0]} if lengths else {}
        with autocast(self._device, self.precision):
            loss = self._forward(batch[:, :-1], batch[:, 1:], **more) / self._count
        self._differentiate(loss)
        self._total += loss.detach()

    def _differentiate(self, loss: Tensor) -> None:
        """Adds to the gradients as `loss.backward()` does, but with a few launches for the many small parameters, which
        take longer to launch than to run."""
        held = [p.grad for p in self._parameters if p.grad is not None]
        if len(held) < len(self._parameters):
            loss.backward()  # the first time: it makes them
            return
        found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        pairs = [(total, grad) for total, grad in zip(held, found, strict=True) if grad is not None]
        torch._foreach_add_([total for total, _ in pairs], [grad for _, grad in pairs])

    def _places(self) -> Places:
        """The addresses of weights and gradients, which a graph depends on."""
        return addresses(tensor for p in self._parameters for tensor in (p, p.grad))
