"""Muon (Jordan et al. 2024): momentum, then the nearest orthogonal matrix of each update. Optionally each neuron's row is
normalised before it (MuonEq-R, 2026), after it (NorMuon, Li et al. 2025), or both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from parbank.config import require
from parbank.optim import kernels, sharded, update
from parbank.optim.algorithm import Group, MatrixAlgorithm, Work
from parbank.optim.coefficients import Triple, resolve_coefficients
from parbank.optim.hyper import check_count, check_number
from parbank.optim.kernels import use_kernels
from parbank.optim.layout import MatrixParam, Member
from parbank.optim.newton_schulz import METHODS, choose_for, iterate_in_parts
from parbank.optim.update import Control


@dataclass(frozen=True)
class Options:
    """The options that all blocks of a batch share."""

    triples: tuple[Triple, ...]
    method: str
    nesterov: bool
    normuon: bool
    equilibrate: bool


class Muon(MatrixAlgorithm):
    """Options: momentum, nesterov, ns_steps, coefficients, method, normuon, row_beta, equilibrate."""

    layout_options = ("ns_steps", "coefficients", "method", "nesterov", "normuon", "equilibrate")

    def complete(self, group: Group) -> None:
        if not isinstance(group["coefficients"], str):  # lists come back from JSON and from state dicts
            group["coefficients"] = resolve_coefficients(group["coefficients"], group["ns_steps"])

    def check_options(self, options: Group) -> None:
        method, steps = options["method"], options["ns_steps"]
        require(method in METHODS, f"method must be one of {', '.join(METHODS)}, got {method!r}")
        check_count("ns_steps", steps)
        resolve_coefficients(options["coefficients"], steps)
        for key in ("momentum", "row_beta"):
            check_number(key, options[key], below=1)

    def batch_options(self, group: Group) -> Options:
        triples = resolve_coefficients(group["coefficients"], group["ns_steps"])
        return Options(triples, group["method"], group["nesterov"], group["normuon"], group["equilibrate"])

    def state_shapes(self, member: Member, options: Options) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"momentum_buffer": (member.rows, member.cols)}
        return {**shapes, "row_moment": (_neurons(member),)} if options.normuon else shapes

    def directions(self, work: Work) -> Tensor:
        options, control = work.batch.options, work.control
        buffers = work.state("momentum_buffer")
        if use_kernels(work.batch, control) and not options.equilibrate:  # the kernels have no row norms
            X = kernels.prepare(work.batch, work.pieces, work.raw_grads, buffers, control, work.tables)
        else:
            X = update.prepare(work.batch, work.pieces, work.grads, buffers, control)
        if work.pieces:
            X = iterate_in_parts(X, options.triples, choose_for(X, options.method), graphed=work.captured)
        if options.normuon:
            update.normalize_rows(X, work.pieces, work.state("row_moment"), control)
        return X

    follows = True

    def follow(self, work: Work) -> None:
        buffers = work.state("momentum_buffer")
        if use_kernels(work.batch, work.control) and not work.batch.options.equilibrate:
            kernels.follow(work.batch, work.pieces, work.raw_grads, buffers, work.control, work.tables)
        else:
            update.follow(work.pieces, work.grads, buffers, work.control)

    def check_sharded(self, param: Tensor, group: Group, name: str) -> None:
        sharded.check_sharded(param, group, name)

    def step_sharded(
        self, params: Sequence[MatrixParam], groups: Sequence[Group], state: Any, control: Control
    ) -> None:
        sharded.step_sharded(params, groups, state, control)


def _neurons(member: Member) -> int:
    """Rows of the logical matrix; the longer side where a stack mixes transposed and plain matrices."""
    return max(member.cols if flag else member.rows for flag in member.transposed)
