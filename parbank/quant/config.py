"""How many levels each kind of weight gets."""

from dataclasses import dataclass
from typing import Literal

from parbank.config import require


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """Integers per row for matrices and embeddings; everything else is stored as float16."""

    matrix_bits: int = 6
    """Bits of a matrix weight, 2 to 8: the finest setting, used when it fits the cap."""
    min_matrix_bits: int = 4
    """Bits of a matrix weight at the coarsest setting a byte cap may force; every level count between is tried."""
    embedding_bits: int = 8
    """Bits of an embedding weight, 2 to 8. A cap does not change it."""
    coder: Literal["ans", "lzma"] = "ans"
    """How integers become bytes: ans, an entropy coder under models fitted to each tensor; lzma, to compare with."""
    clip_steps: int = 7
    """How many clip points are tried for each row, from its largest value down to clip_floor of it; 1 never clips."""
    clip_floor: float = 0.7
    """The lowest clip point tried, as a fraction of the row's largest value."""

    def __post_init__(self) -> None:
        for name in ("matrix_bits", "min_matrix_bits", "embedding_bits"):
            bits = getattr(self, name)
            require(2 <= bits <= 8, f"quant.{name} must be 2 to 8, got {bits}")
        require(
            self.min_matrix_bits <= self.matrix_bits,
            f"quant.min_matrix_bits must not exceed quant.matrix_bits, got {self.min_matrix_bits} > {self.matrix_bits}",
        )
        require(1 <= self.clip_steps <= 100, f"quant.clip_steps must be 1 to 100, got {self.clip_steps}")
        require(0 < self.clip_floor <= 1, f"quant.clip_floor must be above 0 and at most 1, got {self.clip_floor}")

    @property
    def matrix_q(self) -> int:
        """The finest ladder step: integers -q..q."""
        return largest_integer(self.matrix_bits)

    @property
    def min_matrix_q(self) -> int:
        """The coarsest ladder step."""
        return largest_integer(self.min_matrix_bits)

    @property
    def embedding_q(self) -> int:
        return largest_integer(self.embedding_bits)

    @property
    def clip_fractions(self) -> tuple[float, ...]:
        """The clip points, largest first: on a tie the row keeps its full range."""
        if self.clip_steps == 1:
            return (1.0,)
        step = (1.0 - self.clip_floor) / (self.clip_steps - 1)
        return tuple(1.0 - i * step for i in range(self.clip_steps))


def largest_integer(bits: int) -> int:
    """q of the symmetric range -q..q that `bits` hold."""
    return 2 ** (bits - 1) - 1
