"""Fetching the published shards, against a local folder that stands in for the hub."""

import hashlib
import json
import shutil
import sys
import types
from pathlib import Path

import pytest

from parbank.data.dataset import open_dataset, open_shards
from parbank.data.sources import fineweb
from parbank.data.sources.fineweb import SHARDS_AT, TOKENIZER_AT, FinewebRequest, fetch_fineweb
from parbank.data.tokenizer import Tokenizer
from parbank.data.validation import open_validation
from parbank.errors import ConfigError, DataError

DOCUMENTS = [f"Document {i} is about a thing, and the {i * i} things beside it." for i in range(200)]


@pytest.fixture
def said() -> list[str]:
    return []


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_fetched_shards_open_and_their_bytes_are_exact(hub: Path, tmp_path: Path, said: list[str]) -> None:
    fetch_fineweb(tmp_path / "out", shards=2, source=hub, say=said.append)
    assert names(tmp_path / "out") == [
        "fetched.json",
        "fineweb_1024_bpe.model",
        "fineweb_train_000000.bin",
        "fineweb_train_000001.bin",
        "fineweb_val_000000.bin",
    ]
    data = open_shards(tmp_path / "out", vocab_size=330)
    assert data.val_text().decode() == "".join(DOCUMENTS[3::4])
    assert data.val_bytes == sum(len(text) for text in DOCUMENTS[3::4])
    assert data.train_bytes == sum(len(text) for text in DOCUMENTS[0::4] + DOCUMENTS[1::4])
    assert len(said) == 4


def test_what_is_there_is_skipped_and_what_is_damaged_is_fetched_again(
    hub: Path, tmp_path: Path, said: list[str]
) -> None:
    out = tmp_path / "out"
    fetch_fineweb(out, shards=1, source=hub, say=said.append)
    said.clear()
    fetch_fineweb(out, shards=1, source=hub, say=said.append)
    assert said == []
    fetch_fineweb(out, shards=3, source=hub, say=said.append)
    assert [line.split(":")[0] for line in said] == [f"fetching fineweb_train_{i:06d}.bin" for i in (1, 2)]
    said.clear()
    path = out / "fineweb_train_000001.bin"
    path.write_bytes(path.read_bytes()[:-100])
    fetch_fineweb(out, shards=3, source=hub, say=said.append)
    assert [line.split(":")[0] for line in said] == ["fetching fineweb_train_000001.bin"]
    assert path.read_bytes() == (hub / SHARDS_AT / path.name).read_bytes()


def test_interrupted_fetch_leaves_no_half_file_and_goes_on(hub: Path, tmp_path: Path, said: list[str]) -> None:
    def interrupt(line: str) -> None:
        if "train" in line:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        fetch_fineweb(out, shards=1, source=hub, say=interrupt)
    assert not list(out.glob("*_train_*"))
    fetch_fineweb(out, shards=1, source=hub, say=said.append)
    assert [line.split(":")[0] for line in said] == ["fetching fineweb_train_000000.bin"]
    assert not (out / ".fetching").exists()


def test_a_damaged_source_is_refused_by_name(hub: Path, tmp_path: Path, said: list[str]) -> None:
    broken = Path(shutil.copytree(hub, tmp_path / "hub"))
    with open(broken / SHARDS_AT / "fineweb_train_000000.bin", "ab") as file:
        file.write(b"??")
    with pytest.raises(DataError, match=r"fineweb_train_000000\.bin from .* arrived damaged .*too long"):
        fetch_fineweb(tmp_path / "out", source=broken, say=said.append)
    assert not list((tmp_path / "out").glob("*_train_*"))
    assert not list((tmp_path / "out" / ".fetching").glob("*"))
    (broken / TOKENIZER_AT).unlink()
    with pytest.raises(DataError, match="does not hold"):
        fetch_fineweb(tmp_path / "out", source=broken, say=said.append)


