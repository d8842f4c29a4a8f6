"""The device, rank and world of a run.

One rank runs the same code as many, with communication skipped. So no other module asks whether a process group
exists.
"""

import contextlib
import numbers
import os
import platform
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from typing import TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from parbank.errors import ConfigError, DeviceError, RankError
from parbank.rendezvous import join
from parbank.watch import Watch

T = TypeVar("T")
LARGEST_SEED = 2**63 - 1  # the limit of PyTorch's generators
_LONGEST_WAIT = timedelta(days=1)  # for a rank that works: `watch` finds one that is lost


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The device of one process, and its rank in the process group."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a tensor over all ranks, in place, and returns it."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def agree(self, values: list[float]) -> list[float]:
        """The element-wise maximum over all ranks, through host memory: no rank waits for its GPU."""
        if self.world == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor on every rank, in place."""
        if self.world > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def barrier(self) -> None:
        if self.world > 1:
            self.agree([0.0])

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in order of rank. They travel pickled, through host memory."""
        if self.world == 1:
            return [value]
        values: list[T | None] = [None] * self.world
        dist.all_gather_object(values, value)
        return cast(list[T], values)

    def together(self, work: Callable[[], T]) -> T:
        """Work that every rank does. If it fails on one rank, it fails on all.

        A rank that failed raises its error. If the first rank failed, the others exit silently, since the first rank prints the
        reason. If not, they raise a RankError that names a failed rank.
        """
        result: T | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as failure:
            error = failure
        failures = self.gather(None if error is None else str(error))
        if error is not None:
            raise error
        if failures[0] is not None:
            raise SystemExit(2)
        for rank, message in enumerate(failures):
            if message is not None:
                raise RankError(f"rank {rank} failed: {message}")
        return cast(T, result)

    def in_turn(self, work: Callable[[], T]) -> T:
        """The first rank works while the others wait; then the others work. So the others find files that the first rank
        made. If a rank fails, all end, as in `together`."""
        first = self.together(lambda: work() if self.is_main else None)
        others = self.together(lambda: None if self.is_main else work())
        return cast(T, first if self.is_main else others)

    def synchronize(self) -> None:
        """Waits for the device. For measuring and saving only, never inside the loop."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


def pick_device(name: str | None) -> torch.device:
    """`auto` takes a GPU where there is one. A requested device that is missing is an error."""
    if name in (None, "auto"):
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(str(name))
    except RuntimeError:
        raise DeviceError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            f"device {name!r} was asked for, but torch sees no GPU; `parbank doctor` says why, --device cpu runs here"
        )
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise DeviceError(
            f"device {name!r} was asked for, but there are {torch.cuda.device_count()} GPUs, counted from 0"
        )
    return device


@contextlib.contextmanager
def start(device: str | None = None) -> Iterator[Runtime]:
    """Joins the process group that torchrun set up, or runs alone. Leaves the group at the end, also after an error. A rank
    that is lost ends the others by a RankError.

    With GPUs the group has two backends: nccl for tensors on the device, and gloo for host numbers that ranks agree
    on (the clock, a stop signal), which must not wait for the GPU.
    """
    chosen = pick_device(device)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        if chosen.type == "cuda":
            chosen = torch.device("cuda", chosen.index if chosen.index is not None else torch.cuda.current_device())
            torch.cuda.set_device(chosen)
        yield Runtime(device=chosen)
        return
    if chosen.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise DeviceError(
                f"rank {local} on this machine has no GPU of its own ({torch.cuda.device_count()} found); "
                f"start at most {torch.cuda.device_count()} processes, or add --device cpu"
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
        # By default nccl aborts the process when a rank is lost. With 2 it ends the collectives, and the watch gives the reason.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    store, rank, world = join()
    watch = Watch(rank, world, store)
    try:
        with watch.guard():
            backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_LONGEST_WAIT)
            store.set_timeout(_LONGEST_WAIT)
            yield Runtime(device=chosen, rank=rank, world=world)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()  # may hang if a rank is lost: the watch then ends this process
        watch.close()


def check_seed(seed: int) -> None:
    """Refuses a seed that PyTorch's generators would refuse later, with a clearer message."""
    if not isinstance(seed, numbers.Integral) or not 0 <= seed <= LARGEST_SEED:
        raise ConfigError(f"a seed is a whole number from 0 to {LARGEST_SEED}, got {seed!r}")


def seed_everything(seed: int) -> None:
    check_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def versions() -> dict[str, str]:
    """Versions of the software, for summaries, checkpoints and benchmark results."""
    from parbank import __version__

    found = {
        "parbank": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": f"{sys.platform}-{platform.machine()}",
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        pass
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["flash-attn-3"] = metadata.version("flash-attn-3")
    return found
