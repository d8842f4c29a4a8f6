"""The ring of buffers on a GPU: the host runs ahead, and no batch is overwritten while the device may read it."""

import time

import pytest
import torch

from parbank.data.prefetch import Prefetcher
from tests.data.test_prefetch import DEPTHS, Source, expected_batches, open_stream, producers


@pytest.mark.gpu
@pytest.mark.parametrize("depth", DEPTHS)
def test_cuda_batches_are_the_same_while_the_gpu_lags_behind(depth):
    """The GPU is kept far behind the host, and reads each batch at the last moment it is valid. A device buffer that is
    overwritten early, or a pinned one that is refilled during its copy, gives a wrong batch here."""
    rows, columns, count = 64, 1024, 60
    options = {"sequence_length": columns, "batch_sequences": rows, "micro_sequences": rows}
    source = Source(3_000_017)
    expected = expected_batches(count, source=source, **options)
    seen = torch.empty((count, rows, columns + 1), dtype=torch.int64, device="cuda")
    early = torch.empty_like(seen)
    with Prefetcher(open_stream(source, **options), device=torch.device("cuda"), depth=depth) as batches:
        last = None
        for index in range(count):
            batch = batches.next()
            early[index].copy_(batch)
            torch.cuda._sleep(4_000_000)  # about 2 ms in which nothing that is queued behind it runs
            if last is not None:
                seen[index - 1].copy_(last)  # valid until the next call, which is still to come
            last = batch
        seen[count - 1].copy_(last)
    assert torch.equal(early.cpu(), expected)
    assert torch.equal(seen.cpu(), expected)


@pytest.mark.gpu
def test_cuda_waiting_for_the_gpu_is_not_waiting_for_data():
    """A loop that runs ahead of the GPU is held back by the ring; its data was there in time all the same."""
    with Prefetcher(open_stream(), device=torch.device("cuda"), depth=2) as batches:
        batches.next()
        torch.cuda.synchronize()
        before, began = batches.wait_seconds, time.monotonic()
        for _ in range(60):
            batches.next()
            torch.cuda._sleep(10_000_000)  # about 5 ms
        torch.cuda.synchronize()
        assert batches.wait_seconds - before < 0.2 * (time.monotonic() - began)


@pytest.mark.gpu
def test_cuda_works_on_the_stream_of_the_caller_and_rewinds():
    expected = expected_batches(20)
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        Prefetcher(open_stream(), device=torch.device("cuda"), depth=3) as batches,
    ):
        start = batches.state_dict()
        for _ in range(5):
            torch.cuda._sleep(2_000_000)
            batches.next()
        batches.rewind(start)
        copies = []
        for _ in range(20):
            torch.cuda._sleep(2_000_000)
            copies.append(batches.next().clone())
        assert torch.equal(torch.stack(copies).cpu(), expected)
    assert not producers()
