"""Products without a GPU: what goes to PyTorch, the choice among algorithms, and the way to cuBLASLt with a stand-in for it."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from matrices import HANDLE, LAYOUTS, STREAM, Layout, by_columns, counted, exact, made, rows_apart
from torch import Tensor
from torch._dynamo.utils import counters

from parbank.errors import ParbankError
from parbank.ops import cublaslt
from parbank.ops import product as module
from parbank.ops.cublaslt import CublasError, lie
from parbank.ops.product import KernelChoice, choose, plans, product, random_like


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_b", LAYOUTS)
@pytest.mark.parametrize("of_a", LAYOUTS)
def test_same_as_torch(of_a: Layout, of_b: Layout, dtype, device):
    """Too little to do for cuBLASLt, wherever it runs."""
    a, b, c = made(5, 7, 6, device, dtype)
    a, b, c = of_a(a), of_b(b), of_b(c)
    for found, expected in ((product(a, b), torch.mm(a, b)), (product(a, b, c), torch.addmm(c, a, b))):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert found.is_contiguous()
        assert found.dtype == dtype


@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0), (1, 1, 1)])
def test_empty_sizes(shape, device):
    a, b, c = made(*shape, device, torch.bfloat16)
    torch.testing.assert_close(product(a, b), torch.mm(a, b))
    torch.testing.assert_close(product(a, b, c), torch.addmm(c, a, b))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda a, b, c: product(a, b.t()), r"a \(3, 4\), b \(5, 4\) do not fit; they must be \(M, K\), \(K, N\)"),
        (lambda a, b, c: product(a[None], b), r"a \(1, 3, 4\), b \(4, 5\) do not fit"),
        (lambda a, b, c: product(a, b, c.t()), r"c \(5, 3\) do not fit"),
        (lambda a, b, c: product(a, b, c[0]), r"c \(5,\) do not fit"),
        (lambda a, b, c: product(a.int(), b.int()), r"a is torch.int32; it must be floating"),
        (lambda a, b, c: product(a, b.half()), r"a is torch.float32, b torch.float16; cast them to one type"),
        (lambda a, b, c: product(a, b, c.half()), r"c torch.float16; cast them to one type"),
        (lambda a, b, c: product(a, b.to("meta")), r"meta; move them to one device"),
        (lambda a, b, c: product(a, b, c.to("meta")), r"meta; move them to one device"),
    ],
)
def test_wrong_arguments_are_named(call, said, device):
    with pytest.raises(ParbankError, match=said):
        call(*made(3, 4, 5, device))


@pytest.mark.parametrize("added", [False, True])
def test_compiles_whole_and_once(added, device):
    torch._dynamo.reset()
    counters.clear()
    a, b, c = made(6, 8, 4, device)
    b, more = by_columns(b), [c] if added else []
    compiled = torch.compile(
        lambda *x: product(*x).t().relu(),
        fullgraph=True,
        backend="inductor" if torch.cuda.is_available() else "aot_eager",
    )
    for _ in range(2):
        found = compiled(a, b, *more)
    torch.testing.assert_close(found, product(a, b, *more).t().relu())
    assert found.stride() == (1, 4)
    assert counters["stats"]["unique_graphs"] == 1


def test_registered_as_pytorch_wants_it(device):
    a, b, c = made(3, 4, 5, device)
    torch.library.opcheck(module._product, (a, by_columns(b), None))
    torch.library.opcheck(module._product, (rows_apart(a), b, c))


def test_no_derivative(device):
    a, b, _ = made(3, 4, 5, device)
    y = product(a.requires_grad_(), b)
    with pytest.raises(ParbankError, match=r"product has no derivative.*no second derivative.*torch\.mm.*use_backend"):
        y.sum().backward()


# The choice, with functions that are no products


def writing(value: float) -> module.Run:
    def run(out: Tensor) -> None:
        out.fill_(value)

    return run


def failing(out: Tensor) -> None:
    raise CublasError("not this one")


def nothing(out: Tensor) -> None:
    """Leaves the output as it was."""


def choice_of(runs: list[module.Run], *times: list[float]) -> KernelChoice:
    asked: list[int] = []

    def clock(calls):
        asked.append(len(calls))
        return times

    expected, scratch = torch.full((2, 3), 7.0).bfloat16(), torch.full((2, 3), 7.0).bfloat16()
    found = choose(runs, expected, scratch, clock)
    assert asked == [len(times)]  # those that are not equal are not even timed
    return found


def test_the_fastest_of_equal_bits_is_chosen():
    assert choice_of([writing(1), writing(1), writing(1)], [3.0], [1.0], [2.0]) == KernelChoice(1, 3.0, 1.0)


def test_other_bits_are_out_however_fast():
    # 1.0078125 is the neighbour of 1 in bfloat16
    assert choice_of([writing(1), writing(1.0078125), writing(1)], [3.0], [2.0]) == KernelChoice(2, 3.0, 2.0)
    assert choice_of([writing(0), writing(-0.0)], [3.0]) == KernelChoice(0, 3.0, 3.0)


def test_what_fails_is_out():
    assert choice_of([failing, writing(1), failing, writing(2), writing(1)], [3.0], [2.0]) == KernelChoice(4, 3.0, 2.0)
    with pytest.raises(CublasError, match="none of the algorithms"):
        choice_of([failing, failing])


def test_what_writes_nothing_is_out():
    assert choice_of([writing(1), nothing, writing(1)], [3.0], [4.0]) == KernelChoice(0, 3.0, 3.0)
    # nor may it pass for what the one before has written
    assert choice_of([writing(1), writing(1), nothing], [3.0], [4.0]) == KernelChoice(0, 3.0, 3.0)


def test_a_single_fast_run_does_not_count():
    assert choice_of([writing(1), writing(1)], [3.0, 3.0, 3.0], [4.0, 0.1, 4.0]) == KernelChoice(0, 3.0, 3.0)


def test_the_first_of_equally_fast_ones_is_kept():
    assert choice_of([writing(1), writing(1)], [3.0], [3.0]).index == 0


# From end to end, with a stand-in for the library


@pytest.mark.parametrize("layout", LAYOUTS[:5])
def test_random_numbers_lie_as_the_operand(layout):
    x = layout(torch.zeros(6, 40).bfloat16())
    found = random_like(x, torch.Generator().manual_seed(0))
    assert found.stride() == x.stride()
    assert lie(found) == lie(x)
    assert 0.8 < found.float().std() < 1.2
    again = random_like(x, torch.Generator().manual_seed(0))
    assert torch.equal(found, again)


class HostEvent:
    """`torch.cuda.Event` of a device that is done when the call returns."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "HostEvent") -> float:
        return 1e3 * (other.at - self.at)


