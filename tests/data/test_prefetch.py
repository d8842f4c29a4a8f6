"""The ring of buffers: the same batches at any depth, errors that surface, threads that end, exact rewinds."""

import doctest
import gc
import inspect
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import parbank
from parbank.data.batches import BatchStream
from parbank.data.prefetch import Prefetcher
from parbank.errors import ConfigError, DataError

CPU = torch.device("cpu")
DEPTHS = [0, 1, 3]
ROW = 17


class Source:
    """Tokens in memory on a disk that can be slow, can hang (`gate`) and can break after some rows."""

    def __init__(self, count=5003, *, seconds=0.0, gate=None, break_at=None, error=None):
        self.array = np.random.default_rng(0).integers(0, 65536, count, dtype=np.uint16)
        self.seconds = seconds
        self.gate = gate
        self.break_at = break_at
        self.error = error
        self.tokens_read = 0

    def __len__(self):
        return len(self.array)

    @property
    def rows(self):
        """Whole rows read for batches. (The row at the end of an epoch takes two reads.)"""
        return self.tokens_read // ROW

    def read(self, start, count, out=None):
        if out is None:  # the fingerprint, at the opening
            return self.array[start : start + count].copy()
        if self.gate is not None:
            self.gate.wait()
        time.sleep(self.seconds)
        if self.rows == self.break_at:
            raise self.error
        self.tokens_read += count
        out[:] = self.array[start : start + count]
        return out


def open_stream(source=None, **options):
    defaults = {"sequence_length": ROW - 1, "batch_sequences": 4, "micro_sequences": 2, "seed": 3}
    return BatchStream(source or Source(), **{**defaults, **options})


def expected_batches(count, **options):
    stream = open_stream(**options)
    batches = np.empty((count, *stream.shape), dtype=np.uint16)
    for batch in batches:
        stream.fill(batch)
    return torch.from_numpy(batches.astype(np.int64))


def producers():
    return [thread for thread in threading.enumerate() if thread.name == "parbank-prefetch"]


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def _no_thread_left():
    yield
    wait_until(lambda: not producers())


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 8])
def test_every_depth_gives_the_same_batches(depth):
    expected = expected_batches(200)  # more than one epoch
    with Prefetcher(open_stream(), device=CPU, depth=depth) as batches:
        for index in range(200):
            batch = batches.next()
            assert batch.dtype == torch.int64
            assert torch.equal(batch, expected[index])
    assert expected.max() > 32767  # the upper half of uint16 is not mistaken for negative numbers


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_batch_stays_whole_until_the_next_call_but_one(depth):
    expected = expected_batches(60)
    with Prefetcher(open_stream(), device=CPU, depth=depth) as batches:
        last = batches.next()
        for index in range(1, 60):
            batch = batches.next()
            time.sleep(0.001)  # the producer gets time to do damage
            assert torch.equal(last, expected[index - 1])
            assert torch.equal(batch, expected[index])
            last = batch


@pytest.mark.parametrize("depth", DEPTHS)
def test_buffers_are_used_again(depth):
    with Prefetcher(open_stream(), device=CPU, depth=depth) as batches:
        assert len({batches.next().data_ptr() for _ in range(50)}) == depth + 2


@pytest.mark.parametrize("depth", [1, 3])
def test_the_queue_is_bounded(depth):
    source = Source()
    with Prefetcher(open_stream(source), device=CPU, depth=depth) as batches:
        for handed_out in range(5):
            wait_until(lambda n=handed_out: source.rows == 2 * (n + depth))  # two rows a batch
            time.sleep(0.02)
            assert source.rows == 2 * (handed_out + depth)
            batches.next()


def test_the_thread_exists_only_where_it_should():
    with Prefetcher(open_stream(), device=CPU, depth=0) as batches:
        batches.next()
        assert not producers()
    with Prefetcher(open_stream(), device=CPU, depth=1) as batches:
        batches.next()
        (thread,) = producers()
        assert thread.daemon
    assert not producers()


