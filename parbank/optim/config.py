"""The settings of the optimizer, and their values at a step."""

from dataclasses import dataclass

from parbank.config import choose, named, require
from parbank.optim.algorithm import ALGORITHMS, ElementwiseAlgorithm
from parbank.optim.schedules import SCHEDULES, ramp


@dataclass(frozen=True)
class Rates:
    """The values of the schedules at one step."""

    lr_share: float
    """The share of every group's peak learning rate."""
    momentum: float
    decay_share: float = 1.0
    """The share of every group's weight decay."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Muon for matrices, AdamW for everything else, unless other algorithms are named."""

    matrix_algorithm: str = named(ALGORITHMS, "muon")
    """Algorithm of the banks' matrices."""
    other_algorithm: str = named(ALGORITHMS, "adamw")
    """Algorithm of everything else; it must be element-wise, as adamw is."""
    matrix_lr: float = 0.025
    """Muon's learning rate, before the factor for a matrix's shape."""
    momentum: float = 0.99
    """Muon's momentum once warmed up."""
    momentum_start: float = 0.92
    """Muon's momentum at step 0."""
    momentum_steps: int = 1500
    """Steps over which the momentum rises."""
    matrix_weight_decay: float = 0.04
    """Muon's decoupled weight decay."""
    cautious_decay: bool = False
    """Decay a matrix's weights only where the update shrinks them too (Chen et al. 2025)."""
    decay_taper: bool = False
    """Let the weight decay fall with the learning rate. The weights shrink by their product: without this it falls too,
    with this it falls as the square."""
    newton_schulz_steps: int = 5
    """Iterations of the orthogonalisation."""
    coefficients: str = "quintic"
    """Polynomials of the orthogonalisation: quintic (Muon's usual one) or polar_express."""
    lr_scale: str = "spectral"
    """Muon's factor for a matrix's shape: spectral, rms (an update as large per number as AdamW's) or none."""
    normuon: bool = False
    """Divide each neuron's update by its running size (NorMuon)."""
    equilibrate: bool = False
    """Divide each neuron's row by its norm before the orthogonalisation (MuonEq-R)."""
    tuned_width: int = 0
    """Width at which the learning rates were tuned; they are carried over to the model's. 0: the model's own."""
    embedding_lr: float = 0.035
    """AdamW's learning rate for embeddings, tied head included."""
    head_lr: float = 0.008
    """AdamW's learning rate for an untied head."""
    scalar_lr: float = 0.025
    """AdamW's learning rate for gains, gates and small projections."""
    beta1: float = 0.9
    """AdamW's decay of the mean."""
    beta2: float = 0.95
    """AdamW's decay of the mean square."""
    adam_weight_decay: float = 0.04
    """AdamW's decoupled weight decay."""
    clip: float = 0.3
    """Largest global gradient norm, over all parameters and ranks; 0 does not clip."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from zero."""
    schedule: str = named(SCHEDULES, "linear")
    """How the learning rate falls over the warmdown."""
    warmdown: float = 0.5
    """Last share of the budget over which the learning rate falls."""
    final_lr: float = 0.0
    """Learning rate at the very end, as a share of the peak."""

    def __post_init__(self) -> None:
        choose(ALGORITHMS, self.matrix_algorithm, "optim.matrix_algorithm")
        other = choose(ALGORITHMS, self.other_algorithm, "optim.other_algorithm")
        require(
            isinstance(other, ElementwiseAlgorithm),
            f"optim.other_algorithm={self.other_algorithm} works on matrices, and gains and embeddings are none; use adamw",
        )
        choose(SCHEDULES, self.schedule, "optim.schedule")
        scales = ("spectral", "rms", "none")
        require(self.lr_scale in scales, f"optim.lr_scale must be one of {', '.join(scales)}, got {self.lr_scale!r}")
        known = ("quintic", "polar_express")
        require(
            self.coefficients in known,
            f"optim.coefficients must be one of {', '.join(known)}, got {self.coefficients!r}",
        )
        require(self.tuned_width >= 0, f"optim.tuned_width must be 0 (off) or a width, got {self.tuned_width}")
        for name in ("matrix_lr", "embedding_lr", "head_lr", "scalar_lr"):
            require(getattr(self, name) >= 0, f"optim.{name} must not be negative, got {getattr(self, name)}")
        for name in ("momentum", "momentum_start", "beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"optim.{name} must lie in 0 <= b < 1, got {getattr(self, name)}")
        require(0 <= self.warmdown <= 1, f"optim.warmdown is a share of the budget, 0 to 1; got {self.warmdown}")
        require(0 <= self.final_lr <= 1, f"optim.final_lr is a share of the peak, 0 to 1; got {self.final_lr}")
        require(self.clip >= 0, f"optim.clip must be 0 (off) or positive, got {self.clip}")
        require(
            self.newton_schulz_steps >= 1,
            f"optim.newton_schulz_steps must be at least 1, got {self.newton_schulz_steps}",
        )

    def rates(self, progress: float, step: int) -> Rates:
        """The values at a step, from the share of the budget spent and the step number."""
        warm = ramp(step + 1, self.warmup_steps, 0.0, 1.0)
        share = SCHEDULES[self.schedule](progress, self.warmdown, self.final_lr)
        return Rates(
            lr_share=share * warm,
            decay_share=share if self.decay_taper else 1.0,
            momentum=ramp(step, self.momentum_steps, self.momentum_start, self.momentum),
        )
