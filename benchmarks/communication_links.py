"""What a collective costs on a cluster: a latency for each hop, and bytes over the bandwidth of a ring. For communication.py.

These are the formulas and constants by which NCCL chooses its algorithms (src/graph/tuning.cc). A collective takes the
protocol that NCCL would choose: the fastest for this collective alone.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How NCCL moves data. Pairs: inside a machine, and between machines."""

    start: float
    """Microseconds until the first byte leaves."""
    ring: tuple[float, float]
    """Microseconds a hop takes in a ring; the next: in a tree."""
    tree: tuple[float, float]
    share: float
    """Of the links' bandwidth."""
    limit: tuple[float, float] = (math.inf, math.inf)
    """Bytes per second at most, on one machine and on several."""


# ncclTunerConstantsDefaults in NCCL's src/graph/tuning.cc, June 2026, for Hopper
PROTOCOLS = (
    Protocol(start=6.7, ring=(0.6, 2.7), tree=(0.6, 5.0), share=0.5, limit=(141e9, 35e9)),  # LL
    Protocol(start=14.0, ring=(1.9, 4.0), tree=(1.25, 8.5), share=0.92),  # LL128
    Protocol(start=8.4, ring=(3.4, 14.0), tree=(4.0, 14.0), share=1.0),  # Simple
)
NVLINK = 18 * 20.6e9  # bytes/s a GPU sends: 18 links of Hopper at the rate NCCL counts with (SM90_NVLINK_BW)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Between machines."""

    bandwidth: float
    """Bytes per second that a machine sends, over all its ports."""
    delay: float
    """Microseconds a hop takes longer than over InfiniBand."""


NETWORKS = {
    # 46 to 48 GB/s a port: NVIDIA/nccl-tests, issue 290. NCCL lays its rings through all ports of a machine.
    "InfiniBand": Network(bandwidth=8 * 47e9, delay=0),
    # 90% of 12.5 GB/s over TCP; the delay is an assumption.
    "Ethernet": Network(bandwidth=11.25e9, delay=20),
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """GPUs in machines."""

    ranks: int
    per_machine: int = 8
    network: str = "InfiniBand"

    @property
    def name(self) -> str:
        return f"{self.ranks} GPUs, {'NVLink' if self.machines == 1 else self.network}"

    @property
    def machines(self) -> int:
        return math.ceil(self.ranks / self.per_machine)

    def time(self, operation: str, size: int) -> tuple[float, float]:
        """Seconds that a collective holds the link, and then takes to arrive at the last rank. `size` as for `sent_bytes`."""
        times = [self._time(operation, size, protocol) for protocol in PROTOCOLS]
        return min(times, key=sum)

    def _time(self, operation: str, size: int, protocol: Protocol) -> tuple[float, float]:
        several = self.machines > 1
        network = NETWORKS[self.network]
        links = min(NVLINK, network.bandwidth) if several else NVLINK
        bandwidth = min(links * protocol.share, protocol.limit[several])
        transfer = sent_bytes(operation, size, self.ranks) / bandwidth
        start = 1e-6 * protocol.start
        between = self.machines - 1
        inside = self.ranks - 1 - between
        around = 1e-6 * (inside * protocol.ring[0] + between * (protocol.ring[1] + network.delay))
        if operation in ("reduce", "broadcast"):
            # To or from one rank, along a chain. A rank that has passed its data on begins the next operation. If the owners
            # follow each other round the ring, the next chain ends two hops after this one, not a whole round.
            return start + transfer + 2 * around / (self.ranks - 1), around
        if operation != "all_reduce":
            return start + around + transfer, 0.0
        up = (self.ranks / self.machines - 1) * protocol.tree[0]
        up += math.log2(self.machines) * (protocol.tree[1] + network.delay)
        return start + 2 * min(around, 1e-6 * up) + transfer, 0.0


CLUSTERS = (
    Cluster(ranks=2),
    Cluster(ranks=8),
    Cluster(ranks=64),
    Cluster(ranks=512),
    Cluster(ranks=64, network="Ethernet"),
    Cluster(ranks=512, network="Ethernet"),
)


def sent_bytes(operation: str, size: int, ranks: int) -> float:
    """Bytes that a rank sends round a ring. `size`: of the tensor that the collective is about, before a reduce-scatter and
    after an all-gather."""
    passes = {"all_reduce": 2 * (ranks - 1) / ranks, "reduce": 1.0, "broadcast": 1.0}
    return size * passes.get(operation, (ranks - 1) / ranks)
