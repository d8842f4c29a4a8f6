"""Products of two matrices, a third one added on the way, by the fastest of the algorithms that cuBLASLt proposes.

The library puts its algorithms in order by a model of the GPU. Its first choice, which is what torch.mm runs, is not always the
fastest for a product with many rows and few columns. And it can add a third matrix from where that lies, which torch.addmm
copies to the output first.

What was fastest on one machine on one day must not change a result. So the first time a plan (one set of shapes, layouts and
alignments) is used, all candidates multiply the same random numbers, and of those whose result has **the same bits** as the
first's, the fastest is kept: which one it is differs between runs and ranks, and nobody can tell but by the clock. Random
numbers and not the operands at hand, because models start with matrices of zeros, on which all algorithms agree and every
timing is too good. They are drawn by a generator of their own: a program's random numbers stay what they were. Sums of K numbers
in another order differ by some sqrt(K) 2^-25 of themselves, which moves the rounding to bfloat16 in about sqrt(K) 2^-17 of
the results: in a thousand of the smallest product that is tuned. So that none differs is no accident.

The library promises the same bits at every run on GPUs of one kind, unless streams share the workspace of a handle. Here every
call brings its own; and split sums are let in only with their parts in float32 in that workspace, not added in the output
itself (REDUCTION_COMPUTE_TYPE in cublaslt.py). So there is nothing more to do under torch.use_deterministic_algorithms.

Gradients of weights, sums over a long dimension, stay with torch.mm, whose choice is the best there.
"""

import functools
import logging
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor

from parbank.errors import ParbankError
from parbank.ops import cublaslt
from parbank.ops.checks import as_they_are, check_floating, fake, on_device, same_device
from parbank.ops.cublaslt import CublasError, Matmul, Operand

ENABLED = True
"""Off, every product is torch.mm's or torch.addmm's: for benchmarks and tests. Not seen by the compiler, nor by graphs captured."""
DTYPES = (torch.float16, torch.bfloat16)
# Some 12 us on an H200: about what the host takes to launch it, so that below nothing is won, and no timing would show it.
SMALLEST = 2**33  # FLOP
CANDIDATES = 8
WORKSPACE = 32 * 2**20  # bytes an algorithm may ask for: as much as PyTorch gives cuBLAS on Hopper
ROUNDS = 5
TUNING = 10**13  # FLOP of all candidates and rounds together: 20 ms at 500 TFLOP/s
# A program that meets ever new shapes would spend its time choosing. What comes after these is PyTorch's.
MOST_PLANS = 256

_log = logging.getLogger("parbank")

