"""Settings of quantisation: by the solver, or at a fixed number of levels per role."""

from dataclasses import dataclass
from typing import Literal

from parbank.config import choose, named, require
from parbank.quant.coders import CODERS
from parbank.quant.roles import Role, Shape, Storage, role


@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """Integers per row for matrices and embeddings; everything else is stored as float16."""

    method: Literal["solver", "rows"] = "solver"
    """solver: GPTQ with steps that use the byte cap where the loss needs it; rows: plain rounding at the bits below."""
    calibration_tokens: int = 131_072
    """Training tokens for measuring the curvature of the loss; 0 packs by the weights alone."""
    damping: float = 0.01
    """Added to the Hessians' diagonals, as a share of their mean."""
    activation_order: bool = True
    """Let the solver round the columns of the largest curvature first; else from left to right."""
    rotation: bool = True
    """Let the solver rotate tensors (Hadamard) where that pays."""
    pruning: float = 1.0
    """How far the solver rounds towards zero to save bits: 1 where D + lambda R says so, 0 always to nearest."""
    low_rank: int = 0
    """Rank of the factors the solver may take out of a tensor where that pays; 0 leaves them out."""
    tolerance: float = 0.0025
    """How far under the cap the solver may end, as a share of it."""
    max_builds: int = 10
    """Files the solver builds at most on its way to the cap."""
    matrix_bits: int = 6
    """Bits of a matrix weight, 2 to 8: the finest setting, used when it fits the cap."""
    min_matrix_bits: int = 4
    """Bits of a matrix weight at the coarsest setting a byte cap may force; every level count between is tried."""
    embedding_bits: int = 8
    """Bits of an embedding weight, 2 to 8. A cap does not change it."""
    coder: str = named(CODERS, "ans")
    """How integers become bytes. ans is an entropy coder with models fitted to each tensor; lzma is for comparison."""
    qat_share: float = 0.0
    """The last share of the training budget in which the model sees its matrices as integers per row; 0 never."""
    qat_bits: int = 6
    """Bits of those integers, 2 to 8."""
    qat_rounding: Literal["straight", "soft"] = "straight"
    """How gradients pass the rounding: straight through, or through a soft staircase."""
    clip_steps: int = 7
    """How many clip points are tried for each row, from its largest value down to clip_floor of it; 1 never clips."""
    clip_floor: float = 0.7
    """The lowest clip point tried, as a fraction of the row's largest value."""
    clip_deviations: float = 0.0
    """rows: clip at this many standard deviations instead of by search; 0 searches."""
    group: int = 0
    """rows: columns that share a scale, where they divide a matrix evenly; 0 is a scale for the whole row."""
    scales: Literal["float16", "exponent"] = "float16"
    """rows: scales as they are, or rounded up to powers of two, which take next to no bytes and up to a bit of precision."""

    def __post_init__(self) -> None:
        choose(CODERS, self.coder, "quant.coder")
        for name in ("matrix_bits", "min_matrix_bits", "embedding_bits", "qat_bits"):
            bits = getattr(self, name)
            require(2 <= bits <= 8, f"quant.{name} must be 2 to 8, got {bits}")
        require(
            self.min_matrix_bits <= self.matrix_bits,
            f"quant.min_matrix_bits must not exceed quant.matrix_bits, got {self.min_matrix_bits} > {self.matrix_bits}",
        )
        require(
            self.calibration_tokens >= 0,
            f"quant.calibration_tokens must be 0 (off) or positive, got {self.calibration_tokens}",
        )
        require(self.damping > 0, f"quant.damping must be positive, got {self.damping}")
        require(0 <= self.pruning <= 2, f"quant.pruning must lie in 0..2, got {self.pruning}")
        require(0 <= self.low_rank <= 256, f"quant.low_rank must be 0 (off) to 256, got {self.low_rank}")
        require(0 < self.tolerance <= 0.1, f"quant.tolerance must be above 0 and at most 0.1, got {self.tolerance}")
        require(2 <= self.max_builds <= 100, f"quant.max_builds must be 2 to 100, got {self.max_builds}")
        require(0 <= self.qat_share <= 1, f"quant.qat_share is a share of the budget, 0 to 1; got {self.qat_share}")
        require(1 <= self.clip_steps <= 100, f"quant.clip_steps must be 1 to 100, got {self.clip_steps}")
        require(
            self.clip_deviations == 0 or 0.5 <= self.clip_deviations <= 100,
            f"quant.clip_deviations must be 0 (search) or 0.5 to 100, got {self.clip_deviations}",
        )
        require(self.group >= 0, f"quant.group must be 0 (a whole row) or positive, got {self.group}")
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

    def choose_storage(
        self, name: str, shape: Shape, *, known_role: Role | None = None, matrix_q: int | None = None
    ) -> Storage:
        """A tensor is stored by its known role or that of its name, with matrices at this q or at their finest."""
        own = known_role or role(name, shape)
        finest = self.matrix_q if matrix_q is None else matrix_q
        q = {"matrix": finest, "embedding": self.embedding_q, "other": 0}[own]
        grouped = q and self.method == "rows" and self.group and shape[1] % self.group == 0
        return Storage(own, q, max(shape[1] // self.group, 1) if grouped else 1)

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