def test_a_slow_producer_shows_as_waiting():
    with Prefetcher(open_stream(Source(seconds=0.01)), device=CPU, depth=2) as batches:
        for _ in range(8):
            batches.next()
        # 8 batches of 2 reads of 10 ms, with nothing to overlap them; sleeps are never shorter than asked.
        assert batches.wait_seconds > 0.1


def wait_as_slow_consumer() -> float:
    source = Source(seconds=0.01)
    with Prefetcher(open_stream(source), device=CPU, depth=2) as batches:
        batches.next()
        before = batches.wait_seconds
        for handed_out in range(1, 9):
            wait_until(lambda n=handed_out: source.rows == 2 * (n + 2))  # it takes longer than the producer
            batches.next()
        return batches.wait_seconds - before


def test_a_slow_consumer_does_not_wait():
    # Unhidden it is 0.16. A busy machine may hold the producer between its last read and the queue, but not every time.
    assert any(wait_as_slow_consumer() < 0.08 for _ in range(5))


def test_without_a_thread_all_reading_is_waiting():
    with Prefetcher(open_stream(Source(seconds=0.01)), device=CPU, depth=0) as batches:
        for _ in range(5):
            batches.next()
        assert batches.wait_seconds > 0.09


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError("input/output error"), DataError),
        (DataError("shard 7 is damaged"), DataError),
        (ZeroDivisionError("a bug"), RuntimeError),
        (MemoryError(), RuntimeError),
    ],
)
def test_an_error_surfaces_after_the_good_batches_with_its_cause(depth, error, kind):
    expected = expected_batches(5)
    with Prefetcher(open_stream(Source(break_at=10, error=error)), device=CPU, depth=depth) as batches:
        for index in range(5):
            assert torch.equal(batches.next(), expected[index])
        state = batches.state_dict()
        for _ in range(2):  # it does not go away by asking again
            with pytest.raises(kind, match=f"could not be made: {type(error).__name__}") as caught:
                batches.next()
            assert caught.value.__cause__ is error
        assert batches.state_dict() == state


def test_an_exit_inside_the_producer_surfaces_too():
    with Prefetcher(open_stream(Source(break_at=0, error=SystemExit(3))), device=CPU, depth=1) as batches:
        with pytest.raises(RuntimeError, match="SystemExit") as caught:
            batches.next()
        assert isinstance(caught.value.__cause__, SystemExit)


@pytest.mark.parametrize("depth", DEPTHS)
def test_close_returns_and_may_be_repeated(depth):
    batches = Prefetcher(open_stream(), device=CPU, depth=depth)
    batches.next()
    batches.close()
    batches.close()
    assert not producers()
    with pytest.raises(RuntimeError, match="closed"):
        batches.next()
    with pytest.raises(RuntimeError, match="closed"):
        batches.rewind(batches.state_dict())


def test_close_with_a_full_queue():
    source = Source()
    batches = Prefetcher(open_stream(source), device=CPU, depth=2)
    wait_until(lambda: source.rows == 4)
    batches.close()
    assert not producers()


def test_close_waits_for_the_batch_being_made_and_for_no_other():
    source = Source(seconds=0.1)
    batches = Prefetcher(open_stream(source), device=CPU, depth=10)
    batches.close()
    assert source.rows < 20  # as many as fill the queue, in 2 s; one batch has two
    assert not producers()


def test_close_after_the_producer_died():
    batches = Prefetcher(open_stream(Source(break_at=0, error=OSError("gone"))), device=CPU, depth=2)
    wait_until(lambda: not producers())
    batches.close()  # the error was never asked for
    batches.close()


def test_leaving_through_an_exception_closes_and_keeps_the_exception():
    def run():
        with Prefetcher(open_stream(Source(seconds=0.01)), device=CPU, depth=3) as batches:
            batches.next()
            raise KeyError("the loop's own")

    with pytest.raises(KeyError, match="the loop's own"):
        run()
    assert not producers()


