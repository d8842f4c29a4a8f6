"""Shard files keep the public layout, damaged ones are refused by name, and several read as one stream."""

import hashlib
import itertools
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbank.data.shards import ShardWriter, TokenSet, read_shard, read_shards, write_shard
from parbank.errors import DataError


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "x_train_000000.bin"
    write_shard(path, np.arange(500, dtype=np.uint16))
    return path


def patch(path: Path, position: int, value: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(value.to_bytes(4, "little"))


def test_layout_is_the_public_one(shard: Path) -> None:
    raw = shard.read_bytes()
    header = np.frombuffer(raw[:1024], dtype="<i4")
    assert header[:3].tolist() == [20240520, 1, 500]
    assert not header[3:].any()
    assert raw[1024:] == np.arange(500, dtype="<u2").tobytes()
    assert list(shard.parent.iterdir()) == [shard]  # no temporary file left


def test_round_trip(shard: Path) -> None:
    tokens = read_shard(shard, vocab_size=500)
    assert tokens[:].dtype == np.uint16
    assert tokens[:].tolist() == np.array(tokens).tolist() == list(range(500))
    assert tokens[490:600].tolist() == list(range(490, 500))
    assert tokens[7:7].tolist() == []
    assert pickle.loads(pickle.dumps(tokens))[3:5].tolist() == [3, 4]


def test_a_shard_cut_short_while_it_is_read_is_an_error(shard: Path) -> None:
    tokens = read_shard(shard, vocab_size=500)
    os.truncate(shard, 1024 + 2 * 100)
    assert tokens[:100].tolist() == list(range(100))
    with pytest.raises(DataError, match=f"{re.escape(str(shard))} was cut short while it was read: 500 tokens"):
        tokens[90:110]


def refused(path: Path, why: str, vocab_size: int = 500) -> None:
    with pytest.raises(DataError, match=f"{re.escape(str(path))}.*{why}"):
        read_shard(path, vocab_size=vocab_size)


def test_damage_is_refused_by_name(shard: Path, tmp_path: Path) -> None:
    whole = shard.read_bytes()
    patch(shard, 0, 20240521)
    refused(shard, "its magic is 20240521, expected 20240520")
    shard.write_bytes(whole)
    patch(shard, 4, 2)
    refused(shard, "version 2, only version 1")
    shard.write_bytes(whole[:-1])
    refused(shard, "cut short: 2023 bytes")
    shard.write_bytes(whole + b"\0\0")
    refused(shard, "too long: 2026 bytes")
    shard.write_bytes(whole[:1000])
    refused(shard, "not a token shard: 1000 bytes")
    shard.write_bytes(whole[:1001])
    refused(shard, "")
    patch(shard, 8, 0)
    shard.write_bytes(whole[:8] + bytes(4) + whole[12:1024])
    refused(shard, "holds 0 tokens")
    shard.write_bytes(whole)
    refused(shard, "holds token 499, but the tokenizer has 499 tokens", vocab_size=499)
    refused(tmp_path / "none.bin", "No such file")
    refused(tmp_path, "")


def test_tokens_that_do_not_fit_are_not_written(tmp_path: Path) -> None:
    for bad in (65536, -1):
        with pytest.raises(DataError, match="0 to 65535"):
            write_shard(tmp_path / "x.bin", np.array([1, bad]))
    assert not list(tmp_path.iterdir())


@settings(max_examples=100, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_stream_reads_across_shard_edges(data: st.DataObject, sizes: list[int]) -> None:
    edges = np.cumsum([0, *sizes])
    everything = np.arange(edges[-1], dtype=np.uint16)
    stream = TokenSet([everything[a:b] for a, b in itertools.pairwise(edges)])
    assert len(stream) == len(everything)
    start = data.draw(st.integers(0, len(everything)))
    count = data.draw(st.integers(0, len(everything) - start))
    assert stream.read(start, count).tolist() == everything[start : start + count].tolist()
    out = np.full(count, -1, dtype=np.int64)
    assert stream.read(start, count, out) is out
    assert out.tolist() == everything[start : start + count].tolist()


def test_stream_refuses_what_is_outside(shard: Path) -> None:
    stream = read_shards([shard, shard], vocab_size=500)
    assert len(stream) == 1000
    for start, count in ((-1, 2), (0, 1001), (1000, 1)):
        with pytest.raises(IndexError):
            stream.read(start, count)
    with pytest.raises(ValueError, match="shape"):
        stream.read(0, 3, np.empty(4))


@pytest.mark.parametrize("pieces", [[3, 4], [0, 7, 7], [20], [1] * 15])
def test_writer_fills_shards_in_turn(tmp_path: Path, pieces: list[int]) -> None:
    everything = np.arange(sum(pieces), dtype=np.uint16)
    with ShardWriter(tmp_path, "t_val", shard_tokens=7) as writer:
        for a, b in zip(np.cumsum([0, *pieces]), np.cumsum(pieces)):
            writer.append(everything[a:b])
        written = writer.close()
    paths = [tmp_path / info.name for info in written]
    assert paths == sorted(tmp_path.glob("t_val_00000?.bin"))
    assert [info.tokens for info in written[:-1]] == [7] * (len(written) - 1)
    stream = read_shards(paths, vocab_size=100)
    assert stream.read(0, len(stream)).tolist() == everything.tolist()
    shards = [everything[start : start + 7].astype("<u2") for start in range(0, len(everything), 7)]
    assert [info.sha256 for info in written] == [hashlib.sha256(shard.tobytes()).hexdigest() for shard in shards]
