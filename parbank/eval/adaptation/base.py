"""The interface of an adapter, and code that adapters share. methods/ttt.py says what an adapter sees, and when."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from parbank.config import require
from parbank.graphs import Graphs
from parbank.model import GPT
from parbank.precision import autocast
from parbank.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class AdaptConfig(ABC):
    """Settings common to all adapters, which adapt a model to the text it is scored on. An adapter is a subclass in its
    own file and a line in `ADAPTERS`."""

    name: ClassVar[str]
    help: ClassVar[str]
    per_document: ClassVar[bool] = False
    """Whether it resets at the start of a document: chunks then end at document boundaries."""
    rounding: ClassVar[frozenset[str]] = frozenset({"micro_tokens"})
    """Settings that change rounding only: scores that differ in them still compare."""

    lr: float = 0.001
    """Learning rate."""
    epochs: int = 3
    """Passes over a chunk once it is scored."""
    sequences: int = 32
    """Windows of context in one step. As published, a chunk has 16 of them and an epoch is one step."""
    chunk: int | None = None
    """Tokens scored before the model learns from them; none takes the context."""
    clip: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    freeze: int = 0
    """The first n blocks do not learn. Embeddings do."""
    blocks: tuple[int, ...] = ()
    """If given, only these blocks learn, and embeddings do not."""
    micro_tokens: int = 32_768
    """Tokens of one pass. Ranks take turns at passes: fewer tokens share better, more run better on one GPU."""

    def __post_init__(self) -> None:
        require(0 <= self.lr < math.inf, f"--lr must be 0 or more and finite, got {self.lr}")
        for name in ("epochs", "sequences", "micro_tokens"):
            value = getattr(self, name)
            require(value >= 1, f"--{name.replace('_', '-')} must be at least 1, got {value}")
        require(self.chunk is None or self.chunk >= 1, f"--chunk must be at least 1, got {self.chunk}")
        require(self.freeze >= 0, f"--freeze must be 0 or more, got {self.freeze}")
        require(self.clip >= 0, f"--clip must be 0 (off) or positive, got {self.clip}")
        require(
            not (self.freeze and self.blocks), "--freeze and --blocks both say which blocks learn; give one of them"
        )

    @abstractmethod
    def make_adapter(self, model: GPT, runtime: Runtime, *, context: int, graphed: bool) -> "Adapter":
        """An adapter of `model` that learns through windows of `context` tokens."""

    def describe(self, context: int) -> dict[str, Any]:
        """Every setting that changes scores, with the defaults that depend on others filled in, and whether what one
        document teaches goes on to the next."""
        names = (field.name for field in fields(self) if field.name not in self.rounding)
        about = {"adapter": self.name, **{name: getattr(self, name) for name in names}}
        about["documents"] = "learnt one by one, each anew" if self.per_document else "in the order of the text"
        return about | {"chunk": self.chunk or context, "blocks": tuple(sorted(set(self.blocks)))}

    def learns(self, block: int) -> bool:
        return block in self.blocks if self.blocks else block >= self.freeze


class Adapter(Protocol):
    """Changes a model's weights by the text it is shown: text whose scores are final, and no other."""

    def learn(self, tokens: Tensor, progress: float) -> None:
        """`tokens` (n + 1,): n targets and the token before them; progress 0..1 through the text."""

    def reset(self) -> None:
        """A document begins: reset, if this adapter resets per document."""


C = TypeVar("C", bound=AdaptConfig)


class StepwiseAdapter(ABC, Generic[C]):
    """Steps over a chunk. On one process each step is one CUDA graph. Several processes gather their gradients in
    between, launch by launch: the same kernels in the same order."""

    def __init__(
        self,
        model: GPT,
        runtime: Runtime,
        config: C,
        *,
        context: int,
        graph: bool = False,
    ) -> None:
        _check_blocks(model, config)
        self._config, self._context, self._runtime = config, context, runtime
        self._model = model
        self._graphs = Graphs(enabled=graph and runtime.is_cuda and runtime.world == 1)
        self._weights: list[Tensor]  # weights of the model that the loss is differentiated by
        self._masks: list[Tensor | None]
        self._parameters: list[Tensor]  # tensors that the optimizer updates
        self._begin(model)

    @abstractmethod
    def _begin(self, model: GPT) -> None:
        """Sets the weights, masks and parameters, and the state of `_update`."""

    @abstractmethod
    def _update(self, grads: list[Tensor]) -> None:
        """Updates the parameters. Called without gradients. By a function of torch.optim, not by one of its classes: they
        import PyTorch's compiler when they are made, which takes seconds."""

    @property
    def captures(self) -> int:
        """The number of captured graphs."""
        return self._graphs.captures

    def _learn_from(self, tokens: Tensor) -> None:
        for batches in plan_steps(tokens, self._context, self._config) * self._config.epochs:
            self._graphs.run(self._step, batches)

    def _step(self, *batches: Tensor) -> None:
        """One optimizer step. It never waits for the device, and its persistent tensors stay in place."""
        grads = sum_gradients(self._gradients, batches, self._runtime)
        for parameter, grad in zip(self._parameters, grads):
            parameter.grad = _laid_out_like(parameter, grad) if self._runtime.is_cuda else grad
        if self._config.clip:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._config.clip)
        with torch.no_grad():
            self._update([cast(Tensor, parameter.grad) for parameter in self._parameters])
        for parameter in self._parameters:
            parameter.grad = None

    def _gradients(self, inputs: Tensor, targets: Tensor, count: int) -> list[Tensor]:
        """Gradients of the sum of the losses over `count`, by the model's weights."""
        with torch.enable_grad(), autocast(self._runtime.device):
            value = self._model(inputs, targets, reduction="sum") / count
        grads = torch.autograd.grad(value, self._weights)
        return [grad if mask is None else grad * mask for grad, mask in zip(grads, self._masks)]


