"""Machines for tests of plans: rates as a probe finds them, without a probe."""

from parbank.plan.machine import Machine

CPU = Machine(
    name="a CPU", cuda=False, ranks=1, memory_bytes=8e9, rates=(2e-4, 1.5e-11, 3e-9, 2e-9, 2e-11, 2e-9)
)  # about 7,000 tokens/s for 3 layers of 192
GPU = Machine(
    name="a GPU", cuda=True, ranks=1, memory_bytes=140e9, rates=(5e-6, 2.2e-15, 1e-12, 1e-12, 5e-15, 1e-11)
)  # about 1.5 million tokens/s for 11 layers of 512, as benchmarks/results/sprint has
H200 = Machine(
    name="an H200", cuda=True, ranks=1, memory_bytes=139e9, rates=(1e-5, 2.35e-15, 4e-12, 2e-12, 8e-15, 2e-11)
)  # chosen by hand, no probe's: 1.94 million tokens/s for 8 layers of 512, 2.47 for 6; study_race60 has 2.00 and 2.51
