"""The interface of an algorithm, and the table of algorithms by name.

A group names its algorithm: {"params": [...], "algorithm": "muon"}. There are two kinds:

- Element-wise. Every rank has the whole gradient and the whole state, and does the same arithmetic. AdamW is one.
- Matrix. Blocks of one shape form a batch. One rank owns a block: it has the block's gradient and state, and sends the
  update to the others. Muon is one.

A new algorithm is a file in `algorithms/` with a subclass of either kind, and a line in `algorithms/__init__.py`. From
outside the package: ALGORITHMS["name"] = MyAlgorithm(). The optimizer does the rest for every algorithm: the sum over ranks,
the global clip, skipped steps, bfloat16 weights, checkpoints and CUDA graphs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from parbank.config import choose, require
from parbank.errors import ConfigError
from parbank.optim.dtensor import is_sharded, local_of
from parbank.optim.hyper import check_number
from parbank.optim.master import LIKE_THE_WEIGHT, check_dtype, check_fit, join_master, split_master, wide_dtype
from parbank.optim.memory import arrange, make_dense, overlaps

if TYPE_CHECKING:
    from parbank.optim.kernels import Tables
    from parbank.optim.layout import Batch, MatrixParam, Member, Piece
    from parbank.optim.update import Control

Group = dict[str, Any]


class Algorithm:
    """How the parameters of a group are updated. One object serves all optimizers: it holds nothing of its own."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Options of a group that ParallelMuon does not have itself, or has with another default."""

    def complete(self, group: Group) -> None:
        """Brings options into their usual form, in place: lists that come back from JSON, for instance."""

    def check_options(self, options: Group) -> None:
        """Raises ConfigError where an option of this algorithm cannot be used."""

    def constants(self, group: Group) -> Hashable:
        """Values that a CUDA graph of the step stores: when they change, the step is captured again."""
        return ()


@dataclass(frozen=True)
class Settings:
    """The settings of an element-wise update, as 0-d tensors on the device."""

    lr: Tensor
    weight_decay: Tensor
    factor: Tensor
    """The factor on every gradient: the clip, the mean over ranks, the loss scale."""
    taken: Tensor
    """1.0, or 0.0 for a step that is skipped: then nothing may change, and gradients may be NaN."""
    captured: bool
    """A CUDA graph captures the step: numbers that schedules change must be read from here, not from the group."""

    def scale(self, grad: Tensor) -> Tensor:
        """The gradient times `factor`; zeros where the step is skipped."""
        return torch.where(self.taken > 0, grad * self.factor, 0.0)


def check_betas(betas: Sequence[float]) -> None:
    """Refuses anything but two decay rates of running means."""
    pair = isinstance(betas, Sequence) and not isinstance(betas, str) and len(betas) == 2
    require(pair, f"betas must be two numbers, got {betas!r}")
    for name, beta in zip(("the first of betas", "the second of betas"), betas):
        check_number(name, beta, below=1)


class ElementwiseAlgorithm(Algorithm, ABC):
    """An update of each number by itself: it also works on the part of a weight that FSDP2 leaves on a rank."""

    @abstractmethod
    def init_state(self, state: dict[str, Any], param: Tensor) -> None:
        """Creates the missing state of a parameter."""

    def prepare_state(self, state: dict[str, Any], param: Tensor) -> None:
        """`init_state`, and the missing bits of a bfloat16 weight (see `master`). Follows a weight to another dtype."""
        self.init_state(state, param)
        shape, wide = param.shape, wide_dtype(param.dtype)
        for key in LIKE_THE_WEIGHT:
            if (value := state.get(key)) is not None:
                check_fit(shape, value.shape)
                if value.dtype != wide and value.is_floating_point():
                    state[key] = value.to(wide)
        if param.dtype == torch.bfloat16 and "low_bits" not in state:
            state["low_bits"] = torch.zeros_like(param, dtype=torch.int16)

    @abstractmethod
    def update(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        states: Sequence[dict[str, Any]],
        group: Group,
        settings: Settings,
    ) -> None:
        """One step of some parameters of a group, in place. Weights and gradients are float32, in the same memory order."""

    def step(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
        group: Group,
        settings: Settings,
    ) -> None:
        """`update` on this rank's part of the parameters, with the missing bits of bfloat16 weights joined to them.

        Weights with gaps in memory, and states in another memory order than their weight, are updated in a copy.
        """
        if not params:
            return
        if all(map(_lies_together, params, grads, states)):  # the usual case: no copies
            self.update(list(params), list(grads), states, group, settings)
            return
        params = [local_of(param) for param in params]
        held = [{key: local_of(value) for key, value in state.items()} for state in states]
        weights = [_whole_weight(param, state) for param, state in zip(params, held)]
        arranged = [
            {key: arrange(value, weight) if isinstance(value, Tensor) else value for key, value in state.items()}
            for weight, state in zip(weights, held)
        ]
        self.update(weights, [_like(local_of(g), w) for g, w in zip(grads, weights)], arranged, group, settings)
        for param, weight, state, copies in zip(params, weights, held, arranged):
            for key, value in state.items():
                if copies[key] is not value:
                    value.copy_(copies[key])
            if param.dtype == torch.bfloat16:
                split_master(weight, param, state["low_bits"])
            elif weight is not param:
                param.copy_(weight)


