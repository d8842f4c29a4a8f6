"""When a graph is recorded and replayed, seen on a CPU: the graph itself is a stand-in that does its work over again."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from parbank import graphs as graphs_module
from parbank.graphs import Graphs, addresses, recording, replay


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


# --- a capture that fails: torch.cuda is a stand-in that keeps count ---------------------------------------------------


class Cuda:
    """The state that a capture changes: the current stream, what the allocator counts as captured, and the generator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.capturing, self.released, self.made = "the caller's", 0, 0, 0
        self.generator_captures, self.launches = False, 0
        names = {
            "current_stream": lambda: self.stream, "current_device": lambda: 0, "set_stream": self.set_stream,
            "graph_pool_handle": lambda: (0, 1), "Stream": self.make_stream, "synchronize": lambda: None,
            "empty_cache": lambda: None, "stream": self.enter, "CUDAGraph": lambda: Graph(self, ""),
            "_sleep": self.launch,
        }  # fmt: skip
        for name, value in names.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release)
        monkeypatch.setattr(graphs_module, "_streams", {}, raising=False)
        monkeypatch.setattr(graphs_module, "_abandoned", [], raising=False)

    def make_stream(self, device: int = 0) -> str:
        self.made += 1
        return f"captures of {device}"

    def set_stream(self, stream: str) -> None:
        self.stream = stream

    def launch(self, cycles: int) -> None:
        self.launches += 1

    @contextmanager
    def enter(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def end(self, device: int, pool: Any) -> None:
        if not self.capturing:
            raise RuntimeError("not currently recording to mempool_id")
        self.capturing -= 1

    def release(self, device: int, pool: Any) -> None:
        self.released += 1


class Graph:
    """As PyTorch's: if the end fails, neither the allocator nor the generator is told."""

    def __init__(self, cuda: Cuda, fails_at: str) -> None:
        self.cuda, self.fails_at = cuda, fails_at

    def capture_begin(self, *pool: Any, **options: Any) -> None:
        self.cuda.capturing += 1
        self.cuda.generator_captures = True
        if self.fails_at == "begin":
            raise RuntimeError("begin")

    def capture_end(self) -> None:
        if self.fails_at == "end":
            raise RuntimeError("end")
        self.cuda.capturing -= 1
        self.cuda.generator_captures = False


@pytest.mark.parametrize("fails_at", ["begin", "work", "end"])
def test_a_capture_that_fails_leaves_the_stream_the_allocator_and_the_generator_as_they_were(
    fails_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda(monkeypatch)

    def capture() -> None:
        with recording(Graph(cuda, fails_at)):  # type: ignore[arg-type]
            assert cuda.stream == "captures of 0"
            if fails_at == "work":
                raise RuntimeError("work")

    for _ in range(2):
        with pytest.raises(RuntimeError, match=fails_at):
            capture()
        assert (cuda.stream, cuda.capturing) == ("the caller's", 0)
        assert not cuda.generator_captures, "dropout, and replays of other graphs, would be errors"
        assert gc.isenabled()
    assert cuda.released == (0 if fails_at == "work" else 2), "the graph itself gives back what it has captured"
    with recording(Graph(cuda, "")):  # type: ignore[arg-type]
        assert cuda.stream == "captures of 0"
        assert not gc.isenabled()
    assert (cuda.stream, cuda.capturing, cuda.made) == ("the caller's", 0, 1)
    assert cuda.launches == 2, "PyTorch warns of an empty graph"


def test_captures_of_two_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, inside, most = Cuda(monkeypatch), [0], [0]

    def capture() -> None:
        with recording(Graph(cuda, "")):  # type: ignore[arg-type]
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.02)
            inside[0] -= 1

    threads = [threading.Thread(target=capture) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1
    assert gc.isenabled()


def test_a_replay_waits_for_the_capture_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 refuses replays while the generator that all graphs read is in a capture."""
    cuda, captures, faults = Cuda(monkeypatch), threading.Event(), []

    class Older:
        def replay(self) -> None:
            faults.append(cuda.generator_captures)

    def capture() -> None:
        with recording(Graph(cuda, "")):  # type: ignore[arg-type]
            captures.set()
            time.sleep(0.1)

    thread = threading.Thread(target=capture)
    thread.start()
    captures.wait()
    replay(Older())
    thread.join()
    assert faults == [False]
