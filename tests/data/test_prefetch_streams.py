"""The loader's CUDA path on a machine without a GPU: every wait between its streams is needed, and all of them are there."""

import time

import pytest
import torch

from parbank.data import prefetch
from tests.data.fake_gpu import COMPUTE, COPY, FakeGpu
from tests.data.test_prefetch import expected_batches, open_stream

CUDA = torch.device("cuda")
LAGS = [set(), {COPY}, {COMPUTE}, {COPY, COMPUTE}]


def use(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "torch", gpu.torch)
    monkeypatch.setattr(prefetch, "_copiers", {})


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("lags", LAGS, ids=lambda lags: " and ".join(sorted(lags)) or "none")
def test_batches_are_right_whichever_stream_lags(lags: set[str], depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is read when it is handed out, and again at the last moment it is valid."""
    gpu, count = FakeGpu(lags), 40
    use(gpu, monkeypatch)
    early, late, last = [], [], None
    with prefetch.Prefetcher(open_stream(), device=CUDA, depth=depth) as batches:
        for _ in range(count):
            batch = batches.next()
            early.append(gpu.read(batch))
            if last is not None:
                late.append(gpu.read(last))
            last = batch
        gpu.synchronize()
    assert torch.equal(torch.stack(early), expected_batches(count))
    assert torch.equal(torch.stack(late), expected_batches(count)[:-1])


def test_memory_belongs_to_the_copy_stream_and_is_kept_for_the_compute_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory from the compute stream's pool may still be in use there, and freed memory must outlast that stream's reads."""
    gpu = FakeGpu(set())
    use(gpu, monkeypatch)
    with prefetch.Prefetcher(open_stream(), device=CUDA, depth=2) as batches:
        for _ in range(8):
            batch = batches.next()
            assert batch.pool is gpu.copier
            assert batch.users == {COMPUTE}


def test_all_prefetchers_of_a_device_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch hands out 32 streams in turn: with one for each, a loader would in time get the stream that captures."""
    gpu = FakeGpu(set())
    use(gpu, monkeypatch)
    for _ in range(3):
        with prefetch.Prefetcher(open_stream(), device=CUDA, depth=1) as batches:
            batches.next()
    assert gpu.made == 1


def test_the_loop_never_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With both streams standing still the consumer gets every batch that the ring has room for."""
    gpu = FakeGpu({COPY, COMPUTE})
    use(gpu, monkeypatch)
    with prefetch.Prefetcher(open_stream(), device=CUDA, depth=3) as batches:
        for _ in range(3):
            batches.next()
        assert gpu.compute.done == 0


def test_waiting_for_the_gpu_is_not_waiting_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that the GPU keeps waiting has its data in time all the same: the loop is ahead of the device."""
    gpu = FakeGpu(set(), seconds=0.03)
    use(gpu, monkeypatch)

    def share_of_waiting() -> float:
        with prefetch.Prefetcher(open_stream(), device=CUDA, depth=1) as batches:
            began = time.perf_counter()
            for _ in range(12):
                batches.next()
            elapsed = time.perf_counter() - began
            assert elapsed > 0.2, "the ring must be waited for, or the test sees nothing"
            return batches.wait_seconds / elapsed

    assert any(share_of_waiting() < 0.3 for _ in range(5)), "a busy machine may stall it once or twice"
