"""Machines for tests of plans: rates as a probe finds them, without a probe."""

from parbank.plan.probe import Machine

CPU = Machine(
    name="a CPU", cuda=False, ranks=1, memory_bytes=8e9, rates=(2e-4, 1.5e-11, 3e-9, 2e-9, 2e-11, 2e-9)
)  # about 7,000 tokens/s for 3 layers of 192, as benchmarks/results/demo has
GPU = Machine(
    name="a GPU", cuda=True, ranks=1, memory_bytes=140e9, rates=(5e-6, 2.2e-15, 1e-12, 1e-12, 5e-15, 1e-11)
)  # about 1.5 million tokens/s for 11 layers of 512, as benchmarks/results/sprint has
