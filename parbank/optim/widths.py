"""Learning rates for another width: tune on a narrow model, train a wide one.

The rule keeps the change of every activation per step independent of the width (Yang et al. 2022; for orthogonal
updates, Bernstein and Newhouse 2024: a weight and its update need a spectral norm of about sqrt(rows / cols)). So a
rate that was tuned at width b is multiplied at width w by (w / b)^e, with e by role:

| role | e | because |
| --- | --- | --- |
| matrices, Muon, lr_scale "spectral" or None | 0 | the update's spectral norm is right at any width |
| matrices, Muon, lr_scale "rms" | -1/2 | the factor 0.2 sqrt(max(rows, cols)) grows with the width |
| matrices, element-wise | -1 | the signs of a gradient of low rank add up over all inputs |
| head | -1 | the same |
| embedding | 0 | a row is looked up, not summed over the width |
| scalars | 0 | gains, biases and gates act on each channel by itself |
"""

from parbank.config import choose, require

EXPONENTS = {"spectral": 0.0, "rms": -0.5, "elementwise": -1.0, "head": -1.0, "embedding": 0.0, "scalar": 0.0}


def carry_rate(lr: float, role: str, *, tuned_at: int, width: int) -> float:
    """The learning rate at `width` of a rate that was tuned at width `tuned_at`; roles are those of EXPONENTS."""
    require(tuned_at > 0 and width > 0, f"widths must be positive, got {tuned_at} and {width}")
    return lr * (width / tuned_at) ** choose(EXPONENTS, role, "role")
