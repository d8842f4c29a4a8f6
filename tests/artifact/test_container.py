"""The container: exact round trips, the same bytes every time, and nothing but ArtifactError for a file that is not whole."""

import hashlib
import json
import os
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbank.artifact.container import (
    FORMAT_VERSION,
    MAGIC,
    MAX_HEADER_BYTES,
    Artifact,
    decode_artifact,
    encode_artifact,
    is_artifact,
    read_artifact,
    write_artifact,
)
from parbank.errors import ArtifactError, FileError

META = {"kind": "model", "config": {"layers": 2, "rate": 0.5, "name": "é", "on": True, "none": None}}
SECTIONS = {"tokenizer": b"pieces", "weights/table": bytes(range(40)), "empty": b""}


def handmade(header: bytes, body: bytes = b"", *, version: int = FORMAT_VERSION) -> bytes:
    """A file with a right checksum over whatever header a hostile writer likes."""
    start = MAGIC + struct.pack("<II", version, len(header))
    return start + hashlib.blake2b(start + header, digest_size=16).digest() + header + body


def entry(name: str, offset: object, size: object, data: bytes = b"") -> dict[str, object]:
    return {"name": name, "offset": offset, "size": size, "checksum": hashlib.blake2b(data, digest_size=16).hexdigest()}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=50, deadline=None)
@given(
    meta=st.dictionaries(st.text(), json_values, max_size=4),
    sections=st.dictionaries(st.from_regex(r"\A[a-z0-9./_-]{1,20}\Z"), st.binary(max_size=50), max_size=4),
)
def test_round_trip_is_exact_and_ordered(meta, sections):
    artifact = decode_artifact(encode_artifact(meta, sections))
    assert artifact.meta == meta
    assert list(artifact.sections.items()) == list(sections.items())
    assert artifact.sizes == {name: len(data) for name, data in sections.items()}


def test_file_round_trip_reports_sizes(tmp_path: Path):
    path = tmp_path / "new" / "folder" / "model.pbk"
    size = write_artifact(path, META, SECTIONS)
    artifact = read_artifact(path)
    assert isinstance(artifact, Artifact)
    assert size == path.stat().st_size == artifact.size == artifact.header_size + 46
    assert (artifact.meta, artifact.sections, artifact.source) == (META, SECTIONS, str(path))
    assert os.listdir(path.parent) == ["model.pbk"]


def test_the_layout_is_the_documented_one():
    header = (
        b'{"meta":{"kind":"x"},"sections":[{"checksum":"%s","name":"a","offset":0,"size":2},'
        b'{"checksum":"%s","name":"b/c","offset":2,"size":1}]}'
    ) % tuple(hashlib.blake2b(data, digest_size=16).hexdigest().encode() for data in (b"hi", b"!"))
    assert encode_artifact({"kind": "x"}, {"a": b"hi", "b/c": b"!"}) == handmade(header, b"hi!")


def test_same_input_same_bytes():
    swapped = {"config": dict(reversed(META["config"].items())), "kind": "model"}
    assert encode_artifact(META, SECTIONS) == encode_artifact(swapped, dict(SECTIONS))


def test_every_flipped_byte_and_bit_is_refused():
    data = encode_artifact(META, SECTIONS)
    for index in range(len(data)):
        for mask in (0x01, 0x80, 0x20, 0xFF):  # 0x20 turns letters of the header's JSON into their other case
            damaged = bytearray(data)
            damaged[index] ^= mask
            with pytest.raises(ArtifactError, match=r"model\.pbk"):
                decode_artifact(bytes(damaged), source="model.pbk")


def test_every_truncation_and_any_tail_is_refused():
    data = encode_artifact(META, SECTIONS)
    for length in range(len(data)):
        with pytest.raises(ArtifactError, match=r"model\.pbk"):
            decode_artifact(data[:length], source="model.pbk")
    with pytest.raises(ArtifactError, match="bytes follow"):
        decode_artifact(data + b"\0")


@given(data=st.binary(max_size=200), magic=st.booleans())
def test_arbitrary_bytes_are_refused(data, magic):
    with pytest.raises(ArtifactError):
        decode_artifact((MAGIC + struct.pack("<I", FORMAT_VERSION) if magic else b"") + data)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_arbitrary_sound_headers_never_crash(data):
    """The checksum is right, the content is not: what is left is the reader's own care."""
    table = st.lists(
        st.fixed_dictionaries(
            {
                "name": st.sampled_from(["a", "b", "", "a b", 3, None]),
                "offset": st.sampled_from([0, 1, 4, -1, 2**70, 0.0, True, None, "0"]),
                "size": st.sampled_from([0, 4, 5, -4, 2**70, 4.0, False, None, []]),
                "checksum": st.sampled_from(
                    [entry("", 0, 4, b"body")["checksum"], entry("", 0, 0)["checksum"], "", None]
                ),
            }
        )
        | json_values,
        max_size=3,
    )
    header = data.draw(st.fixed_dictionaries({"meta": json_values, "sections": table | json_values}) | json_values)
    body = data.draw(st.sampled_from([b"", b"body"]))
    try:
        artifact = decode_artifact(handmade(json.dumps(header).encode(), body))
    except ArtifactError:
        return
    assert b"".join(artifact.sections.values()) == body


