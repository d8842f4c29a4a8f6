"""Products of two matrices, with a third one added, by the fastest of the algorithms that cuBLASLt proposes.

The library orders its algorithms by a model of the GPU. Its first choice, which torch.mm runs, is not always the
fastest for many rows and few columns. It can also add a third matrix in place, which torch.addmm copies to the output
first.

A timing must never change a result. So at the first use of a plan (shapes, layouts and alignments), all candidates
multiply the same random numbers. Of the candidates with **the same bits** as the first choice, the fastest is kept.
The algorithm may differ between runs and ranks, but never the result. The operands at hand would not do: models start
with matrices of zeros, on which all algorithms agree and every timing is too good. The random numbers come from their
own generator, so the program's stay unchanged. Is agreement an accident? Sums of K numbers in another order differ by
about sqrt(K) 2^-25 of their size, which changes the rounding to bfloat16 in about sqrt(K) 2^-17 of the results: in a
thousand of them for the smallest product that is tuned. So equal bits are not chance.

The library guarantees the same bits at every run on GPUs of one kind, unless streams share the workspace of a handle.
Here each call brings its own workspace. Split sums are allowed only with float32 parts in that workspace, not added
in the output (REDUCTION_COMPUTE_TYPE in cublaslt.py). So torch.use_deterministic_algorithms needs nothing more.

Gradients of weights sum over a long dimension and stay with torch.mm, whose choice is best there.
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
from parbank.gpu import on_device
from parbank.ops import cublaslt
from parbank.ops.checks import check_floating, fake, same_device
from parbank.ops.cublaslt import CublasError, Matmul, Operand
from parbank.ops.register import operator
from parbank.precision import as_they_are

ENABLED = True
"""If False, torch.mm and torch.addmm run every product: for benchmarks and tests. Compiled and captured graphs ignore it."""
DTYPES = (torch.float16, torch.bfloat16)
# As much work as a GPU does while the host launches it. Below it nothing is gained, and no timing would show a gain.
SMALLEST = 2**33  # FLOP
CANDIDATES = 8
WORKSPACE = 32 * 2**20  # bytes an algorithm may ask for: as much as PyTorch gives cuBLAS on Hopper
ROUNDS = 5
TUNING = 10**13  # FLOP of all candidates and rounds together: some hundredths of a second
# A program with ever new shapes would spend its time choosing. After this many plans, new shapes go to PyTorch.
MOST_PLANS = 256

_log = logging.getLogger("parbank")

Operands = tuple[Tensor, Tensor, Tensor | None]
Run = Callable[[Tensor], None]
Clock = Callable[[Sequence[Callable[[], None]]], Sequence[Sequence[float]]]


@dataclass(frozen=True)
class KernelChoice:
    """The candidate that runs, and the milliseconds of the first candidate and of this one; None where nothing was
    timed."""

    index: int
    first_ms: float | None = None
    best_ms: float | None = None


@dataclass(frozen=True)
class Problem:
    """Everything that the choice of an algorithm may depend on."""

    device: int
    dtype: torch.dtype
    a: Operand
    b: Operand
    c: Operand | None


@dataclass
class _Plan:
    matmul: Matmul
    choice: KernelChoice | None = None


@dataclass(frozen=True)
class Row:
    """A plan as `plans` reports it. `choice` is None where the plan was met only during a capture; it then runs the
    first candidate."""

    problem: Problem
    candidates: int
    choice: KernelChoice | None


_plans: dict[Problem, _Plan | None] = {}
_lock = threading.Lock()  # autograd's thread may create plans too


def plans() -> list[Row]:
    """Every product that cuBLASLt has run so far in this process, and its algorithm."""
    return [Row(problem, len(plan.matmul), plan.choice) for problem, plan in list(_plans.items()) if plan is not None]


def choose(runs: Sequence[Run], expected: Tensor, scratch: Tensor, clock: Clock) -> KernelChoice:
    """The fastest, by the median, of the candidates that write the same bits as the first. A candidate that fails is
    dropped.

    The candidates write to `expected` and `scratch`.
    """
    equal: list[int] = []
    for index, run in enumerate(runs):
        into = scratch if equal else expected
        into.zero_()  # the previous candidate's output would compare equal
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
    return KernelChoice(equal[best], times[0], times[best])


def take_turns(rounds: int) -> Clock:
    """Times the calls in turns, several rounds, without waiting in between: the host must stay ahead of the GPU."""

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
    """Uses PyTorch's cuBLAS handle of this thread and device. A cuBLAS handle also serves cuBLASLt; PyTorch does the
    same."""
    stream = torch.cuda.current_stream(out.device).cuda_stream
    matmul.run(index, operands, out, torch.cuda.current_blas_handle(), stream)


def _tune(matmul: Matmul, operands: Operands, out: Tensor) -> KernelChoice:
    """Writes to `out`. Allocates a second output and the random operands."""
    a, b, c = operands
    flops = 2 * a.shape[0] * a.shape[1] * b.shape[1] * len(matmul)
    try:
        generator = torch.Generator(out.device).manual_seed(0)
        alike = random_like(a, generator), random_like(b, generator), None if c is None else random_like(c, generator)
        runs = [functools.partial(_run, matmul, index, alike) for index in range(len(matmul))]
        return choose(runs, out, torch.empty_like(out), take_turns(max(1, min(ROUNDS, TUNING // flops - 1))))
    except torch.OutOfMemoryError:
        _say_once("no memory to compare the algorithms of a product; the first one runs")
        return KernelChoice(0)


def random_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers stored as x is: with its strides, gaps, and its address modulo ALIGNMENT."""
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
    """The plan, with a choice unless a capture is running, in which nothing can be timed. None where PyTorch must
    multiply."""
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
    """x, or a copy where neither rows nor columns are contiguous, and its storage."""
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


@operator("product", "(Tensor a, Tensor b, Tensor? c) -> Tensor")
def _product(a: Tensor, b: Tensor, c: Tensor | None) -> Tensor:
    if _takes(a, b):
        with on_device(a.device):
            result = _by_cublaslt(a, b, c)
        if result is not None:
            return result
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


torch.library.register_autograd(_product, _refuse)


def product(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """a (M, K) times b (K, N), plus c (M, N) where it is given, by rows, in their dtype. It has no derivative: it is for
    use inside ops.

    a and b may be stored by rows or by columns, with gaps between lines; c by rows. Anything else is copied. Sums,
    including c, are float32 and rounded once. torch.mm and torch.addmm take over where cuBLASLt does not apply: CPU,
    float32, float64, AMD, no rows, small products.
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
