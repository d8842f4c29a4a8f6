"""When a graph is recorded and replayed, seen on a CPU: the graph itself is a stand-in that does its work over again."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parbank.graphs import Graphs, addresses


class StandIn:
    """Replays what it recorded on the tensors it recorded it with, as a CUDA graph does."""

    def __init__(self, work: Callable[..., Tensor], inputs: list[Tensor], result: Tensor) -> None:
        self.work, self.inputs, self.result = work, inputs, result

    def replay(self) -> None:
        self.result.copy_(self.work(*self.inputs))


@pytest.fixture(name="graphs")
def _graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    def capture(self: Graphs, work: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[StandIn, Tensor]:
        self.captures += 1
        result = torch.full_like(work(*inputs), torch.nan)  # recording computes nothing
        return StandIn(work, inputs, result), result

    monkeypatch.setattr(Graphs, "_capture", capture)
    return Graphs(enabled=True)


def test_every_call_sees_its_own_inputs(graphs: Graphs) -> None:
    for number in range(5):
        assert graphs.run(lambda x: 2 * x, [torch.full((3,), float(number))]).tolist() == [2.0 * number] * 3
    assert graphs.captures == 1, "the first call runs as it is, the second records, the rest replay"


def test_another_shape_or_key_is_another_graph(graphs: Graphs) -> None:
    for factor in (1.0, 2.0, 3.0):
        for length in (2, 4):
            for key in ("a", "b"):
                sign = 1.0 if key == "a" else -1.0
                found = graphs.run(lambda x, sign=sign: sign * x, [torch.full((length,), factor)], key=(key,))
                assert found.tolist() == [sign * factor] * length
    assert graphs.captures == 4


def test_a_weight_that_moved_is_found_again(graphs: Graphs) -> None:
    """A graph knows its weights by their addresses: where one moved, the old graph would go on with what lies there now."""
    weights = [torch.ones(2)]
    for number in range(1, 7):
        if number == 4:
            weights[0] = torch.full((2,), 10.0)
        here = weights[0]
        found = graphs.run(
            lambda x, w=here: w * x, [torch.full((2,), float(number))], places=lambda: addresses(weights)
        )
        assert found.tolist() == [float(here[0]) * number] * 2
    assert graphs.captures == 2
