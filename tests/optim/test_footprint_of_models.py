"""The memory of a step at the sizes of real models, as a GPU would have it: golf, GPT-2 small, and one of 1.3B parameters.

Weights lie on the meta device and launches do nothing, so that only allocations remain; a count of live storages finds the
peak. Before every step there is a backward and a `zero_grad()`, so that gradients are new tensors each time.
"""

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from parbank.optim import ParallelMuon, kernels, newton_schulz, parallel_muon
from parbank.optim.algorithms import muon
from parbank.optim.skipped import SkipWatch

# (matrices, rows, cols), as in benchmarks/optimizer_shapes.py.
MODELS = {
    "golf": ((22, 512, 512), (22, 256, 512), (11, 1536, 512), (11, 512, 1536)),
    "GPT-2 small": ((12, 2304, 768), (12, 768, 768), (12, 3072, 768), (12, 768, 3072)),
    "1.3B": ((96, 2048, 2048), (24, 8192, 2048), (24, 2048, 8192)),
}
STEPS = 4
SLACK = 2**20  # tables of addresses and tiles, squared norms of tiles, flags


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that calls inside have made and that still live, also of those that are resized."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = len(self._storages)
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._storages.add(tensor.untyped_storage())
        if len(self._storages) != known:
            self.peak = max(self.peak, self.bytes)
        return result


class Launch:
    """A kernel that is launched and does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: None


@pytest.fixture(params=["eager", "captured"])
def on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The choices that a step makes on a GPU, without one. Returns whether it is captured."""
    captured = request.param == "captured"
    for name in ("_muon_momentum_kernel", "_muon_inverse_norm_kernel", "_muon_normalize_kernel", "_muon_apply_kernel"):
        monkeypatch.setattr(kernels, name, Launch())
    for module in (kernels, muon):
        monkeypatch.setattr(module, "use_kernels", lambda *args: True)
    monkeypatch.setattr(kernels, "working_dtype", lambda tensor: torch.float16)
    monkeypatch.setattr(newton_schulz, "use_triton", lambda tensor: True)
    monkeypatch.setattr(newton_schulz, "as_they_are", lambda device: nullcontext())
    square = {"xxt": lambda x: x.new_empty(*x.shape[:-1], x.shape[-2])}
    same = dict.fromkeys(("ba_plus_caa", "ax_plus_bx", "symmetric_product"), lambda x, *args: torch.empty_like(x))
    for name, stand_in in {**square, **same}.items():
        monkeypatch.setattr(newton_schulz, name, stand_in)
    monkeypatch.setattr(parallel_muon, "check_gradients", lambda groups: torch.device("meta"))
    monkeypatch.setattr(SkipWatch, "look", lambda *args: None)
    run = parallel_muon.step.run

    def capture(optimizer: ParallelMuon) -> None:
        optimizer.buffers.captured = captured
        run(optimizer)

    monkeypatch.setattr(parallel_muon.step, "run", capture)
    return captured


def _find_work(shapes: Any) -> int:
    """The bytes of the largest batch in flight, in float16: its updates and four squares of the shorter side, or its updates
    twice, since a product cannot overwrite its factor, and one square. Matrices of one shape, or of its transpose, are one
    batch; of a batch beyond WORK numbers, a part is worked on."""
    batches: dict[tuple[int, int], int] = {}
    for count, *shape in shapes:
        short, long = sorted(shape)
        batches[short, long] = batches.get((short, long), 0) + count
    sizes = []
    for (short, long), count in batches.items():
        part = min(count, max(1, newton_schulz.WORK // (short * long)))
        update, square = part * short * long, part * short * short
        beside = 0 if part == count else update  # the result of a part is copied to its place
        sizes.append(2 * (count * short * long + beside + max(4 * square, update + square)))
    return max(sizes)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_needs_its_momentum_a_tenth_and_one_batch(on_a_gpu: bool, model: str, max_norm: float | None) -> None:
    shapes = MODELS[model]
    with Live() as live, torch.device("meta"):
        params = [nn.Parameter(torch.empty(rows, cols)) for count, rows, cols in shapes for _ in range(count)]
        weights = live.bytes
        optimizer = ParallelMuon(params, weight_decay=0.1, max_norm=max_norm)
        for _ in range(STEPS):
            optimizer.zero_grad()
            torch.stack([(param * param).sum() for param in params]).sum().backward()
            live.peak = live.bytes
            optimizer.step()
            peak = live.peak
        momentum = sum(tensor.nbytes for held in optimizer.state.values() for tensor in held.values())
    assert momentum == weights == sum(4 * param.numel() for param in params)
    extra = peak - 2 * weights  # beyond weights and gradients
    assert momentum < extra, "the count sees the momentum and the work on it"
    assert extra <= 1.1 * momentum + _find_work(shapes) + SLACK
    assert live.bytes - 2 * weights - momentum < SLACK, "nothing but the state remains"
