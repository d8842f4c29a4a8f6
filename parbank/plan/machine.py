"""What a step takes on a machine, by formula: seconds and bytes against the shape of a model.

    seconds of a step = passes * layers * launch
                      + tokens * (flops * arithmetic + layers * width * traffic + vocab * softmax)
                      + orthogonalisation flops * muon + parameters * update

`probe.py` measures the six rates.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from parbank.model import ModelConfig
from parbank.plan.laws import Array
from parbank.plan.shapes import count_parameters, count_products, orthogonalisation_flops
from parbank.training.memory import PARAMETER_BYTES, activation_bytes

RATES = ("launch", "arithmetic", "traffic", "softmax", "muon", "update")
# Memory that stays free: of a GPU for CUDA's context and fragments, of a machine for other programs.
USABLE_MEMORY = 0.8
# Seconds of passes that Inductor compiled, over those of plain PyTorch, on a CPU. The probe does not compile: that would take
# longer than the probe. Two shapes had 0.61 and 0.67 of them (docs/log/cpu.md, without the update).
COMPILED_PASSES = 0.64
# What is left of the sum of the GPUs' rates where several exchange gradients: a guess, not measured.
PARALLEL_EFFICIENCY = 0.9


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts about a machine that a plan uses."""

    name: str
    cuda: bool
    ranks: int
    memory_bytes: float
    """Free for one rank."""
    rates: tuple[float, ...]
    """Seconds, in the order of RATES."""
    memory_factor: float = 1.0
    """Measured over estimated memory of activations."""
    others: float = 0.0
    """Cores that other processes want now; the rates are those of the machine without them."""
    threads: int = 1
    """Of a CPU, with which the rates count."""
    calm: bool = True
    """Whether the gain of several threads was measured, or assumed since the machine was busy."""

    @property
    def share(self) -> float:
        """The share of its cores that a run of one thread a core would get now."""
        return self.threads / (self.threads + max(0.0, self.others))

    def step_seconds(self, model: "Costs", sequence_length: Array, batch_tokens: Array, passes: Array) -> Array:
        """Seconds of one optimizer step of one rank's share in so many passes."""
        features = step_features(model, sequence_length, batch_tokens / self.ranks, passes, ranks=self.ranks)
        seconds: Array = sum(rate * feature for rate, feature in zip(self.rates, features, strict=True))  # type: ignore[assignment]
        return seconds / (PARALLEL_EFFICIENCY if self.ranks > 1 else 1.0)

    def compiled(self) -> "Machine":
        """The machine as a run whose passes are compiled finds it."""
        passes = RATES.index("muon")
        return replace(self, rates=(*(COMPILED_PASSES * rate for rate in self.rates[:passes]), *self.rates[passes:]))

    def most_tokens(self, model: "Costs") -> Array:
        """The tokens of one pass that fit in memory; below zero where not even the weights do."""
        room = USABLE_MEMORY * self.memory_bytes - PARAMETER_BYTES * model.parameters
        found: Array = room / (self.memory_factor * model.token_bytes(cuda=self.cuda))
        return found


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The quantities that decide a step's time and memory: numbers of one model, or arrays over several."""

    layers: Array
    width: Array
    hidden: Array
    vocab: Array
    products: Array
    """Multiplications of one token outside attention, forward."""
    muon_flops: Array
    parameters: Array

    @classmethod
    def of(cls, models: Sequence[ModelConfig]) -> "Costs":
        rows = [
            (
                c.layers,
                c.width,
                c.hidden,
                c.vocab_size,
                count_products(c),
                orthogonalisation_flops(c),
                count_parameters(c).total,
            )
            for c in models
        ]
        names = ("layers", "width", "hidden", "vocab", "products", "muon_flops", "parameters")
        return cls(**dict(zip(names, np.array(rows, np.float64).T)))

    def token_bytes(self, *, cuda: bool) -> Array:
        """Memory of one token in a pass."""
        return activation_bytes(self.layers, self.width, self.hidden, self.vocab, cuda=cuda)


def step_features(model: Costs, length: Array, tokens: Array, passes: Array, *, ranks: int = 1) -> tuple[Array, ...]:
    """The factor of each rate, in the order of RATES. A token attends to half the window on average."""
    return (
        passes * (model.layers + 2),
        tokens * 6 * (model.products + model.layers * model.width * length),
        tokens * model.layers * model.width,
        tokens * model.vocab,
        model.muon_flops / ranks,
        model.parameters,
    )


def describe_machine(machine: Machine) -> dict[str, Any]:
    """For --json."""
    return asdict(machine) | {"rates": dict(zip(RATES, machine.rates))}
