"""Work replayed as CUDA graphs does what the work does, and starts over where something moved."""

import gc

import pytest
import torch
from torch import Tensor

from parbank.graphs import Graphs


class Sum:
    """Adds up what it is given; counts how often Python ran it."""

    def __init__(self, device: str) -> None:
        self.total, self.runs = torch.zeros((), device=device), 0

    def __call__(self, *inputs: Tensor) -> None:
        self.runs += 1
        for tensor in inputs:
            self.total += tensor.sum()


def test_without_graphs_every_call_is_the_work_itself() -> None:
    work, graphs = Sum("cpu"), Graphs(enabled=False)
    for number in range(4):
        graphs.run(work, [torch.full((3,), number), torch.ones(2)])
    assert work.total.item() == 3 * (0 + 1 + 2 + 3) + 4 * 2
    assert (work.runs, graphs.captures) == (4, 0)


@pytest.mark.gpu
def test_a_graph_for_each_set_of_shapes_and_each_key() -> None:
    work, graphs, expected = Sum("cuda"), Graphs(enabled=True), 0.0
    for number in range(1, 6):
        for length in (3, 5):
            for key in ("a", "b"):
                graphs.run(work, [torch.full((length,), float(number), device="cuda")], key=(key,))
                expected += number * length
    assert work.total.item() == expected
    assert graphs.captures == 4
    assert work.runs == 4 * 2, "once as it is and once recorded"


@pytest.mark.gpu
def test_what_moves_is_found_again() -> None:
    work, graphs = Sum("cuda"), Graphs(enabled=True)
    one = torch.ones(2, device="cuda")
    for _ in range(3):
        graphs.run(work, [one], places=lambda: [work.total.data_ptr()])
    assert graphs.captures == 1
    old, work.total = work.total, torch.zeros((), device="cuda")
    for _ in range(3):
        graphs.run(work, [one], places=lambda: [work.total.data_ptr()])
    assert (old.item(), work.total.item(), graphs.captures) == (6.0, 6.0, 2)


@pytest.mark.gpu
def test_the_inputs_may_be_anywhere() -> None:
    """A graph reads its own copy: neither a new tensor's address nor what is done to it later matters."""
    work, graphs = Sum("cuda"), Graphs(enabled=True)
    kept = [torch.full((4,), float(n), device="cuda") for n in range(5)]
    for tensor in kept:
        graphs.run(work, [tensor[::2]])
        tensor.fill_(100.0)
    assert work.total.item() == 2 * (0 + 1 + 2 + 3 + 4)


@pytest.mark.gpu
def test_garbage_is_left_until_a_recording_is_done() -> None:
    """An older graph that only a cycle still holds would be freed in the middle, by a collection that any line may start."""

    def work(tensor: Tensor) -> None:
        held = [[object()] for _ in range(1000)]  # allocations start a collection
        tensor.add_(len(held))
        assert not gc.isenabled() or not torch.cuda.is_current_stream_capturing()

    for _ in range(3):
        graphs, number = Graphs(enabled=True), torch.zeros(2, device="cuda")
        cycle: list[object] = [graphs]
        cycle.append(cycle)
        for _ in range(3):
            graphs.run(work, [number])
        del graphs, cycle
        assert gc.isenabled()
    gc.collect()
