"""Texts from packages: the same files give the same bytes, each text once, and markup and comments are left out."""

import gzip
import hashlib
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def texts(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("texts")


def test_the_same_files_give_the_same_text(texts: ModuleType, tmp_path: Path) -> None:
    manual = tmp_path / "files" / "usr/share/man/ja/man1"
    manual.mkdir(parents=True)
    for number in range(40):
        text = f'.\\" a licence\n.TH {number}\n' + "\u30de\u30cb\u30e5\u30a2\u30eb\n" * 40
        (manual / f"{number:02}.1.gz").write_bytes(gzip.compress(text.encode()))
    (manual / "copy.1.gz").write_bytes(gzip.compress(text.encode()))
    (manual / "broken.1.gz").write_bytes(gzip.compress(b"\xff" * 1000))
    pattern = texts.SOURCES["manual-ja"].files
    about = [texts.write_text(texts.find_documents(tmp_path / "files", pattern), tmp_path / name) for name in "ab"]
    assert about[0] == about[1]
    assert about[0]["train"]["documents"] + about[0]["val"]["documents"] == 40, "a copy is left out, and so is no UTF-8"
    assert about[0]["val"]["documents"] > 0
    first, second = ((tmp_path / name / "train.jsonl.xz").read_bytes() for name in "ab")
    assert first == second
    document = json.loads(lzma.decompress(first).splitlines()[0])
    assert document["text"].startswith(".TH"), "comments are left out"


def test_a_page_is_its_words(texts: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    page.write_text("<html><style>p {}</style><p>One &amp; two</p>\n\n\n\n<script>x</script>three</html>")
    assert texts.read_document(page) == "One & two\n\nthree\n"


def test_a_slice_scores_dev_documents_and_keeps_to_its_sizes(texts: ModuleType, tmp_path: Path) -> None:
    lines = [json.dumps({"id": str(number), "text": f"document {number} " * 40}) for number in range(400)]
    (tmp_path / "all.jsonl").write_text("\n".join(lines))
    most = {"train": 30_000, "val": 2_000}
    about = texts.slice_text(f"text:{tmp_path / 'all.jsonl'}", tmp_path / "slice", most, longest=559)
    assert all(0 < about[part]["text_bytes"] <= most[part] for part in most)
    packed = {part: (tmp_path / f"slice/{part}.jsonl.xz").read_bytes() for part in most}
    parts = {
        part: [json.loads(line)["text"] for line in lzma.decompress(data).splitlines()] for part, data in packed.items()
    }
    assert not set(parts["train"]) & set(parts["val"])
    assert max(len(text) for texts_of in parts.values() for text in texts_of) <= 559, "longer documents are left out"
    dev = {f"document {n} " * 40 for n in range(400) if hashlib.sha256(str(n).encode()).digest()[-1] % 64 == 0}
    assert set(parts["val"]) <= dev