def test_counts_that_cannot_be_had(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 3 training shards, 4 were asked for"):
        fetch_fineweb(tmp_path / "out", shards=4, source=hub)
    with pytest.raises(DataError, match="ask for 1 or more"):
        fetch_fineweb(tmp_path / "out", shards=0, source=hub)
    for source in (tmp_path / "none", "/none", "./none"):
        with pytest.raises(DataError, match="is not a folder"):
            fetch_fineweb(tmp_path / "out", source=source)


def test_spec_opens_what_was_fetched_without_asking_the_hub(
    hub: Path, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    FinewebRequest(2).open(tmp_path, said.append, source=hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # any use of it fails from here on
    for spec in ("fineweb", "fineweb:1", "fineweb:2"):
        data = open_dataset(spec, vocab_size=330, cache=tmp_path, say=said.append)
        assert len(data.train.shards) == 2
    with pytest.raises(DataError, match=r"needs the package huggingface_hub.*parbank\[fineweb\]"):
        open_dataset("fineweb:3", vocab_size=330, cache=tmp_path, say=said.append)
    for spec in ("fineweb:x", "fineweb:0", "fineweb:-1"):
        with pytest.raises(ConfigError, match="write fineweb, or fineweb:N"):
            open_dataset(spec, vocab_size=330, cache=tmp_path, say=said.append)


def test_only_the_published_tokenizer_scores_it_and_its_leading_space_is_named(hub: Path, tmp_path: Path) -> None:
    folder = FinewebRequest(1).open(tmp_path, lambda line: None, source=hub)
    own = open_shards(folder).tokenizer
    found = open_validation("fineweb", own, cache=tmp_path, say=lambda line: None)
    assert own.decode_bytes(found.tokens.read(0, len(found.tokens))).decode() == "".join(DOCUMENTS[3::4])
    assert found.text == "not proved"
    assert own.adds_prefix
    assert "puts a space before each document" in found.describe()["text_note"]
    other = Tokenizer.train(iter(DOCUMENTS), 300)
    with pytest.raises(DataError, match="fineweb holds tokens of another tokenizer"):
        open_validation("fineweb", other, cache=tmp_path, say=lambda line: None)


def test_the_hub_is_asked_for_the_published_files(
    hub: Path, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is replaced by one that serves the folder; test_fineweb_pins.py uses the real one."""
    asked: list[str] = []

    class Api:
        def dataset_info(self, repo_id: str, *, revision: str) -> types.SimpleNamespace:
            return types.SimpleNamespace(sha="c0ffee")

        def list_repo_files(self, repo_id: str, *, repo_type: str, revision: str) -> list[str]:
            assert (repo_id, repo_type, revision) == ("willdepueoai/parameter-golf", "dataset", "c0ffee")
            return [path.relative_to(hub).as_posix() for path in hub.rglob("*") if path.is_file()]

        def get_paths_info(
            self, repo_id: str, paths: list[str], *, repo_type: str, revision: str
        ) -> list[types.SimpleNamespace]:
            digest = hashlib.sha256((hub / paths[0]).read_bytes()).hexdigest()
            return [types.SimpleNamespace(lfs=types.SimpleNamespace(sha256=digest))]

        def hf_hub_download(self, repo_id: str, filename: str, *, repo_type: str, revision: str, local_dir: str) -> str:
            asked.append(filename)
            if len(asked) == 2:
                raise ConnectionError("the cable was pulled")
            target = Path(local_dir, filename)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(hub / filename, target)
            return str(target)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=Api))
    with pytest.raises(DataError, match=r"cable was pulled.*run the same command again"):
        fetch_fineweb(tmp_path / "out", shards=1, say=said.append)
    fetch_fineweb(tmp_path / "out", shards=1, say=said.append)
    val, train = f"{SHARDS_AT}/fineweb_val_000000.bin", f"{SHARDS_AT}/fineweb_train_000000.bin"
    assert asked == [TOKENIZER_AT, val, val, train]
    kept = ["fetched.json", "fineweb_1024_bpe.model", "fineweb_train_000000.bin", "fineweb_val_000000.bin"]
    assert names(tmp_path / "out") == kept
    assert json.loads((tmp_path / "out" / "fetched.json").read_text())["revision"] == "c0ffee"
    assert fineweb.REPOSITORY == "willdepueoai/parameter-golf"
