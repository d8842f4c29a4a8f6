"""How a tensor is stored: as integers per row, or as float16 numbers."""

from typing import Literal

Role = Literal["matrix", "embedding", "other"]
Shape = tuple[int, ...]


def role(name: str, shape: Shape) -> Role:
    """By what the tensor is called, and whether a scale per row would pay."""
    if len(shape) != 2 or 0 in shape:
        return "other"
    if name.endswith("embedding.weight"):
        return "embedding"
    # Gates and per-head gains are 2-D but thin; at 16 columns the scale is already an eighth of a 6-bit row.
    return "matrix" if min(shape) >= 16 else "other"