def test_close_gives_up_on_a_read_that_hangs_for_ever():
    gate = threading.Event()
    batches = Prefetcher(open_stream(Source(gate=gate)), device=CPU, depth=2)
    began = time.monotonic()
    with pytest.warns(RuntimeWarning, match=r"hanging for 0\.05 s"):
        batches.close(timeout=0.05)
    assert time.monotonic() - began < 60
    batches.close()
    gate.set()  # and the thread goes as soon as the read comes back


@pytest.mark.parametrize("depth", DEPTHS)
def test_close_leaves_the_stream_after_the_last_batch_handed_out(depth):
    expected = expected_batches(12)
    stream = open_stream()
    with Prefetcher(stream, device=CPU, depth=depth) as batches:
        for _ in range(7):
            batches.next()
    with Prefetcher(stream, device=CPU, depth=depth) as batches:
        assert torch.equal(batches.next(), expected[7])


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_state_is_that_of_the_batches_handed_out(depth):
    source = Source()
    plain = open_stream()
    buffer = np.empty(plain.shape, dtype=np.uint16)
    with Prefetcher(open_stream(source), device=CPU, depth=depth) as batches:
        for handed_out in range(9):
            wait_until(lambda n=handed_out: source.rows == 2 * (n + depth))  # the producer is as far as it gets
            assert batches.state_dict() == plain.state_dict()
            batches.next()
            plain.fill(buffer)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_state_resumes_with_the_exact_next_batch(depth):
    expected = expected_batches(20)
    with Prefetcher(open_stream(), device=CPU, depth=depth) as batches:
        for _ in range(7):
            batches.next()
        state = batches.state_dict()
    for other_depth in DEPTHS:
        stream = open_stream()
        stream.load_state_dict(state)
        with Prefetcher(stream, device=CPU, depth=other_depth) as batches:
            for index in range(7, 20):
                assert torch.equal(batches.next(), expected[index])


@pytest.mark.parametrize("depth", DEPTHS)
def test_rewind_replays_from_the_saved_state(depth):
    expected = expected_batches(30)
    with Prefetcher(open_stream(), device=CPU, depth=depth) as batches:
        start = batches.state_dict()
        for _ in range(10):  # warm-up steps, then undone
            batches.next()
        last = batches.next()
        batches.rewind(start)
        assert batches.state_dict() == start
        assert len(producers()) == (depth > 0)
        time.sleep(0.01)
        assert torch.equal(last, expected[10])  # still whole: it was handed out last
        for index in range(30):
            assert torch.equal(batches.next(), expected[index])


def test_rewind_while_the_producer_is_busy():
    expected = expected_batches(3)
    with Prefetcher(open_stream(Source(seconds=0.002)), device=CPU, depth=3) as batches:
        start = batches.state_dict()
        for _ in range(5):
            batches.next()
            batches.rewind(start)
        for index in range(3):
            assert torch.equal(batches.next(), expected[index])


@pytest.mark.parametrize("depth", DEPTHS)
def test_rewind_after_an_error_goes_on(depth):
    expected = expected_batches(6)
    source = Source(break_at=5, error=OSError("gone for a moment"))
    with Prefetcher(open_stream(source), device=CPU, depth=depth) as batches:
        batches.next()
        batches.next()
        with pytest.raises(DataError, match="gone for a moment"):
            batches.next()
        source.break_at = None
        batches.rewind(batches.state_dict())
        for index in range(2, 6):
            assert torch.equal(batches.next(), expected[index])


