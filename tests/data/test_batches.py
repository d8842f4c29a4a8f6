"""The order of tokens: each once an epoch, fixed by the seed, the same global batch for any ranks, exact resume."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbank.data.batches import BatchStream
from parbank.data.orders import ORDERS, Visits
from parbank.data.shards import TokenSet
from parbank.data.windows import CircleWindows, PackedWindows
from parbank.errors import ConfigError, DataError


class ArrayTokens:
    """Tokens in memory, as strict about its bounds as a set of shards."""

    def __init__(self, array):
        self.array = np.asarray(array, dtype=np.uint16)

    def __len__(self):
        return len(self.array)

    def read(self, start, count, out=None):
        assert 0 <= start <= start + count <= len(self.array)
        piece = self.array[start : start + count]
        if out is None:
            return piece.copy()
        assert out.shape == (count,)
        out[:] = piece
        return out


def counting(count):
    """Token i is the number i: a batch then says where each of its tokens came from."""
    return ArrayTokens(np.arange(count))


def take(stream):
    out = np.full(stream.shape, 65535, dtype=np.uint16)
    stream.fill(out)
    return out


def take_step(tokens, step_count=1, *, world=1, states=None, **options):
    """`step_count` global batches as the ranks see them together, in the order entries are dealt: (sequences, L+1)."""
    streams = [BatchStream(tokens, rank=rank, world=world, **options) for rank in range(world)]
    for stream in streams:
        if states is not None:
            stream.load_state_dict(states)
    rounds = step_count * streams[0].accumulation
    nothing = np.empty((0, streams[0].shape[1]), dtype=np.uint16)
    batches = [take(stream) for _ in range(rounds) for stream in streams]
    return np.concatenate([nothing, *batches]), streams[0].state_dict()


def windows_in(epochs, count, length):
    """Windows that start inside the first `epochs` rounds of the circle."""
    return -(-epochs * count // length)


sizes = st.tuples(st.integers(1, 12), st.integers(0, 60)).map(lambda pair: (pair[0], pair[0] + 1 + pair[1]))


@settings(deadline=None)
@given(sizes, st.integers(1, 4), st.integers(0, 2**40))
def test_every_token_is_a_target_once_an_epoch(size, epochs, seed):
    length, count = size
    stream = BatchStream(counting(count), sequence_length=length, batch_sequences=1, micro_sequences=1, seed=seed)
    seen = np.zeros(count, dtype=int)
    for epoch in range(1, epochs + 1):
        for _ in range(windows_in(epoch, count, length) - windows_in(epoch - 1, count, length)):
            row = take(stream)[0].astype(int)
            assert (row[1:] == (row[:-1] + 1) % count).all()  # a target is the token after its input
            np.add.at(seen, row[1:], 1)
        # All windows of the epochs so far tile the circle's rounds, and the last one may reach into the next round:
        # targets are the virtual positions 1 .. windows * length, each once.
        expected = np.bincount(np.arange(1, windows_in(epoch, count, length) * length + 1) % count, minlength=count)
        assert (seen == expected).all()
        assert seen.min() == epoch
        if epoch * count % length == 0:
            assert (seen == epoch).all()


@pytest.mark.parametrize(("count", "length"), [(64, 8), (65, 8), (63, 8), (9, 8), (1001, 7), (2, 1), (4096, 64)])
def test_named_sizes_see_every_token_once_an_epoch(count, length):
    """After `length` epochs the windows always end where the circle ends, so there the count is exact for any sizes."""
    stream = BatchStream(counting(count), sequence_length=length, batch_sequences=1, micro_sequences=1)
    seen = np.zeros(count, dtype=int)
    for _ in range(count):  # count windows of `length` targets = `length` rounds
        np.add.at(seen, take(stream)[0, 1:], 1)
    assert (seen == length).all()


def test_the_order_is_shuffled_and_each_epoch_has_its_own():
    stream = BatchStream(counting(800), sequence_length=8, batch_sequences=100, micro_sequences=100)
    first, second = take(stream)[:, 0], take(stream)[:, 0]
    assert sorted(first) == sorted(second) == list(range(0, 800, 8))
    assert (first != second).sum() > 50
    assert (first != np.arange(0, 800, 8)).sum() > 50


def test_the_order_follows_from_the_seed():
    options = {"sequence_length": 8, "batch_sequences": 50, "micro_sequences": 10}
    one, _ = take_step(counting(805), 5, seed=7, **options)
    again, _ = take_step(counting(805), 5, seed=7, **options)
    other, _ = take_step(counting(805), 5, seed=8, **options)
    assert (one == again).all()
    assert (one != other).any(axis=1).sum() > 200


def test_seed_and_epoch_are_not_confused():
    """Packed into one list of words, (seed 1, epoch 5) and (seed 1 + 5 * 2**32, epoch 0) would draw the same order."""
    options = {"sequence_length": 8, "batch_sequences": 100, "micro_sequences": 100}
    late, _ = take_step(counting(800), 6, seed=1, **options)
    early, _ = take_step(counting(800), 1, seed=1 + 5 * 2**32, **options)
    assert (late[-100:] != early).any()


def test_the_order_never_changes_between_releases():
    """Written down once: a checkpoint made before an upgrade must go on with the same batches after it."""
    batch, state = take_step(counting(100), 2, sequence_length=8, batch_sequences=8, micro_sequences=8, seed=3)
    assert batch[:, 0].tolist() == [88, 32, 48, 8, 40, 56, 0, 24, 96, 64, 72, 16, 80, 76, 4, 52]
    assert state["fingerprint"] == "3a7a193db7bc7900"


@settings(deadline=None)
@given(sizes, st.sampled_from([4, 8, 24]), st.integers(0, 5))
def test_the_global_batch_is_the_same_for_any_ranks_and_micro_batches(size, batch, seed):
    length, count = size
    common = {"sequence_length": length, "batch_sequences": batch, "seed": seed}
    alone, state = take_step(counting(count), 3, micro_sequences=batch, **common)
    for world in (1, 2, 4):
        for micro in [m for m in (1, 2, 3, 6) if batch % (m * world) == 0]:
            together, same = take_step(counting(count), 3, micro_sequences=micro, world=world, **common)
            assert (alone == together).all()
            assert same == state


def test_ranks_are_disjoint_and_cover_the_batch():
    tokens = counting(3200)
    streams = [
        BatchStream(tokens, sequence_length=8, batch_sequences=16, micro_sequences=2, rank=rank, world=4)
        for rank in range(4)
    ]
    assert streams[0].accumulation == 2
    seen = [{int(row[0]) for _ in range(50) for row in take(stream)} for stream in streams]  # 25 steps: one epoch
    assert sum(map(len, seen)) == len(set.union(*seen)) == 400


@settings(deadline=None)
@given(sizes, st.integers(0, 5), st.sampled_from([(1, 12), (2, 3), (4, 1)]), st.sampled_from([(1, 4), (2, 6), (4, 3)]))
def test_a_saved_state_continues_with_the_exact_next_batch_on_other_ranks(size, steps, before, after):
    length, count = size
    common = {"sequence_length": length, "batch_sequences": 12, "seed": 11}
    whole, _ = take_step(counting(count), steps + 3, micro_sequences=12, **common)
    _, state = take_step(counting(count), steps, world=before[0], micro_sequences=before[1], **common)
    state = json.loads(json.dumps(state))
    rest, _ = take_step(counting(count), 3, world=after[0], micro_sequences=after[1], states=state, **common)
    assert (whole[steps * 12 :] == rest).all()


def test_a_state_saved_inside_a_step_continues_exactly():
    options = {"sequence_length": 4, "batch_sequences": 12, "micro_sequences": 2}
    stream = BatchStream(counting(50), **options)
    for _ in range(8):  # one step of six, and two micro-batches
        take(stream)
    state = stream.state_dict()
    expected = np.concatenate([take(stream) for _ in range(4)])
    other = BatchStream(counting(50), sequence_length=4, batch_sequences=12, micro_sequences=4)
    other.load_state_dict(state)
    assert (np.concatenate([take(other), take(other)]) == expected).all()
    assert other.state_dict() == stream.state_dict()


@pytest.mark.parametrize("layout", [(12, 3), (12, 6), (24, 2)])
def test_a_state_inside_a_step_is_refused_where_the_step_could_not_be_finished(layout):
    batch, micro = layout
    stream = BatchStream(counting(50), sequence_length=4, batch_sequences=12, micro_sequences=2)
    take(stream)
    other = BatchStream(counting(50), sequence_length=4, batch_sequences=batch, micro_sequences=micro)
    with pytest.raises(DataError, match=r"2 of its 12 sequences in.*between steps"):
        other.load_state_dict(stream.state_dict())
    assert other.state_dict()["entry"] == 0


def test_the_batch_size_may_change_between_steps():
    first, state = take_step(counting(90), 1, sequence_length=4, batch_sequences=6, micro_sequences=6)
    second, _ = take_step(counting(90), 1, sequence_length=4, batch_sequences=9, micro_sequences=3, states=state)
    whole, _ = take_step(counting(90), 1, sequence_length=4, batch_sequences=15, micro_sequences=15)
    assert (np.concatenate([first, second]) == whole).all()


def test_a_state_of_another_stream_is_refused():
    base = {"sequence_length": 8, "batch_sequences": 4, "micro_sequences": 4, "seed": 1}
    state = BatchStream(counting(100), **base).state_dict()
    longer = BatchStream(counting(101), **base)
    edited = BatchStream(ArrayTokens(np.arange(100)[::-1]), **base)
    reseeded = BatchStream(counting(100), **{**base, "seed": 2})
    shorter = BatchStream(counting(100), **{**base, "sequence_length": 4})
    for stream, words in [
        (longer, "number of training tokens was 100, here it is 101"),
        (edited, "fingerprint of the training tokens was"),
        (reseeded, "the seed was 1, here it is 2"),
        (shorter, "sequence length was 8, here it is 4"),
    ]:
        before = stream.state_dict()
        with pytest.raises(DataError, match=words + r".*; resume with .* or start a new run"):
            stream.load_state_dict(state)
        assert stream.state_dict() == before


@pytest.mark.parametrize(
    "damage", [None, [], {}, {"entry": -1}, {"entry": "5"}, {"entry": 1.5}, {"entry_in_step": 3}, {"seed": None}]
)
def test_what_is_no_state_is_refused(damage):
    stream = BatchStream(counting(100), sequence_length=8, batch_sequences=4, micro_sequences=4)
    state = {**stream.state_dict(), **damage} if isinstance(damage, dict) and damage else damage
    with pytest.raises(DataError, match="not a data position"):
        stream.load_state_dict(state)


def test_too_few_tokens_for_one_sequence():
    with pytest.raises(DataError, match=r"8 tokens are too few.*at least 9.*at most 7"):
        BatchStream(counting(8), sequence_length=8, batch_sequences=1, micro_sequences=1)
    BatchStream(counting(9), sequence_length=8, batch_sequences=1, micro_sequences=1)


@pytest.mark.parametrize(
    ("batch", "micro", "world", "remedy"),
    [
        (10, 4, 1, "set the batch to 8 or 12 sequences, or the micro-batch to 2"),
        (8, 3, 2, "set the batch to 6 or 12 sequences, or the micro-batch to 2"),
        (8, 16, 1, "set the batch to 16 sequences, or the micro-batch to 8"),
        (9, 1, 2, "set the batch to 8 or 10 sequences, or run on a number of ranks that divides 9"),
    ],
)
def test_a_batch_that_does_not_split_is_refused_with_what_would(batch, micro, world, remedy):
    with pytest.raises(ConfigError, match=remedy):
        BatchStream(counting(99), sequence_length=8, batch_sequences=batch, micro_sequences=micro, world=world)


@pytest.mark.parametrize(
    "wrong",
    [{"sequence_length": 0}, {"batch_sequences": 0}, {"micro_sequences": 0}, {"rank": 1}, {"rank": -1}, {"seed": -1}],
)
def test_settings_out_of_range_are_refused(wrong):
    good = {"sequence_length": 8, "batch_sequences": 4, "micro_sequences": 4}
    with pytest.raises(ConfigError):
        BatchStream(counting(99), **{**good, **wrong})


@pytest.mark.parametrize(("shape", "dtype"), [((4, 8), np.uint16), ((2, 9), np.uint16), ((4, 9), np.int64)])
def test_a_buffer_of_another_form_is_refused(shape, dtype):
    stream = BatchStream(counting(99), sequence_length=8, batch_sequences=4, micro_sequences=4)
    with pytest.raises(DataError, match=r"uint16 buffer of shape \(4, 9\)"):
        stream.fill(np.empty(shape, dtype=dtype))


def test_after_a_failed_read_the_stream_stands_at_the_same_batch():
    class Flaky(ArrayTokens):
        broken = False

        def read(self, start, count, out=None):
            if self.broken and start > 40:
                raise OSError("the disk went away")
            return super().read(start, count, out)

    tokens = Flaky(np.arange(80))
    options = {"sequence_length": 8, "batch_sequences": 10, "micro_sequences": 10}
    stream = BatchStream(tokens, **options)
    tokens.broken = True
    with pytest.raises(OSError, match="went away"):
        take(stream)
    tokens.broken = False
    assert (take(stream) == take(BatchStream(counting(80), **options))).all()


def test_windows_read_across_the_edges_of_shards():
    pieces = np.split(np.arange(1000, dtype=np.uint16), [3, 4, 500, 501, 990])
    options = {"sequence_length": 17, "batch_sequences": 60, "micro_sequences": 20, "seed": 5}
    sharded, state = take_step(TokenSet(pieces), 3, **options)
    whole, same = take_step(counting(1000), 3, **options)
    assert (sharded == whole).all()
    assert state == same


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("windows", [1, 2, 97])
def test_every_order_is_a_permutation_and_the_same_again(name, windows):
    first, again = (ORDERS[name](counting(80), 8, 1).permute(windows, 3, 1) for _ in range(2))
    assert sorted(first.tolist()) == list(range(windows))
    assert np.array_equal(first, again)


def test_contiguous_windows_come_as_they_lie():
    options = {"sequence_length": 4, "batch_sequences": 2, "micro_sequences": 2, "order": "contiguous"}
    stream = BatchStream(counting(20), **options)
    assert take(stream)[:, 0].tolist() == [0, 4]
    assert take(stream)[:, 0].tolist() == [8, 12]


def test_a_registered_order_is_used(monkeypatch):
    """Also one that cuts windows of its own, and one that reads the text: nothing outside its function knows of it."""

    def by_documents(tokens, length, bos_id):
        text = tokens.read(0, len(tokens))
        return Visits(
            PackedWindows(tokens, length, bos_id), lambda windows, seed, epoch: np.argsort(text[:windows])[::-1]
        )

    def backwards(tokens, length, bos_id):
        return Visits(CircleWindows(tokens, length), lambda windows, seed, epoch: np.arange(windows)[::-1])

    monkeypatch.setitem(ORDERS, "backwards", backwards)
    monkeypatch.setitem(ORDERS, "by documents", by_documents)
    options = {"sequence_length": 4, "batch_sequences": 5, "micro_sequences": 5}
    assert take(BatchStream(counting(20), **options, order="backwards"))[:, 0].tolist() == [16, 12, 8, 4, 0]
    found = take(BatchStream(counting(20), **options, order="by documents", bos_id=10))
    assert 10 in found[:, 0].tolist(), "a window begins with the second document"


def test_a_state_of_another_order_is_refused_and_one_without_a_name_is_shuffled():
    options = {"sequence_length": 4, "batch_sequences": 2, "micro_sequences": 2}
    shuffled, contiguous = (BatchStream(counting(20), **options, order=order) for order in ("shuffled", "contiguous"))
    take(shuffled)
    state = shuffled.state_dict()
    with pytest.raises(DataError, match="the order of the windows was shuffled, here it is contiguous"):
        contiguous.load_state_dict(state)
    del state["order"]  # as checkpoints were before orders had names
    again = BatchStream(counting(20), **options)
    again.load_state_dict(state)
    assert np.array_equal(take(again), take(shuffled))
    with pytest.raises(ConfigError, match="must be one of shuffled, contiguous, packed, hard_first, got 'random'"):
        BatchStream(counting(20), **options, order="random")