Operands = tuple[Tensor, Tensor, Tensor | None]
Run = Callable[[Tensor], None]
Clock = Callable[[Sequence[Callable[[], None]]], Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Choice:
    """Which of a plan's candidates runs, and the milliseconds of the first and of this one; None where nothing was timed."""

    index: int
    first_ms: float | None = None
    best_ms: float | None = None


@dataclass(frozen=True)
class Problem:
    """All that a choice of algorithm may depend on."""

    device: int
    dtype: torch.dtype
    a: Operand
    b: Operand
    c: Operand | None


@dataclass
class _Plan:
    matmul: Matmul
    choice: Choice | None = None


@dataclass(frozen=True)
class Row:
    """A plan as `plans` tells of it. `choice` is None where it was met in a capture only, and runs the first candidate."""

    problem: Problem
    candidates: int
    choice: Choice | None


_plans: dict[Problem, _Plan | None] = {}
_lock = threading.Lock()  # autograd's thread meets new products too


def plans() -> list[Row]:
    """Every product that cuBLASLt has taken so far in this process, and which algorithm it runs."""
    return [Row(problem, len(plan.matmul), plan.choice) for problem, plan in list(_plans.items()) if plan is not None]


def choose(runs: Sequence[Run], expected: Tensor, scratch: Tensor, clock: Clock) -> Choice:
    """The fastest, by the median, of those that write the same bits as the first one. One that fails is out, as if not proposed.

    `expected` and `scratch` are where they write.
    """
    equal: list[int] = []
    for index, run in enumerate(runs):
        into = scratch if equal else expected
        into.zero_()  # what the one before has left would be equal
        try:
            run(into)
        except CublasError:
            continue
        if not equal or torch.equal(into.view(torch.int16), expected.view(torch.int16)):
            equal.append(index)
    if not equal:
        raise CublasError("none of the algorithms that cuBLASLt proposes runs")
    times = [statistics.median(each) for each in clock([functools.partial(runs[index], scratch) for index in equal])]
    best = min(range(len(equal)), key=times.__getitem__)
    return Choice(equal[best], times[0], times[best])


def take_turns(rounds: int) -> Clock:
    """Times calls one after the other, several times around, without waiting in between: the host must stay ahead of the GPU."""

    def clock(calls: Sequence[Callable[[], None]]) -> list[list[float]]:
        calls[0]()
        marks = [_mark()]
        for call in list(calls) * rounds:
            call()
            marks.append(_mark())
        marks[-1].synchronize()
        spans = [before.elapsed_time(after) for before, after in pairwise(marks)]
        return [spans[i :: len(calls)] for i in range(len(calls))]

    return clock


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _run(matmul: Matmul, index: int, operands: Operands, out: Tensor) -> None:
    """PyTorch's handle of this thread and device: a cuBLAS handle serves as one of cuBLASLt, and PyTorch uses it so."""
    stream = torch.cuda.current_stream(out.device).cuda_stream
    matmul.run(index, operands, out, torch.cuda.current_blas_handle(), stream)


def _tune(matmul: Matmul, operands: Operands, out: Tensor) -> Choice:
    """`out` is written to. Besides it takes a second one of its size and numbers to multiply."""
    a, b, c = operands
    flops = 2 * a.shape[0] * a.shape[1] * b.shape[1] * len(matmul)
    try:
        generator = torch.Generator(out.device).manual_seed(0)
        alike = random_like(a, generator), random_like(b, generator), None if c is None else random_like(c, generator)
        runs = [functools.partial(_run, matmul, index, alike) for index in range(len(matmul))]
        return choose(runs, out, torch.empty_like(out), take_turns(max(1, min(ROUNDS, TUNING // flops - 1))))
    except torch.OutOfMemoryError:
        _say_once("no memory to compare the algorithms of a product; the first one runs")
        return Choice(0)


def random_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers that lie as x does: its strides, with gaps, and its address modulo ALIGNMENT."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) + 1
    flat = torch.empty(reach + cublaslt.ALIGNMENT, dtype=x.dtype, device=x.device)
    ahead = (x.data_ptr() - flat.data_ptr()) % cublaslt.ALIGNMENT // x.element_size()
    return flat.as_strided(x.shape, x.stride(), ahead).normal_(generator=generator)


def _make(problem: Problem) -> _Plan | None:
    library = cublaslt.load()
    assert library is not None
    handle = torch.cuda.current_blas_handle()
    try:
        return _Plan(
            Matmul(
                library, handle, problem.dtype, problem.a, problem.b, problem.c, wanted=CANDIDATES, workspace=WORKSPACE
            )
        )
    except CublasError as error:
        _say_once(f"a product that cuBLASLt does not plan goes to PyTorch: {error}")
        return None


def _ready(problem: Problem, operands: Operands, out: Tensor) -> _Plan | None:
    """The plan, with a choice unless a capture is running, in which nothing can be timed. None where PyTorch is to do it."""
    plan = _plans.get(problem)
    if plan is not None and plan.choice is not None:
        return plan
    with _lock:
        if problem not in _plans and len(_plans) < MOST_PLANS:
            _plans[problem] = _make(problem)
        plan = _plans.get(problem)
        if plan is not None and plan.choice is None and not torch.cuda.is_current_stream_capturing():
            try:
                plan.choice = _tune(plan.matmul, operands, out)
            except CublasError as error:
                _say_once(f"a product goes to PyTorch: {error}")
                plan = _plans[problem] = None
    return plan


@functools.cache
def _say_once(what: str) -> None:
    _log.warning(what)


def _takes(a: Tensor, b: Tensor) -> bool:
    big = 2 * a.shape[0] * a.shape[1] * b.shape[1] >= SMALLEST
    return ENABLED and a.is_cuda and a.dtype in DTYPES and big and cublaslt.load() is not None


def _lines(x: Tensor) -> tuple[Tensor, Operand]:
    """x, or a copy where it has no lines, and how it lies."""
    lies = cublaslt.lie(x)
    if lies is None:
        x = x.contiguous()
        lies = cublaslt.lie(x)
        assert lies is not None
    return x, lies


def _by_cublaslt(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor | None:
    (a, of_a), (b, of_b) = _lines(a), _lines(b)
    of_c = None
    if c is not None:
        c, of_c = _lines(c)
        if of_c.by_columns:  # the output is by rows, and the library reads both alike
            c, of_c = _lines(c.contiguous())
    out = torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    problem = Problem(a.get_device(), a.dtype, of_a, of_b, of_c)
    plan = _ready(problem, (a, b, c), out)
    if plan is None:
        return None
    try:
        _run(plan.matmul, plan.choice.index if plan.choice else 0, (a, b, c), out)
    except CublasError as error:
        raise ParbankError(
            f"product: {error}, for {_shapes(a, b, c)}; with parbank.ops.product.ENABLED = False PyTorch multiplies"
        ) from error
    return out


@torch.library.custom_op("parbank::product", mutates_args=(), schema="(Tensor a, Tensor b, Tensor? c) -> Tensor")
def _product(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
    if _takes(a, b):
        with on_device(a.device):
            found = _by_cublaslt(a, b, c)
        if found is not None:
            return found
    with as_they_are(a.device):
        return torch.mm(a, b) if c is None else torch.addmm(c, a, b)


@fake(_product)
def _(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def _refuse(ctx: Any, *grads: Any) -> NoReturn:
    raise ParbankError(
        "product has no derivative, so an op that is made of it has no second derivative (a backward through it was asked for); "
        "multiply by torch.mm or torch.addmm, or run the op under parbank.ops.backend.use_backend('reference')"
    )


_product.register_autograd(_refuse)


def product(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """a (M, K) times b (K, N), plus c (M, N) where it is given, by rows, in their dtype. No derivative: ops are made of it.

    a and b may each lie by rows or by columns, with gaps between those lines, c by rows; anything else is copied. Sums,
    c's included, are float32's, rounded once. What cuBLASLt does not take (a CPU, float32 and float64, AMD, no rows, little
    to do) is torch.mm's or torch.addmm's.
    """
    _check(a, b, c)
    return _product(a, b, c)


def _shapes(a: Tensor, b: Tensor, c: Tensor | None) -> str:
    return f"a {tuple(a.shape)}, b {tuple(b.shape)}" + ("" if c is None else f", c {tuple(c.shape)}")


def _check(a: Tensor, b: Tensor, c: Tensor | None) -> None:
    fits = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0]
    if not fits or (c is not None and c.shape != (a.shape[0], b.shape[1])):
        raise ParbankError(f"product: {_shapes(a, b, c)} do not fit; they must be (M, K), (K, N) and, if given, (M, N)")
    check_floating("product", a=a, b=b, c=c)
    if a.dtype != b.dtype or (c is not None and c.dtype != a.dtype):
        names = f"a is {a.dtype}, b {b.dtype}" + ("" if c is None else f", c {c.dtype}")
        raise ParbankError(f"product: {names}; cast them to one type first")
    same_device("product", a, b, c)
