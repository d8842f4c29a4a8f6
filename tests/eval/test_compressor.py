"""The compressor: the same bytes back, a size that is the score, and a refusal wherever something is not as it was."""

import io
import lzma
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parbank.artifact.load import LoadedModel
from parbank.data.dataset import open_dataset
from parbank.data.tokenizer import Tokenizer
from parbank.errors import ArtifactError, ConfigError, FileError, ParbankError
from parbank.eval.compressor import archive, blocks, container, identity
from parbank.eval.compressor.archive import compress, decompress
from parbank.eval.compressor.blocks import BlockWriter
from parbank.eval.compressor.coder import PRECISION, TokenCoder, make_weights
from parbank.eval.compressor.container import (
    ContentBlock,
    Header,
    read_blocks,
    read_header,
    write_block,
    write_end,
    write_header,
)
from parbank.eval.compressor.pieces import PIECE, NotTokens, is_text, read_pieces, to_tokens
from tests.data.test_tokenizer import train_foreign
from tests.eval.test_score import make_model

CONTEXT = 16
CONTENTS = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200).map(lambda text: text.encode("utf-8")),
    st.text("ab \n\u2581\x00é", max_size=80).map(lambda text: text.encode("latin-1", errors="replace")),
)


@pytest.fixture(scope="module")
def loaded(text_spec: str) -> LoadedModel:
    tokenizer = open_dataset(text_spec, vocab_size=320, say=lambda line: None).tokenizer
    return make_loaded(tokenizer)


def make_loaded(tokenizer: Tokenizer, seed: int = 3) -> LoadedModel:
    return LoadedModel(
        model=make_model(seed), tokenizer=tokenizer, context=CONTEXT, data=None, meta={}, source=Path("m.pbk")
    )


@pytest.fixture
def some_text(text_spec: str) -> bytes:
    folder = Path(text_spec.partition("val=")[2].partition(",")[0])
    return b"".join(sorted(path.read_bytes() for path in folder.iterdir()))[:1200]


def round_trip(
    loaded: LoadedModel, contents: list[bytes], folder: Path, segments: int | None = None, always_model: bool = True
) -> list[bytes]:
    sources = [folder / f"file {number}" for number in range(len(contents))]
    for path, content in zip(sources, contents):
        path.write_bytes(content)
    out = folder / "out.pbz"
    out.unlink(missing_ok=True)
    compress(sources, loaded, out, segments=segments, always_model=always_model)
    target = folder / "back"
    found = [path.read_bytes() for path in decompress(out, loaded, target)]
    for path in target.iterdir():
        path.unlink()
    return found


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(CONTENTS, min_size=1, max_size=3), segments=st.sampled_from([None, 1, 5]), model=st.booleans())
def test_any_bytes_come_back(
    loaded: LoadedModel, tmp_path: Path, contents: list[bytes], segments: int | None, model: bool
) -> None:
    """tests/integrations has 500 examples."""
    assert round_trip(loaded, contents, tmp_path, segments, model) == contents


def test_text_that_the_model_would_make_larger_is_stored_by_xz(
    loaded: LoadedModel, some_text: bytes, tmp_path: Path
) -> None:
    dull = b"the same line\n" * 400
    said: list[str] = []
    (tmp_path / "dull").write_bytes(dull)
    (tmp_path / "short").write_bytes(some_text[:40])
    written = compress([tmp_path / "dull"], loaded, tmp_path / "a.pbz", say=said.append)
    assert said == ["note: 5,600 bytes of text are stored by xz: the model would have made them larger"]
    assert written.size < len(lzma.compress(dull)) + 500
    assert (written.tally.tokens, written.tally.by_model, written.tally.coded) == (0, 0, 0), "no score of the model's"
    by_model = compress([tmp_path / "dull"], loaded, tmp_path / "b.pbz", always_model=True)
    assert by_model.size > 5 * written.size
    for name in ("a", "b"):
        assert decompress(tmp_path / f"{name}.pbz", loaded, tmp_path / name)[0].read_bytes() == dull
    assert compress([tmp_path / "short"], loaded, tmp_path / "c.pbz").tally.by_model == 40, "xz has a head of its own"