def test_rewind_gives_up_on_a_read_that_hangs_and_may_be_tried_again():
    expected = expected_batches(4)
    gate = threading.Event()
    with Prefetcher(open_stream(Source(gate=gate)), device=CPU, depth=2) as batches:
        start = batches.state_dict()
        with pytest.raises(DataError, match=r"hanging for 0\.05 s"):
            batches.rewind(start, timeout=0.05)
        with pytest.raises(DataError, match="hanging"):
            batches.next()  # says so, and does not wait for a producer that has been told to stop
        gate.set()
        batches.rewind(start)
        for index in range(4):
            assert torch.equal(batches.next(), expected[index])


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_refused_rewind_changes_nothing(depth):
    expected = expected_batches(6)
    with Prefetcher(open_stream(), device=CPU, depth=depth) as batches:
        batches.next()
        with pytest.raises(DataError, match="the seed was 99"):
            batches.rewind({**batches.state_dict(), "seed": 99})
        for index in range(1, 6):
            assert torch.equal(batches.next(), expected[index])


def test_a_negative_depth_is_refused():
    with pytest.raises(ConfigError, match="a list has no shape, fill, state_dict, load_state_dict"):
        Prefetcher([1, 2], device="cpu")
    with pytest.raises(ConfigError, match="got -1"):
        Prefetcher(open_stream(), device=CPU, depth=-1)


def test_a_dropped_prefetcher_ends_its_thread():
    batches = Prefetcher(open_stream(), device=CPU, depth=2)
    batches.next()
    assert producers()
    del batches
    gc.collect()
    assert not producers()


@pytest.mark.parametrize(("seconds", "ending"), [(0.0, ""), (0.2, "raise ValueError('the run broke')")])
def test_abandonment_does_not_hang_the_interpreter(seconds, ending):
    """The prefetcher is still referenced when the interpreter goes down: with its queue full, and in mid-read."""
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_prefetch import CPU, Prefetcher, Source, open_stream
        batches = Prefetcher(open_stream(Source(seconds={seconds})), device=CPU, depth=2)
        batches.next()
        {ending}
    """
    env = {**os.environ, "PYTHONPATH": str(Path(parbank.__file__).parents[1])}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == ("ValueError" in ending)
    assert ("the run broke" in done.stderr) if "ValueError" in ending else (done.stderr == "")


def test_the_example_of_the_docstring_runs():
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(Prefetcher), {"parbank": parbank}, "", None, None)
    report = []
    assert doctest.DocTestRunner().run(example, out=report.append).attempted > 3
    assert not report, "".join(report)


class Counter:
    """Somebody's stream: `count` batches of another shape and dtype, with a state of its own."""

    shape = (3, 2, 5)

    def __init__(self, dtype, count=7):
        self.dtype, self.count, self.made = dtype, count, 0

    def fill(self, out):
        assert out.dtype == self.dtype
        if self.made == self.count:
            raise StopIteration
        out[:] = np.arange(out.size).reshape(self.shape) + 100 * self.made
        self.made += 1

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = state["made"]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("dtype", "found"),
    [(np.int32, torch.int32), (np.int64, torch.int64), (np.float32, torch.float32), (np.uint16, torch.int64)],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_any_stream_of_any_dtype_is_handed_out_whole_and_ends(device, dtype, found, depth):
    expected = torch.arange(30).reshape(3, 2, 5)
    with Prefetcher(Counter(dtype), device=device, depth=depth) as batches:
        for number, batch in enumerate(batches):
            assert batch.dtype == found
            assert batch.device.type == device
            assert torch.equal(batch.cpu(), (expected + 100 * number).to(found))
        assert number == 6
        assert batches.state_dict() == {"made": 7}
        for _ in range(2):  # the end is still the end
            with pytest.raises(StopIteration):
                batches.next()
        batches.rewind({"made": 5})
        assert [int(batch[0, 0, 0]) for batch in batches] == [500, 600]


def test_a_dtype_without_a_tensor_is_refused():
    with pytest.raises(ConfigError, match="cannot become a tensor"):
        Prefetcher(Counter(np.dtype("U4")), device="cpu")