@pytest.fixture
def by_stand_in(stand_in, fresh, monkeypatch) -> Iterator[Callable[..., Tensor | None]]:
    """The way to the library, with the stand-in for it and the CPU for the GPU."""
    monkeypatch.setattr(cublaslt, "load", lambda: stand_in)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: HANDLE)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", HostEvent)
    yield module._by_cublaslt
    ctypes.c_int.in_dll(stand_in, "failing").value = 0


@pytest.mark.parametrize("of_c", [None, *LAYOUTS])
@pytest.mark.parametrize("of_a", LAYOUTS)
def test_a_product_from_end_to_end(of_a: Layout, of_c: Layout | None, by_stand_in):
    a, b, c = counted(5, 8, 6)
    a, c = of_a(a), of_c(c) if of_c else None
    found = by_stand_in(a, b, c)
    assert found.is_contiguous()
    assert torch.equal(found.double(), exact(a, b, c))


def test_the_choice_is_among_equal_bits_and_told(by_stand_in):
    """Zeros, as models begin with: there all algorithms agree, and the one that rounds halfway must be out all the same."""
    zeros = torch.zeros(40, 300).bfloat16()
    state = torch.random.get_rng_state()
    by_stand_in(zeros, zeros.t(), None)
    assert torch.equal(torch.random.get_rng_state(), state)
    (row,) = plans()
    assert (row.problem.a.rows, row.problem.b.by_columns, row.problem.c, row.candidates) == (40, True, None, 4)
    assert row.choice.index in (0, 3)
    assert row.choice.best_ms <= row.choice.first_ms
    by_stand_in(zeros, zeros.t(), None)
    assert len(plans()) == 1


def test_a_capture_runs_the_first_and_chooses_nothing(by_stand_in, stand_in, monkeypatch):
    a, b, _ = counted(5, 8, 6)
    last = ctypes.c_int.in_dll(stand_in, "last")
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert torch.equal(by_stand_in(a, b, None).double(), exact(a, b))
        assert (last.value, plans()[0].choice) == (0, None)
    by_stand_in(a, b, None)
    assert last.value == plans()[0].choice.index


def test_what_the_library_does_not_plan_is_pytorchs(by_stand_in, caplog):
    a, b, _ = made(5, 8, 6, dtype=torch.float16)
    for _ in range(2):
        assert by_stand_in(a, b, None) is None
    assert caplog.text.count("goes to PyTorch: cublasLtMatmulAlgoGetHeuristic returned 15 (not supported)") == 1
    assert plans() == []


def test_where_no_algorithm_runs_it_is_pytorchs(by_stand_in, stand_in, caplog):
    ctypes.c_int.in_dll(stand_in, "failing").value = 1
    a, b, _ = counted(5, 8, 6)
    assert by_stand_in(a, b, None) is None
    assert "none of the algorithms that cuBLASLt proposes runs" in caplog.text


def test_an_error_in_a_run_names_status_and_shapes(by_stand_in, stand_in):
    a, b, c = counted(5, 8, 6)
    by_stand_in(a, b, c)
    ctypes.c_int.in_dll(stand_in, "failing").value = 1
    with pytest.raises(ParbankError, match=r"returned 13 \(execution failed\), for a \(5, 8\), b \(8, 6\), c \(5, 6\)"):
        by_stand_in(a, b, c)


def test_plans_come_to_an_end(by_stand_in, monkeypatch):
    monkeypatch.setattr(module, "MOST_PLANS", 3)
    a, b, _ = counted(5, 8, 6)
    taken = [by_stand_in(a[:rows], b, None) is not None for rows in (1, 2, 3, 4, 1, 5)]
    assert taken == [True, True, True, False, True, False]


def test_no_memory_to_choose_is_no_error(by_stand_in, monkeypatch, caplog):
    def full(*_):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(module, "random_like", full)
    a, b, _ = counted(5, 8, 6)
    assert torch.equal(by_stand_in(a, b, None).double(), exact(a, b))
    assert plans()[0].choice == KernelChoice(0)
    assert "no memory to compare" in caplog.text


def test_threads_make_one_plan(by_stand_in):
    a, b, _ = counted(30, 40, 20)
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(by_stand_in(a, b, None))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(plans()) == 1
    assert all(torch.equal(x.double(), exact(a, b)) for x in found)
    assert len(found) == 6