def plan_steps(tokens: Tensor, context: int, config: AdaptConfig) -> list[list[Tensor]]:
    """The micro-batches, (rows, width + 1) each, of every step over a chunk: sequences of at most `context` targets that
    cover all. If they do not divide evenly, the last sequence reaches back, so that all have one shape."""
    count = len(tokens) - 1
    width = min(context, count)
    starts = [min(start, count - width) for start in range(0, count, width)]
    rows = torch.stack([tokens[start : start + width + 1] for start in starts]).long()
    return [list(step.split(max(1, config.micro_tokens // width))) for step in rows.split(config.sequences)]


def sum_gradients(
    gradients: Callable[[Tensor, Tensor, int], list[Tensor]], batches: Sequence[Tensor], runtime: Runtime
) -> list[Tensor]:
    """The gradients of the mean loss over all batches. Ranks take turns at batches, and every rank adds the parts in the
    order of the batches: float addition depends on grouping, and any number of ranks must agree bit for bit."""
    count = sum(batch[:, 1:].numel() for batch in batches)
    total: list[Tensor] = []
    for first in range(0, len(batches), runtime.world):
        # A rank without a batch repeats the last batch, and its result is not used.
        mine = min(first + runtime.rank, len(batches) - 1)
        parts = [gradients(batches[mine][:, :-1], batches[mine][:, 1:], count)]
        if runtime.world > 1:
            parts = _gather(parts[0], runtime.world)
        for part in parts[: len(batches) - first]:
            total = part if not total else [a + b for a, b in zip(total, part)]
    return total


def _gather(grads: list[Tensor], world: int) -> list[list[Tensor]]:
    """Every rank's gradients, by rank."""
    found: list[list[Tensor]] = [[] for _ in range(world)]
    for grad in grads:
        pieces = [torch.empty_like(grad, memory_format=torch.contiguous_format) for _ in range(world)]
        dist.all_gather(pieces, grad.contiguous())
        for rank, piece in enumerate(pieces):
            found[rank].append(piece)
    return found


def bank_masks(model: GPT, config: AdaptConfig) -> dict[str, Tensor | None]:
    """For each bank, (N, 1, 1): 1 where the block of the matrix learns, else 0. None if every block learns."""
    found: dict[str, Tensor | None] = {}
    for key, entries in model.banks.entries.items():
        learns = [config.learns(_block_of(entry.name)) for entry in entries]
        bank = model.banks.bank(key)
        mask = torch.tensor(learns, dtype=bank.dtype, device=bank.device)[:, None, None]
        found[f"banks.{key}"] = None if all(learns) else mask
    return found


def may_learn(name: str, config: AdaptConfig) -> bool:
    if name.startswith("blocks."):
        return config.learns(_block_of(name))
    return name.startswith("banks.") or not config.blocks


def _block_of(name: str) -> int:
    return int(name.split(".")[1])


def _check_blocks(model: GPT, config: AdaptConfig) -> None:
    layers = model.config.layers
    require(
        all(0 <= block < layers for block in config.blocks),
        f"--blocks must lie in 0..{layers - 1}, the model's blocks, got {', '.join(map(str, config.blocks))}",
    )
    require(config.freeze <= layers, f"--freeze must lie in 0..{layers}, the model's blocks, got {config.freeze}")


def _laid_out_like(parameter: Tensor, grad: Tensor) -> Tensor:
    """A gradient in the memory order of its weight. Fused optimizers need it, and a norm is summed in memory order,
    which must not depend on the ranks: gathered gradients are contiguous."""
    return grad if grad.stride() == parameter.stride() else torch.empty_like(parameter).copy_(grad)


@contextmanager
def restored(model: GPT) -> Iterator[None]:
    """Restores every weight, bit for bit, however the block ends."""
    before = [(p, p.detach().clone(), p.requires_grad, p.grad) for p in model.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value, learns, grad in before:
                parameter.copy_(value)
                parameter.requires_grad_(learns)
                parameter.grad = grad
