"""The odd polynomials a x + b x^3 + c x^5 that Newton-Schulz applies to the singular values, one triple per step.

"quintic" is Muon's usual triple (Jordan et al. 2024), the same at every step. It is steepest at zero, where small
singular values grow 3.4x a step, but does not converge: five steps leave singular values from 1.5e-3 up between 0.68
and 1.21.

"polar_express" uses the best triple for the interval that the earlier steps left (Amsel et al. 2025).
`derive_minimax` derives the numbers here:

- Step t knows that the singular values lie in [l, u] (at first l = 1e-3, u = 1: the input is divided by its Frobenius
  norm). The odd quintic with the least max |1 - p(x)| on [l, u] touches 1 - E, 1 + E, 1 - E, 1 + E in turn, at l, at
  the two extrema of p, and at u (Remez). It maps [l, u] onto [1 - E, 1 + E], the next step's interval.
- For a small l that polynomial is extreme: it maps an inner region down to 1 - E, close to 0, where values are lost
  in the rounding of a 16-bit product. So it is fitted on [max(l, CUSHION u), u], and then scaled so that the image of
  the true [l, u] is centred on 1.
- 16-bit products overshoot the interval. Each polynomial but the last is evaluated at x / SAFETY: an interval 2%
  wider.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from parbank.errors import ConfigError

Triple = tuple[float, float, float]

QUINTIC: Triple = (3.4445, -4.7750, 2.0315)

LOWER = (
    1e-3  # five steps reach no further down than this to within a tenth of 1; smaller values still grow, 8x at first
)
CUSHION = (
    0.02  # the first step's inner minimum is 0.17 with it and 0.008 without; the final error 0.139 instead of 0.13
)
SAFETY = 1.02  # a bfloat16 rounding is 2^-9; the products of one step add up to a few of them in the worst direction


def resolve_coefficients(coefficients: str | Sequence[Any], steps: int) -> tuple[Triple, ...]:
    """One triple for each step, from a name, one triple, or a list of triples whose last one repeats."""
    if isinstance(coefficients, str):
        if coefficients == "quintic":
            return (QUINTIC,) * steps
        if coefficients == "polar_express":
            return derive_minimax(steps)
        raise ConfigError(
            f"unknown coefficients {coefficients!r}; use 'quintic', 'polar_express', or a list of (a, b, c)"
        )
    try:
        rows: Any = [coefficients] if isinstance(coefficients[0], (int, float)) else list(coefficients)
        triples = tuple((float(a), float(b), float(c)) for a, b, c in rows)
    except (TypeError, ValueError, IndexError):
        raise ConfigError(
            f"coefficients must be 'quintic', 'polar_express', (a, b, c), or a list of such triples; got {coefficients!r}"
        ) from None
    return _repeat(triples, steps)


def _repeat(triples: tuple[Triple, ...], steps: int) -> tuple[Triple, ...]:
    return (triples + (triples[-1],) * steps)[:steps]


@cache
def derive_minimax(
    steps: int, lower: float = LOWER, cushion: float = CUSHION, safety: float = SAFETY
) -> tuple[Triple, ...]:
    """The triples of "polar_express", from scratch (see the top of the file), to seven digits; takes milliseconds.

    derive_minimax(5) begins with 8.16 x - 22.5 x^3 + 15.9 x^5 and maps [1e-3, 1] into [0.86, 1.14].
    """
    low, high = lower, 1.0
    triples: list[Triple] = []
    for step in range(steps):
        fitted = _fit_minimax(max(low, cushion * high), high)
        image = _image(fitted, low, high)
        centre = 2.0 / (image[0] + image[1])
        widened = 1.0 if step == steps - 1 else safety  # after the last step nothing is left to overshoot
        a, b, c = (centre * value / widened**power for value, power in zip(fitted, (1, 3, 5)))
        triples.append((round(a, 7), round(b, 7), round(c, 7)))
        low, high = _image((a, b, c), low, high)[0], image[1] * centre
    return tuple(triples)


def _image(triple: Triple, low: float, high: float) -> tuple[float, float]:
    values = [_evaluate(triple, x) for x in _critical_points(triple, low, high)]
    return min(values), max(values)


def _evaluate(triple: Triple, x: float) -> float:
    a, b, c = triple
    return x * (a + x * x * (b + x * x * c))


def _critical_points(triple: Triple, low: float, high: float) -> list[float]:
    """The ends of the interval, and where the derivative a + 3 b x^2 + 5 c x^4 vanishes inside it."""
    a, b, c = triple
    points = [low, high]
    discriminant = 9 * b * b - 20 * a * c
    if discriminant > 0:
        for sign in (-1.0, 1.0):
            square = (-3 * b + sign * discriminant**0.5) / (10 * c)
            if square > 0 and low < square**0.5 < high:
                points.append(square**0.5)
    return points


def _fit_minimax(low: float, high: float) -> Triple:
    """The odd quintic nearest to 1 on [low, high]: Remez exchange on four points."""
    import numpy as np

    if high - low < 1e-3 * high:  # the four points coincide; the limit is Newton-Schulz around the middle
        middle = 0.5 * (low + high)
        return 1.875 / middle, -1.25 / middle**3, 0.375 / middle**5
    inner = [low + (high - low) * share for share in (0.3, 0.75)]
    for _ in range(100):
        points = np.array([low, *inner, high])
        signs = np.array([1.0, -1.0, 1.0, -1.0])  # p = 1 - E, 1 + E, 1 - E, 1 + E
        a, b, c, _error = np.linalg.solve(np.stack([points, points**3, points**5, signs], axis=1), np.ones(4)).tolist()
        found = sorted(_critical_points((a, b, c), low, high)[2:])
        if len(found) != 2 or max(abs(x - y) for x, y in zip(found, inner)) < 1e-14 * high:
            break
        inner = found
    return a, b, c
