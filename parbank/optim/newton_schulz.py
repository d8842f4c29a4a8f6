"""Newton-Schulz: approximates the nearest (semi-)orthogonal matrix, from matrix products alone.

For G = U S V^T the iteration X <- a X + b (X X^T) X + c (X X^T)^2 X applies one odd polynomial to every singular
value and keeps U and V. So a few steps take S close to the identity. It starts from G / |G| (Frobenius), whose
singular values are at most 1. Everything is batched over the leading dimensions and uses the smaller Gram side.

Three ways to the same result, for matrices of r x c with r <= c, in products of 2 r^3 FLOP and with p = c / r:

- plain: per step X X^T (p), the polynomial in it (1) and the product with X (p): 2 p + 1. cuBLAS does it in three
  calls.
- symmetric: the same, but the first two results are symmetric: half their tiles. 1.5 p + 0.5.
- gram: iterates on R = X X^T alone (Gram Newton-Schulz, Zhang et al. 2026). With Z = a I + b R + c R R, the step X <-
  Z X is R <- Z R Z, and Q accumulates the product of all Z: X is used at the start and at the end only. A step costs
  4 products of r^3 and none with X. All these matrices are polynomials in R, so they commute and every product is
  symmetric. But it is less stable: rounding makes eigenvalues of R that should be 0 slightly negative, and z(x)^2 x
  grows them as fast as the positive ones, without the polynomial's bound for x > 0. A restart (X <- Q X, R <- X X^T,
  Q <- I) makes R non-negative again; RESTART says how often. Rounding Q is the other limit. Q has the factors of all
  singular values: a large one for those near 0, a small one for the largest. In 16 bits both get an error in proportion
  to the large one, the more so as rounded factors do not quite commute and our kernels copy half of each product to
  the other half. GROWTH bounds the large factor. Polynomials that grow faster restart at every step, so that all
  symmetric products are of a matrix with itself.

Our kernels cost the host far more a launch than cuBLAS (docs/log/optimizer.md), and a replayed launch costs nothing. So
outside of graphs the kernels run where a product is large enough to hide the launch (LAUNCH_FLOP), and cuBLAS elsewhere.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from parbank.errors import ConfigError
from parbank.ops import ax_plus_bx, ba_plus_caa, symmetric_product, xxt
from parbank.ops.backend import use_triton
from parbank.optim.coefficients import Triple, resolve_coefficients
from parbank.precision import as_they_are

METHODS = ("auto", "plain", "symmetric", "gram")
RESTART = 3  # in float16, 3 steps are as accurate as 2 on every spectrum tried, and 5 lose digits even in float32
# The largest factor that Q of RESTART steps may have in 16 bits: quintic's, 3.4445^3. With the 128 of Polar Express the
# errors of Q moved the largest singular value out of the next polynomial's interval. bfloat16 cannot carry any such product:
# quintic's left its interval, too (docs/log/optimizer.md).
GROWTH = 41
# The FLOP of a GPU in the time the host takes to launch one of our kernels: 15 launches of a few GFLOP each took 3.0 ms on an
# H200 (docs/log/optimizer.md), which does 600 TFLOP/s of these products.
LAUNCH_FLOP = 1e11
# Elements that are iterated on together: more do not make a GPU faster, and work memory grows with them. Four matrices of
# 2048 x 8192, whose X X^T is 0.27 TFLOP.
WORK = 2**26
NORM_EPS = 1e-20  # keeps a zero matrix at zero; far below the norm of anything float32 can square

Coefficients = str | Sequence[float] | Sequence[Sequence[float]]


def orthogonalize(
    G: Tensor,
    steps: int = 5,
    coefficients: Coefficients = "quintic",
    method: str = "auto",
    dtype: torch.dtype | None = None,
    *,
    graphed: bool = False,
) -> Tensor:
    """Approximates U V^T of G = U S V^T for every matrix in (..., rows, cols). The result has G's dtype.

    The coefficients alone decide the accuracy: see `parbank.optim.coefficients`. A zero matrix gives zero. Computes
    in `dtype`, by default `working_dtype(G)`. `graphed` says that a CUDA graph will replay the call, so that launches
    cost nothing.

        >>> import torch
        >>> values = torch.linalg.svdvals(parbank.orthogonalize(torch.randn(3, 16, 32)))
        >>> bool((values > 0.6).all() and (values < 1.3).all())
        True
    """
    if not isinstance(G, Tensor):
        raise ConfigError(f"orthogonalize takes a tensor of matrices (..., rows, cols), got a {type(G).__name__}")
    if G.ndim < 2:
        raise ConfigError(f"orthogonalize takes matrices (..., rows, cols), got a tensor of shape {tuple(G.shape)}")
    if not G.is_floating_point():
        raise ConfigError(
            f"orthogonalize takes real floating-point matrices, got {G.dtype}; convert them, e.g. G.float()"
        )
    if G.requires_grad and torch.is_grad_enabled():
        raise ConfigError("orthogonalize has no derivative, and the matrices require one; pass G.detach()")
    if steps < 1:
        raise ConfigError(f"orthogonalize needs at least one step, got {steps}")
    triples = resolve_coefficients(coefficients, steps)
    if G.numel() == 0:
        return G.clone()
    tall = G.shape[-2] > G.shape[-1]
    X = normalize(G.mT if tall else G, dtype or working_dtype(G))
    X = iterate(X.reshape(-1, *X.shape[-2:]), triples, method, graphed=graphed).view(X.shape)
    return (X.mT if tall else X).to(G.dtype)


def working_dtype(G: Tensor) -> torch.dtype:
    """float16 on a GPU, float64 for float64. On a CPU float32, or bfloat16 inside a CPU autocast to it.

    float16, not the usual bfloat16: a normalised matrix needs no wide exponent, and three more mantissa bits at the
    same speed make the result 4 to 5 times as accurate (docs/log/optimizer.md) and the Gram iteration stable. A CPU
    multiplies bfloat16 fast where it has the instructions, but never float16.
    """
    if G.dtype == torch.float64:
        return torch.float64
    if G.is_cuda:
        return torch.float16
    reduced = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return torch.bfloat16 if reduced else torch.float32


def normalize(G: Tensor, dtype: torch.dtype, *, overwrite: bool = False) -> Tensor:
    """G / |G| per matrix in `dtype`, with the norm taken in float32 (float64 for float64); in place where allowed."""
    wide = torch.float64 if G.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(G, dim=(-2, -1), keepdim=True, dtype=wide)
    inverse = (norm + NORM_EPS).reciprocal()
    if G.dtype == wide == dtype:
        return G.mul_(inverse) if overwrite else G * inverse
    return torch.mul(G, inverse, out=torch.empty(G.shape, dtype=dtype, device=G.device))


def iterate_in_parts(X: Tensor, triples: Sequence[Triple], method: str = "auto", *, graphed: bool = False) -> Tensor:
    """`iterate`, which uses up X. The work memory is that of WORK elements, or of one matrix, if X is larger."""
    count = max(1, WORK // (X.shape[-2] * X.shape[-1]))
    if X.shape[0] <= count:
        return iterate(X, triples, method, graphed=graphed, overwrite=True)
    for part in X.split(count):
        part.copy_(iterate(part, triples, method, graphed=graphed))
    return X


def iterate(
    X: Tensor, triples: Sequence[Triple], method: str = "auto", *, graphed: bool = False, overwrite: bool = False
) -> Tensor:
    """Newton-Schulz on normalised X (batch, rows, cols) with rows <= cols, one triple a step. With `overwrite`, X may serve
    as work memory, or lose it, if it has a storage of its own."""
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}; use one of {', '.join(METHODS)}")
    kernels = use_triton(X)
    restart = find_restart(triples, X.dtype)
    if method == "auto":
        kernels = kernels and (graphed or hides_launch(*X.shape))
        method = choose_method(X.shape[-2], X.shape[-1], len(triples), kernels, restart)
    with as_they_are(X.device):
        if method == "gram":
            return _gram(X, triples, kernels, overwrite, restart)
        return _plain(X, triples, overwrite) if method == "plain" else _symmetric(X, triples)


def choose_for(X: Tensor, method: str) -> str:
    """The method for a dtype: no kernel has float64."""
    return "plain" if X.dtype == torch.float64 else method


def hides_launch(batch: int, rows: int, cols: int) -> bool:
    """Whether X X^T keeps the GPU busy for as long as the host takes to launch the next kernel."""
    return 2.0 * batch * rows * rows * cols >= LAUNCH_FLOP


def find_restart(triples: Sequence[Triple], dtype: torch.dtype) -> int:
    """Steps of the Gram iteration between restarts: RESTART, or 1 where 16 bits cannot carry the product of RESTART steps."""
    if dtype.itemsize > 2:
        return RESTART
    if dtype == torch.bfloat16:
        return 1
    parts = (triples[first : first + RESTART] for first in range(0, len(triples), RESTART))
    return RESTART if all(math.prod(a for a, _, _ in part) <= GROWTH for part in parts) else 1


def choose_method(rows: int, cols: int, steps: int, kernels: bool, restart: int = RESTART) -> str:
    """The method with the fewest FLOP for this shape. Symmetric results cost half only where the kernels run."""
    costs = {name: count_products(rows, cols, steps, name, kernels) for name in ("plain", "symmetric", "gram")}
    if not kernels:
        del costs["symmetric"]  # the same work as plain, in more calls
    if restart == 1:
        del costs["gram"]  # the same work as the others, with one rounding more
    return min(costs, key=lambda name: costs[name])


def count_products(rows: int, cols: int, steps: int, method: str, kernels: bool) -> float:
    """The cost of a method in units of 2 * rows^3 FLOP, the cost of one dense square product."""
    aspect = cols / rows
    half = 0.5 if kernels and method != "plain" else 1.0
    if method != "gram":
        return steps * (half * (aspect + 1) + aspect)
    segments = [min(RESTART, steps - first) for first in range(0, steps, RESTART)]
    # A segment of n steps: X X^T and Q X; n polynomials; n - 1 products into Q and two for each of the n - 1 new R.
    return sum(half * aspect + aspect + half * (n + 3 * (n - 1)) for n in segments)


def _plain(X: Tensor, triples: Sequence[Triple], overwrite: bool) -> Tensor:
    spare = torch.empty_like(X)
    A = torch.empty(X.shape[0], X.shape[1], X.shape[1], dtype=X.dtype, device=X.device)
    B = torch.empty_like(A)
    for number, (a, b, c) in enumerate(triples):
        torch.bmm(X, X.mT, out=A)
        torch.baddbmm(A, A, A, beta=b, alpha=c, out=B)
        torch.baddbmm(X, B, X, beta=a, out=spare)
        # Two buffers in turn. The first is the caller's.
        X, spare = spare, X if number or overwrite else torch.empty_like(X)
    return X


def _symmetric(X: Tensor, triples: Sequence[Triple]) -> Tensor:
    for a, b, c in triples:
        X = ax_plus_bx(X, ba_plus_caa(xxt(X), b, c), a)
    return X


def _gram(X: Tensor, triples: Sequence[Triple], kernels: bool, overwrite: bool, restart: int) -> Tensor:
    for first in range(0, len(triples), restart):
        product = torch.bmm(_multiply_polynomials(X, triples[first : first + restart], kernels), X)
        if overwrite and X.untyped_storage().nbytes() == X.nbytes:
            X.untyped_storage().resize_(0)  # callers still hold the tensor; its memory is for the next segment
        X = product
    return X


def _multiply_polynomials(X: Tensor, triples: Sequence[Triple], kernels: bool) -> Tensor:
    """Q, the product of all Z of a segment. Holds four matrices of its size at most. B is Z - a I throughout: the epilogue of a
    product adds the multiple of a, without rounding it first."""

    def add_product(C: Tensor, A: Tensor, B: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
        """beta C + alpha A B for symmetric matrices that commute."""
        if kernels:
            return symmetric_product(A, B, C, alpha, beta)
        return torch.baddbmm(C, A, B, beta=beta, alpha=alpha)

    R = xxt(X) if kernels else torch.bmm(X, X.mT)
    Q = None
    for step, (a, b, c) in enumerate(triples):
        B = add_product(R, R, R, b, c)
        if Q is None:
            Q = B.clone()
            Q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            Q = add_product(Q, B, Q, a)
        if step < len(triples) - 1:
            R = add_product(R, B, R, a)  # Z R
            R = add_product(R, B, R, a)  # Z R Z
    assert Q is not None  # a segment has a step
    return Q