@dataclass(frozen=True)
class Work:
    """The work of a matrix algorithm in one step: the blocks of a batch that this rank owns."""

    batch: "Batch"
    pieces: Sequence["Piece"]
    raw_grads: Sequence[Tensor]
    """`grads`, contiguous and of any shape: for kernels, which need no more than an address."""
    control: "Control"
    state: Callable[[str], list[Tensor]]
    """For each name of a state, its blocks per piece, as stored."""
    tables: "Tables"
    captured: bool
    """A CUDA graph captures the step, so that launches are free."""

    @cached_property
    def grads(self) -> list[Tensor]:
        """Per piece: its blocks (count, rows, cols), as stored. Not yet multiplied by the factor in `control`."""
        pairs = zip(self.pieces, self.raw_grads)
        return [grad.view(piece.count, piece.member.rows, piece.member.cols) for piece, grad in pairs]


class MatrixAlgorithm(Algorithm, ABC):
    """An update of whole matrices, in batches of one shape."""

    layout_options: ClassVar[tuple[str, ...]] = ()
    """Options of a group that all matrices of a batch must share."""

    def batch_options(self, group: Group) -> Any:
        """`layout_options` in the form that `directions` reads, as `work.batch.options`. Must be hashable."""
        return tuple(group[name] for name in self.layout_options)

    @abstractmethod
    def state_shapes(self, member: "Member", options: Any) -> dict[str, tuple[int, ...]]:
        """The float32 state of each block, by name: (rows, cols) of the member, or fewer dimensions."""

    @abstractmethod
    def directions(self, work: Work) -> Tensor:
        """Updates (owned blocks, rows, cols) of the batch: the optimizer subtracts each one times lr and shape factor.

        The dtype must not depend on the rank: a rank that owns no block returns an empty tensor of the same dtype.
        """

    follows: ClassVar[bool] = False
    """Has `follow`: where gradients are equal on all ranks, each rank then holds the whole state."""

    def follow(self, work: Work) -> None:
        """Updates the state, of the blocks in `work` that other ranks own, as `directions` does there: bit for bit. States of
        fewer dimensions than a block are sent by the owner instead."""
        raise NotImplementedError

    def check_sharded(self, param: Tensor, group: Group, name: str) -> None:
        """Raises ConfigError where a weight that FSDP2 has sharded cannot be used."""
        raise ConfigError(
            f"{name} is sharded by FSDP2, and algorithm={group['algorithm']!r} takes whole matrices; use algorithm='muon' or "
            "an element-wise one, or leave out fully_shard"
        )

    def step_sharded(
        self, params: Sequence["MatrixParam"], groups: Sequence[Group], state: Any, control: "Control"
    ) -> None:
        """One step of the weights that `check_sharded` let through."""
        raise NotImplementedError


ALGORITHMS: dict[str, Algorithm] = {}
"""Algorithms by name; `algorithms/__init__.py` fills the table."""


def find_algorithm(group: Mapping[str, Any]) -> Algorithm:
    """The algorithm of a group."""
    return choose(ALGORITHMS, group["algorithm"], "algorithm")


def is_matrix_group(group: Group) -> bool:
    return isinstance(find_algorithm(group), MatrixAlgorithm)


def _lies_together(param: Tensor, grad: Tensor, state: dict[str, Any]) -> bool:
    """Whether kernels can walk weight, gradient and state in step as they are."""
    return (
        param.dtype in (torch.float32, torch.float64)
        and param.is_contiguous()
        and grad.dtype == param.dtype
        and grad.stride() == param.stride()
        and not is_sharded(param)
        and all([value.is_contiguous() for value in state.values() if isinstance(value, Tensor)])
    )


def _whole_weight(param: Tensor, state: dict[str, Any]) -> Tensor:
    """The weight in float32 and without gaps in memory: the parameter itself, or a copy."""
    check_dtype(param, "a parameter")
    if not param.is_contiguous() and overlaps(param):
        raise ConfigError(
            f"a parameter of shape {tuple(param.shape)} has strides {param.stride()} now: several of its numbers share memory "
            "and cannot have values of their own; give the optimizer param.contiguous()"
        )
    return join_master(param, state["low_bits"]) if param.dtype == torch.bfloat16 else make_dense(param)


def _like(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient in the dtype and memory order of the weight: kernels walk both in step."""
    if grad.dtype == weight.dtype and grad.stride() == weight.stride():
        return grad
    return torch.empty_like(weight).copy_(grad)