@pytest.mark.parametrize(
    ("table", "body"),
    [
        ([entry("a", 0, 4, b"body"), entry("a", 4, 0)], b"body"),  # the name twice
        ([entry("a", 0, 4, b"body"), entry("b", 0, 4, b"body")], b"body"),  # overlapping
        ([entry("a", 0, 4, b"body"), entry("b", 5, 3, b"ody")], b"body body"),  # a gap
        ([entry("a", 0, -4), entry("b", -4, 8)], b"body"),  # negative
        ([entry("a", 0, 2**62)], b"body"),  # far beyond the file
        ([entry("a", 0, True, b"b")], b"b"),  # a number only by Python's leave
        ([{"name": "a", "offset": 0, "size": 4}], b"body"),  # without a checksum
        ([{**entry("a", 0, 4, b"body"), "more": 1}], b"body"),  # with a field unknown
        ([], b"body"),  # bytes nobody listed
    ],
)
def test_bad_section_tables_are_refused(table, body):
    header = json.dumps({"meta": {}, "sections": table}).encode()
    with pytest.raises(ArtifactError, match="damaged"):
        decode_artifact(handmade(header, body))


@pytest.mark.parametrize(
    "header",
    [
        b'{"meta":{},"meta":{},"sections":[]}',
        b'{"meta":{"x":NaN},"sections":[]}',
        b'{"meta":{},"sections":[]',
        b'{"meta":[],"sections":[]}',
        b'{"meta":{}}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"meta":{"x":' + b"9" * 10_000 + b'},"sections":[]}',
    ],
)
def test_bad_headers_are_refused(header):
    with pytest.raises(ArtifactError, match="damaged"):
        decode_artifact(handmade(header))


def test_claimed_sizes_are_checked_before_memory_is_asked_for(tmp_path: Path):
    path = tmp_path / "bomb.pbk"
    claims = [
        MAGIC + struct.pack("<II", FORMAT_VERSION, 2**32 - 1) + bytes(16),
        handmade(json.dumps({"meta": {}, "sections": [entry("a", 0, 2**40)]}).encode()),
    ]
    for data in claims:
        path.write_bytes(data)
        tracemalloc.start()
        with pytest.raises(ArtifactError, match=r"bomb\.pbk"):
            read_artifact(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20


def test_header_limit_holds_for_reader_and_writer():
    with pytest.raises(ArtifactError, match="header"):
        encode_artifact({"text": "x" * MAX_HEADER_BYTES}, {})
    large = json.dumps({"meta": {"text": "x" * MAX_HEADER_BYTES}, "sections": []}).encode()
    with pytest.raises(ArtifactError, match="header"):
        decode_artifact(handmade(large))


def test_what_is_no_artifact_is_refused_by_name(tmp_path: Path):
    zipped, empty, newer = tmp_path / "other.zip", tmp_path / "empty.pbk", tmp_path / "newer.pbk"
    zipped.write_bytes(b"PK\x03\x04" + bytes(100))
    empty.write_bytes(b"")
    newer.write_bytes(handmade(b"{}", version=FORMAT_VERSION + 1))
    for path, reason in [
        (zipped, "not a parbank artifact"),
        (empty, "empty"),
        (newer, f"version {FORMAT_VERSION + 1}.*upgrade"),
        (tmp_path / "missing.pbk", "does not exist"),
        (tmp_path, "folder"),
    ]:
        with pytest.raises(ArtifactError, match=reason) as caught:
            read_artifact(path)
        assert str(path) in str(caught.value)
    with pytest.raises(ArtifactError, match="path"):
        read_artifact("bad\0path")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_named_pipe_is_refused_without_waiting(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.pbk")
    with pytest.raises(ArtifactError, match="regular file"):
        read_artifact(tmp_path / "pipe.pbk")
    assert not is_artifact(tmp_path / "pipe.pbk")


def test_is_artifact_looks_at_the_magic_only(tmp_path: Path):
    path = tmp_path / "model.pbk"
    write_artifact(path, META, SECTIONS)
    assert is_artifact(path)
    path.write_bytes(MAGIC + b"then nothing of use")
    assert is_artifact(path)
    path.write_bytes(b"text")
    assert not is_artifact(path)
    assert not is_artifact(tmp_path)
    assert not is_artifact(tmp_path / "missing")


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path):
    target = tmp_path / "model.pbk"
    target.mkdir()
    (target / "kept").write_text("kept")
    with pytest.raises(FileError, match="cannot write"):  # the rename onto a folder fails after the data is written
        write_artifact(target, META, SECTIONS)
    assert os.listdir(tmp_path) == ["model.pbk"]
    assert (target / "kept").read_text() == "kept"
    with pytest.raises(FileError, match="cannot write"):  # a file where the folder should be
        write_artifact(target / "kept" / "model.pbk", META, SECTIONS)


def test_a_write_replaces_the_old_file_whole(tmp_path: Path):
    path = tmp_path / "model.pbk"
    write_artifact(path, META, {"a": bytes(1000)})
    with open(path, "rb") as old:  # a reader that has the old file open keeps the old file
        write_artifact(path, META, {"a": b"new"})
        assert decode_artifact(old.read()).sections["a"] == bytes(1000)
    assert read_artifact(path).sections["a"] == b"new"


@pytest.mark.parametrize(
    "meta", [{"x": float("nan")}, {"x": float("inf")}, {"x": {1, 2}}, {"x": b"bytes"}, {1: 2, "a": 3}]
)
def test_meta_that_is_not_json_is_refused(meta):
    with pytest.raises(ArtifactError, match="plain JSON"):
        encode_artifact(meta, {})


@pytest.mark.parametrize("name", ["", "with space", "é", "x" * 201, "line\n"])
def test_section_names_are_plain(name):
    with pytest.raises(ArtifactError, match="section name"):
        encode_artifact({}, {name: b""})
