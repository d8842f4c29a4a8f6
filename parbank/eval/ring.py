"""The carry between ranks: a layer's keys and values go to the next rank as soon as they are made.

Each link of the ring is its own process group. On NCCL the traffic of one group runs in order on one stream, so two
ranks that share a group would each wait to send before they receive.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from parbank.model import GPT
from parbank.model.stream import Past
from parbank.precision import autocast
from parbank.runtime import Runtime

SEGMENTS_IN_FLIGHT = 2  # pending sends: the next rank receives a segment's last layer while we work on our next segment


class RingCarry:
    """Sends the carry of rank r to rank r + 1, in a ring. Sends never block: the receiver may be layers behind."""

    def __init__(self, model: GPT, window: int, runtime: Runtime) -> None:
        c, world = model.config, runtime.world
        links = _make_links(dist.group.WORLD)
        self._to, self._from = (runtime.rank + 1) % world, (runtime.rank - 1) % world
        self._out, self._in = links[runtime.rank], links[self._from]
        with autocast(runtime.device):
            dtype = model._compute_dtype(runtime.device)
        self._empty = torch.empty(2, 1, window - 1, c.kv_heads, c.head_width, dtype=dtype, device=runtime.device)
        self._sent: list[list[Any]] = []
        self._first = self._last = True

    def begin(self, *, first: bool, last: bool) -> None:
        """Starts a segment. The first of the text receives nothing, the last sends nothing."""
        self._first, self._last = first, last
        while len(self._sent) >= SEGMENTS_IN_FLIGHT:
            self._wait(self._sent.pop(0))
        self._sent.append([])

    def take(self, layer: int) -> Past | None:
        if self._first or not self._empty.numel():
            return None
        past = torch.empty_like(self._empty)
        dist.recv(past, src=self._from, group=self._in)
        return past[0], past[1]

    def give(self, layer: int, past: Past) -> None:
        if self._last or not self._empty.numel():
            return
        both = torch.stack(past)
        self._sent[-1].append((dist.isend(both, dst=self._to, group=self._out), both))

    def finish(self) -> None:
        """Waits for pending sends. All of them are received, since the next segment needs them."""
        for sent in self._sent:
            self._wait(sent)
        self._sent = []

    @staticmethod
    def _wait(sent: list[Any]) -> None:
        for work, _ in sent:
            work.wait()


@lru_cache(maxsize=1)
def _make_links(whole: Any) -> list[Any]:
    """The group of every link, for the ranks of a whole process group. Every rank makes every group, in the same order. All
    texts share them: a group keeps its threads and sockets, and NCCL its memory, until the process leaves."""
    world = dist.get_world_size(whole)
    return [dist.new_group(sorted({rank, (rank + 1) % world})) for rank in range(world)]