def test_names_of_255_bytes_come_back(loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / ("n" * 255)).write_bytes(b"text")
    compress([tmp_path / ("n" * 255)], loaded, tmp_path / "a.pbz")
    (path,) = decompress(tmp_path / "a.pbz", loaded, tmp_path / "back")
    assert (path.name, path.read_bytes()) == ("n" * 255, b"text")


@pytest.mark.parametrize("segments", [3, 7])
def test_the_size_is_the_score(loaded: LoadedModel, some_text: bytes, tmp_path: Path, segments: int) -> None:
    (tmp_path / "a.txt").write_bytes(some_text)
    written = compress([tmp_path / "a.txt"], loaded, tmp_path / "a.pbz", segments=segments, always_model=True)
    assert written.size == (tmp_path / "a.pbz").stat().st_size
    assert written.tally.by_model == len(some_text)
    assert written.tally.lanes == {segments}
    assert 0 <= 8 * written.tally.coded - written.tally.bits <= 64 + 0.001 * written.tally.bits  # two words end it
    assert written.overhead < 600


def test_the_score_of_one_segment_is_the_streaming_score(loaded: LoadedModel, some_text: bytes) -> None:
    from parbank.data.shards import TokenSet
    from parbank.eval.methods import make_method
    from parbank.runtime import Runtime

    tokens = loaded.tokenizer.encode(some_text.decode())[:150]
    _, bits = TokenCoder(loaded.model, CONTEXT).encode(tokens, 1)
    text = np.concatenate([np.array([loaded.tokenizer.bos_id], np.uint16), tokens])
    method = make_method("streaming", context=CONTEXT)
    scored = method.score(loaded.model, TokenSet([text]), Runtime(device=torch.device("cpu")))
    assert bits == pytest.approx(scored.total(loaded.tokenizer).bits, rel=1e-5)


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 1e4])
def test_weights_are_whole_and_sum_exactly(spread: float) -> None:
    weights, _ = make_weights(spread * torch.randn(50, 320, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(weights, weights.floor())
    assert bool((weights >= 0).all())
    assert weights.double().sum(-1).tolist() == [(1 << PRECISION) - 320] * 50


def make_file(loaded: LoadedModel, folder: Path, content: bytes = b"def main():\n    return 1\n" * 9) -> Path:
    (folder / "a.txt").write_bytes(content)
    compress([folder / "a.txt"], loaded, folder / "a.pbz", segments=2, always_model=True)
    return folder / "a.pbz"


def test_damage_anywhere_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    whole = make_file(loaded, tmp_path).read_bytes()
    broken = tmp_path / "broken.pbz"
    places = np.random.default_rng(0).choice(len(whole), 40, replace=False)
    cases = [bytes([*whole[:at], whole[at] ^ 0x10, *whole[at + 1 :]]) for at in places.tolist()]
    cases += [whole[:end] for end in (0, 5, 19, 40, len(whole) // 2, len(whole) - 1)] + [whole + b"x"]
    for case in cases:
        broken.write_bytes(case)
        with pytest.raises(ArtifactError, match=r"damaged|not written by|has format"):
            decompress(broken, loaded, tmp_path / "back")
        assert not list((tmp_path / "back").glob("*"))


def test_another_model_is_refused_by_its_hash(loaded: LoadedModel, tmp_path: Path) -> None:
    """Before anything is written, even an empty file."""
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("some text", encoding="utf-8")
    path = tmp_path / "both.pbz"
    compress([tmp_path / "empty", tmp_path / "text"], loaded, path)
    with pytest.raises(ArtifactError, match="compressed with another model"):
        decompress(path, make_loaded(loaded.tokenizer, seed=4), tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_other_arithmetic_is_found_out(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another machine: the right model, by its hash, gives other digits."""
    path, other = make_file(loaded, tmp_path), make_loaded(loaded.tokenizer, seed=4)
    monkeypatch.setattr(archive, "hash_model", lambda model: identity.hash_model(loaded))
    monkeypatch.setattr(archive, "describe_machine", lambda device: {"torch": "0.1"})
    said: list[str] = []
    with pytest.raises(ArtifactError, match=r"cannot be decoded here.*0\.1 here"):
        decompress(path, other, tmp_path / "back", say=said.append)
    assert "made elsewhere" in said[0]
    assert not list((tmp_path / "back").iterdir())


Change = Callable[[Header, ContentBlock], tuple[Header, ContentBlock]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda header, block: (header, replace(block, payload=b"\xff" * len(block.payload))),
            "cannot be decoded here",
        ),
        (lambda header, block: (header, replace(block, payload=bytes(len(block.payload)))), "cannot be decoded here"),
        (lambda header, block: (header, replace(block, payload=b"")), "cannot be decoded here"),
        (
            lambda header, block: (header, replace(block, payload=block.payload + b"x")),
            "damaged: a block of 2 segments",
        ),
        (lambda header, block: (header, replace(block, lanes=3)), "cannot be decoded here"),
        (lambda header, block: (header, replace(block, lanes=5000, tokens=9000)), "damaged: a block of 5000 segments"),
        (lambda header, block: (replace(header, context=30_000), block), "a window of 30,000 tokens, and m.pbk has 16"),
    ],
)
def test_a_false_file_with_sound_checksums_is_refused(
    loaded: LoadedModel, tmp_path: Path, change: Change, message: str
) -> None:
    """A decoder with other digits meets the same: the coder finds no token, or other ones. Nothing large is allocated."""
    with open(make_file(loaded, tmp_path), "rb") as file:
        header = read_header(file, "it")
        (block,) = read_blocks(file, header.files[0][1], "it")
    header, block = change(header, block)
    with open(tmp_path / "false.pbz", "wb") as file:
        write_header(file, header)
        write_block(file, block)
        write_end(file)
    with pytest.raises(ArtifactError, match=message):
        decompress(tmp_path / "false.pbz", loaded, tmp_path / "back")
    assert not list((tmp_path / "back").glob("*"))


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a\0b", ".", "..", "a\ud800"])
def test_an_unsafe_name_is_refused(loaded: LoadedModel, tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.pbz"
    with open(path, "wb") as file:
        header = archive.make_header(loaded, [(name, 0)])
        write_header(file, header)
        write_end(file)
    with pytest.raises(ArtifactError, match="unsafe name"):
        decompress(path, loaded, tmp_path / "back")


def test_nothing_is_overwritten_and_no_link_leads_out(loaded: LoadedModel, tmp_path: Path) -> None:
    path = make_file(loaded, tmp_path)
    with pytest.raises(FileError, match="nothing is overwritten"):
        compress([tmp_path / "a.txt"], loaded, path)
    with pytest.raises(FileError, match=r"a\.txt exists, and nothing is overwritten"):
        decompress(path, loaded, tmp_path)
    (tmp_path / "nowhere.pbz").symlink_to(tmp_path / "missing")
    with pytest.raises(FileError, match=r"nowhere\.pbz exists"):
        compress([tmp_path / "a.txt"], loaded, tmp_path / "nowhere.pbz")
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "d").symlink_to(tmp_path)
    with open(tmp_path / "link.pbz", "wb") as file:
        write_header(file, archive.make_header(loaded, [("d/x", 0)]))
        write_end(file)
    with pytest.raises(ArtifactError, match="through a link"):
        decompress(tmp_path / "link.pbz", loaded, tmp_path / "back")


def test_names_stay_relative_and_may_be_of_any_script(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["日本 語/ü.txt", "plain", os.fsdecode(b"latin-\xe9")]
    for name in names:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(os.fsencode(name))
    given = [Path(names[0]), Path(names[1]).absolute(), Path(names[2])]
    compress(given, loaded, Path("out.pbz"))
    assert decompress(Path("out.pbz"), loaded, Path("back")) == [Path("back") / name for name in names]
    for name in names:
        assert (Path("back") / name).read_bytes() == os.fsencode(name)
    with pytest.raises(ConfigError, match="would both be named 'plain'"):
        archive.name_files([Path("plain"), Path("plain").absolute()])
    with pytest.raises(ConfigError, match="is a folder; give files"):
        archive.name_files([Path("back")])
    with pytest.raises(ConfigError, match="cannot read missing"):
        archive.name_files([Path("missing")])
    with pytest.raises(ConfigError, match="/dev/null is no regular file; write its content to a file first"):
        archive.name_files([Path("/dev/null")])


def test_a_file_that_appears_meanwhile_stays(loaded: LoadedModel, tmp_path: Path) -> None:
    path, back = make_file(loaded, tmp_path), tmp_path / "back"

    def make(name: str) -> Callable[[float], None]:
        def write(share: float) -> None:
            (back / name).write_bytes(b"theirs")

        return write

    with pytest.raises(FileError, match="another program has just made it"):
        decompress(path, loaded, back, progress=make("a.txt"))
    with pytest.raises(FileError, match="another program has just made it"):
        compress([path], loaded, back / "b", progress=make("b"))
    assert {found.name: found.read_bytes() for found in back.iterdir()} == {"a.txt": b"theirs", "b": b"theirs"}


def test_an_end_half_way_leaves_nothing(loaded: LoadedModel, some_text: bytes, tmp_path: Path) -> None:
    source, out = tmp_path / "in" / "a.txt", tmp_path / "out" / "a.pbz"
    source.parent.mkdir()
    source.write_bytes(some_text)

    def stop(share: float) -> None:
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress([source], loaded, out, progress=stop)
    assert not list(out.parent.iterdir())
    compress([source], loaded, out)
    with pytest.raises(KeyboardInterrupt):
        decompress(out, loaded, tmp_path / "back", progress=stop)
    assert not list((tmp_path / "back").iterdir())


def test_a_binary_is_stored_with_a_remark(loaded: LoadedModel, tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(3000)
    (tmp_path / "x.bin").write_bytes(content)
    said: list[str] = []
    written = compress([tmp_path / "x.bin"], loaded, tmp_path / "x.pbz", say=said.append)
    assert said == ["note: 3,000 of 3,000 bytes of 'x.bin' are not text; they are stored by xz, not by the model"]
    assert (written.tally.stored, written.tally.by_model) == (3000, 0)
    assert decompress(tmp_path / "x.pbz", loaded, tmp_path / "back")[0].read_bytes() == content


def test_a_file_that_changes_meanwhile_is_refused(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    monkeypatch.setattr(archive, "read_pieces", lambda file: iter([b"ab"]))
    with pytest.raises(FileError, match="changed while it was read"):
        compress([tmp_path / "a"], loaded, tmp_path / "a.pbz")
    assert not (tmp_path / "a.pbz").exists()


def test_a_file_that_cannot_be_read_is_named(loaded: LoadedModel, tmp_path: Path) -> None:
    unreadable = Path("/proc/self/mem")  # for every user: no memory lies at address 0
    if not unreadable.exists():
        pytest.skip("a file of Linux")
    with pytest.raises(FileError, match="cannot read /proc/self/mem: "):
        compress([unreadable], loaded, tmp_path / "a.pbz")
    assert not (tmp_path / "a.pbz").exists()


@pytest.mark.parametrize(
    "make",
    [
        lambda: train_foreign(add_dummy_prefix=True, remove_extra_whitespaces=False),
        lambda: train_foreign(add_dummy_prefix=True, remove_extra_whitespaces=True),
        lambda: train_foreign(byte_fallback=False, add_dummy_prefix=False),
    ],
)
def test_a_tokenizer_that_changes_text_loses_nothing(make: Callable[[], bytes]) -> None:
    tokenizer = Tokenizer.from_bytes(make())
    for data in (b" a  b", b"the sea\xff the  sea", "\u2581 é".encode(), b"\x00", b"   "):
        try:
            tokens = to_tokens(data, tokenizer)
        except NotTokens:
            continue  # stored by xz
        assert tokenizer.decode_bytes(tokens) == data
    assert tokenizer.decode_bytes(to_tokens(b"the sea", tokenizer)) == b"the sea"


def test_pieces_end_after_a_line_or_between_characters(tmp_path: Path) -> None:
    lines = b"one line\n" * (PIECE // 4)
    for content in (lines, "é€😀".encode() * (PIECE // 4), b"\xff" * (PIECE + 3), b""):
        (tmp_path / "a").write_bytes(content)
        with open(tmp_path / "a", "rb") as file:
            pieces = list(read_pieces(file))
        assert b"".join(pieces) == content
        assert all(0 < len(piece) <= PIECE for piece in pieces)
        if content == lines:
            assert all(piece.endswith(b"\n") for piece in pieces)
        elif content[:1] not in (b"", b"\xff"):
            assert all(is_text(piece) and piece.decode("utf-8") for piece in pieces)


@pytest.mark.parametrize("size", [1, 7, 40])
def test_no_block_is_longer_than_a_reader_takes(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """With the most segments, a full block is as long as any reader takes: the piece that fills it must not exceed it."""
    for module in (container, blocks):
        monkeypatch.setattr(module, "MOST_BLOCK", 64)
    monkeypatch.setattr(blocks, "_LEAST_BLOCK", 64)
    monkeypatch.setattr(blocks, "LANE_BYTES", 64 // 4)
    contents = [size * b"a"] * (200 // size)
    assert round_trip(loaded, contents, tmp_path, segments=4) == contents


def test_many_small_files_are_added_up_once(loaded: LoadedModel, tmp_path: Path) -> None:
    class Counted(bytes):
        asked = 0

        def __len__(self) -> int:
            Counted.asked += 1
            return super().__len__()

    writer = BlockWriter(io.BytesIO(), loaded, None, lambda done: None)
    for _ in range(100):
        writer.add_tokens(np.zeros(1, np.uint16), Counted(b"a"))
    assert Counted.asked <= 400


def test_a_document_longer_than_any_block_is_refused(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MOST_BLOCK", 2)
    with pytest.raises(ConfigError, match="a document of 3 bytes cannot be coded: at most 2"):
        BlockWriter(io.BytesIO(), loaded, None, lambda done: None).add_tokens(np.zeros(1, np.uint16), b"abc")


@pytest.mark.parametrize("segments", [0, 5000])
def test_a_wrong_number_of_segments_is_refused(loaded: LoadedModel, tmp_path: Path, segments: int) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    with pytest.raises(ParbankError, match="--segments is a number from 1 to 4096"):
        compress([tmp_path / "a"], loaded, tmp_path / "a.pbz", segments=segments)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"context": 0},
        {"model": None},
        {"model": "\x1b[31m" + 59 * "0"},
        {"made_with": []},
        {"made_with": {"threads": True}},
        {"made_with": {"threads": 10**9}},
        {"made_with": {"torch": "\x1b]0;title\x07"}},
        {"made_with": {"\x1b[2J": 1}},
        {"made_with": {"torch": ["2"]}},
        {"files": [("a", -1)]},
        {"files": [(1, 1)]},
    ],
)
def test_a_header_of_nonsense_is_refused(loaded: LoadedModel, tmp_path: Path, nonsense: dict[str, Any]) -> None:
    path = tmp_path / "a.pbz"
    usual: dict[str, Any] = {"model": 64 * "0", "context": 16, "made_with": {"threads": 2, "cuda": None}, "files": []}
    with open(path, "wb") as file:
        write_header(file, Header(**usual))
    with pytest.raises(ArtifactError, match="compressed with another model"):
        decompress(path, loaded, tmp_path / "back")
    with open(path, "wb") as file:
        write_header(file, Header(**(usual | nonsense)))
    with pytest.raises(ArtifactError, match="its header cannot be read"):
        decompress(path, loaded, tmp_path / "back")


@pytest.mark.gpu
def test_a_gpu_decodes_its_own_file(loaded: LoadedModel, some_text: bytes, tmp_path: Path) -> None:
    """Steps are replayed as a graph there, and the second block takes the graph of the first."""
    there = replace(loaded, model=make_model().cuda())
    coder, tokens = TokenCoder(there.model, CONTEXT), loaded.tokenizer.encode(some_text.decode())
    for _ in range(2):
        coded, bits = coder.encode(tokens, 16)
        assert 0 <= 8 * len(coded) - bits <= 64 + 0.002 * bits
        assert coder.decode(coded, len(tokens), 16).tolist() == tokens.tolist()
    assert round_trip(there, [some_text, b"", b"\xff"], tmp_path, 16) == [some_text, b"", b"\xff"]
