"""How a tensor is stored: as integers per row, or as float16."""

from dataclasses import dataclass
from typing import Literal

Role = Literal["matrix", "embedding", "other"]
Shape = tuple[int, ...]
# The names of GPT-2's tables; other models have "embed" in the name (embed_tokens, tok_embeddings, ...).
TABLES = ("wte", "wpe")


@dataclass(frozen=True)
class Storage:
    """How one tensor is stored."""

    role: Role
    q: int
    """Integers -q..q, or 0 for float16."""
    groups: int
    """Scales a row has."""


def role(name: str, shape: Shape) -> Role:
    """The role by name and shape: whether a scale per row pays."""
    if len(shape) != 2 or 0 in shape:
        return "other"
    parts = name.split(".")
    owner = parts[-2].lower() if parts[-1] == "weight" and len(parts) > 1 else ""
    if "embed" in owner or owner in TABLES:
        return "embedding"
    # Gates and per-head gains are 2-D but thin; at 16 columns the scale is already an eighth of a 6-bit row.
    return "matrix" if min(shape) >= 16 else "other"
