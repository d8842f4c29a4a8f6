"""Gradients at fixed addresses: filled with zeros in place of None, and yet None where nobody computed them. Seen on a CPU,
with a stand-in for the graph that does the work over again."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parbank.optim import ParallelMuon, bank
from parbank.optim.graph import IDLE, PATIENCE, GraphedStep


class Again:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


Train = Callable[[ParallelMuon, list[nn.Parameter]], Iterator[None]]
"""Prepares the gradients of one step after another."""


def _run(graphed: bool, train: Train, **options: Any) -> tuple[ParallelMuon, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 4), (5, 5), (7,))]
    groups = [{"params": params[:2]}, {"params": params[2:], "algorithm": "adamw"}]
    optimizer = ParallelMuon(groups, weight_decay=0.1, cuda_graph="auto" if graphed else False, **options)
    if graphed:
        optimizer._graph = GraphedStep(optimizer, required=False, capture=Again)
    for _ in train(optimizer, params):
        optimizer.step()
    return optimizer, params


def _compare(train: Train) -> ParallelMuon:
    """Runs with a graph and without one, compares the weights, and returns the optimizer with the graph."""
    optimizer, found = _run(True, train)
    _, expected = _run(False, train)
    for a, b in zip(found, expected):
        assert torch.equal(a, b)
    return optimizer


def _backward(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    torch.stack([(p * torch.randn(p.shape, generator=generator)).sum() for p in params]).sum().backward()


def _pilot(optimizer: ParallelMuon) -> Any:
    assert optimizer._graph is not None
    return optimizer._graph.pilot


def _fixed(optimizer: ParallelMuon) -> Any:
    assert optimizer._graph is not None
    return optimizer._graph._fixed


def _usual(optimizer: ParallelMuon, params: list[nn.Parameter]) -> Iterator[None]:
    """zero_grad, backward, step; addresses never come back."""
    held = []
    for step in range(PATIENCE + 12):
        optimizer.zero_grad()
        _backward(params, step)
        held.append([param.grad for param in params])
        yield


def test_gradients_that_move_get_fixed_memory_and_are_not_doubled() -> None:
    optimizer = _compare(_usual)
    assert _pilot(optimizer).replays >= 6
    places = _fixed(optimizer)._places
    assert len(places) == 3
    assert all(param.grad is place for param, place in places.items()), (
        "backward adds to the memory that the graph reads"
    )
    optimizer.zero_grad(set_to_none=True)
    assert all(param.grad is None for param in places)


@pytest.mark.parametrize("clip", [False, True])
def test_a_parameter_that_a_backward_leaves_out_is_left_alone(clip: bool) -> None:
    """Also after clip_grad_norm_, which writes to the zeros."""

    def train(optimizer: ParallelMuon, params: list[nn.Parameter]) -> Iterator[None]:
        yield from _usual(optimizer, params)
        for step in range(12):
            optimizer.zero_grad()
            _backward(params[1:] if step % 6 in (2, 3) else params, step)
            if clip:
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            yield

    optimizer = _compare(train)
    assert _pilot(optimizer).captures >= 2
    assert not _pilot(optimizer).gave_up
    assert len(_fixed(optimizer)._places) == 3, "a gradient that comes back gets its memory back"


def test_a_step_without_any_backward_changes_nothing() -> None:
    def train(optimizer: ParallelMuon, params: list[nn.Parameter]) -> Iterator[None]:
        yield from _usual(optimizer, params)
        before = [param.detach().clone() for param in params]
        optimizer.zero_grad()
        yield
        assert all(torch.equal(a, b) for a, b in zip(params, before))
        yield from _usual(optimizer, params)

    _compare(train)


def _write(param: nn.Parameter, grad: Tensor, way: str) -> None:
    if param.grad is None:
        param.grad = grad.clone()
    elif way == "copy":
        param.grad.copy_(grad)
    elif way == "data":
        param.grad.data.copy_(grad)
    else:
        param.grad.numpy()[...] = grad.numpy()


@pytest.mark.parametrize("way", ["copy", "data", "numpy"])
@pytest.mark.parametrize("partly", [False, True])
def test_gradients_that_are_written_without_a_backward_count(way: str, partly: bool) -> None:
    """By hand, by a library, or by a backward in the caller's own graph: some without a word to autograd."""

    def train(optimizer: ParallelMuon, params: list[nn.Parameter]) -> Iterator[None]:
        yield from _usual(optimizer, params)
        for step in range(12):
            optimizer.zero_grad()
            if partly:
                _backward(params[1:], step)
            for param in params[:1] if partly else params:
                _write(param, torch.randn(param.shape, generator=torch.Generator().manual_seed(step)), way)
            yield

    optimizer = _compare(train)
    assert _pilot(optimizer).gave_up == "gradients are written by other code than backward"
    assert not _fixed(optimizer), "the memory is given back"


@pytest.mark.parametrize("by", ["the model", "the optimizer"])
def test_the_second_copy_is_given_back_where_other_code_sets_gradients_to_none(by: str) -> None:
    """HF Trainer calls model.zero_grad(), Accelerate optimizer.zero_grad(set_to_none=True)."""

    def train(optimizer: ParallelMuon, params: list[nn.Parameter]) -> Iterator[None]:
        held = []
        for step in range(IDLE + 4):
            if by == "the model":
                for param in params:
                    param.grad = None
            else:
                optimizer.zero_grad(set_to_none=True)
            _backward(params, step)
            held.append([param.grad for param in params])
            yield
            if optimizer._graph is not None and step > PATIENCE + 2:
                assert not _fixed(optimizer)

    optimizer = _compare(train)
    assert _pilot(optimizer).gave_up.startswith(f"{IDLE} steps in a row without a replay")


def test_gradients_that_stay_in_a_bank_are_left_there() -> None:
    """Only what moves gets fixed memory."""
    model = nn.ModuleList([nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False), nn.Linear(5, 3, bias=False)])
    banks = bank(model)
    params = list(model.parameters())
    optimizer = ParallelMuon(params, cuda_graph="auto")
    optimizer._graph = GraphedStep(optimizer, required=False, capture=Again)
    for _ in _usual(optimizer, params):
        optimizer.step()
    assert set(_fixed(optimizer)._places) == {params[2]}
    assert params[0].grad is not None
    assert params[0].grad.data_ptr() == banks[0].grads.data_ptr()
    assert _pilot(optimizer).replays >= 6


def test_an_optimizer_is_freed_though_its_parameters_have_hooks() -> None:
    optimizer, params = _run(True, _usual)
    assert params[0]._post_accumulate_grad_hooks
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert not params[0]._post_accumulate_grad_hooks
