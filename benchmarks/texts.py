"""Makes texts for experiments: some that no law of the plan was fitted on, and slices of others.

    python benchmarks/texts.py [--only manual-ja] [--out .texts]
    parbank plan --data text:train=.texts/manual-ja/train.jsonl.xz,val=.texts/manual-ja/val.jsonl.xz --minutes 1
    python benchmarks/texts.py --slice text:CORPUS.jsonl.xz --train-bytes 20000000 --val-bytes 600000 --out .texts/corpus

The first form takes Debian packages: English documentation, and manual pages. It needs `apt-get` and `dpkg-deb`, and the
network. The same packages give the same bytes, in the same order. One document in 32, chosen by a hash of its name, is
validation text. Documents that are equal in their letters are kept once.

A slice is a part of a text, for choices: its validation part are dev documents (holdout=dev), so no choice reads the text's own
validation part. Documents come in the order of their hashes, until there are so many bytes.

Writes train.jsonl.xz, val.jsonl.xz and about.json, which holds the packages with their versions, and the sizes and hashes of the
texts. git ignores the folder. Nothing is measured.
"""

import argparse
import gzip
import hashlib
import json
import lzma
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LEAST = 500  # bytes of a document that is kept
VAL_SHARE = 32


@dataclass(frozen=True, kw_only=True)
class Source:
    """The packages of a text, and the files in them that are documents."""

    packages: tuple[str, ...]
    files: str
    """A pattern of paths inside the packages."""


SOURCES = {
    "debian-docs": Source(
        packages=(
            "debian-policy",
            "debian-reference-en",
            "developers-reference",
            "debian-faq",
            "git-doc",
            "linux-doc-6.1",
        ),
        files=r"usr/share/doc/.*\.(rst|txt|html|rst\.gz|txt\.gz|html\.gz)",
    ),
    "manual-ja": Source(packages=("manpages-ja", "manpages-ja-dev"), files=r"usr/share/man/ja/man\d/.*\.gz"),
    "manual-ru": Source(packages=("manpages-ru", "manpages-ru-dev"), files=r"usr/share/man/ru/man\d/.*\.gz"),
}


class _Words(HTMLParser):
    """The text of a page, without tags, scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._hidden += tag in ("script", "style", "nav")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style", "nav")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(data)


def read_document(path: Path) -> str:
    """The text of a file; empty where it is not UTF-8."""
    raw = path.read_bytes()
    data = gzip.decompress(raw) if path.suffix == ".gz" else raw
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return ""
    if path.name.removesuffix(".gz").endswith(".html"):
        words = _Words()
        words.feed(text)
        text = "".join(words.parts)
    lines = [
        line.rstrip() for line in text.splitlines() if not line.startswith(('.\\"', "'\\\""))
    ]  # no comments of roff
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def find_documents(root: Path, files: str) -> Iterator[tuple[str, str]]:
    """(name, text), by name, each text once."""
    seen: set[str] = set()
    pattern = re.compile(files)
    for path in sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink()):
        name = path.relative_to(root).as_posix()
        if not pattern.fullmatch(name):
            continue
        text = read_document(path)
        key = "".join(text.split())
        if len(text.encode()) >= LEAST and key not in seen:
            seen.add(key)
            yield name, text


def write_text(documents: Iterator[tuple[str, str]], folder: Path) -> dict[str, dict[str, object]]:
    """train.jsonl.xz and val.jsonl.xz, with their sizes and hashes."""
    parts: dict[str, list[tuple[str, str]]] = {"train": [], "val": []}
    for name, text in documents:
        number = int(hashlib.sha256(name.encode()).hexdigest(), 16)
        parts["val" if number % VAL_SHARE == 0 else "train"].append((name, text))
    return write_parts(parts, folder)


def write_parts(parts: dict[str, list[tuple[str, str]]], folder: Path) -> dict[str, dict[str, object]]:
    """A file for each part, from names and texts of its documents."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, object]] = {}
    for part, documents in parts.items():
        lines = (json.dumps({"id": name, "text": text}, ensure_ascii=False) + "\n" for name, text in documents)
        data = "".join(lines).encode()
        (folder / f"{part}.jsonl.xz").write_bytes(lzma.compress(data))
        found[part] = {
            "documents": len(documents),
            "text_bytes": sum(len(text.encode()) for _, text in documents),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    return found


def slice_text(spec: str, folder: Path, most: dict[str, int], longest: int) -> dict[str, dict[str, object]]:
    """Training and dev documents of a spec, each part up to so many bytes, from documents of at most `longest` bytes."""
    from parbank.data.prepare import gather
    from parbank.data.sources import parse_spec
    from parbank.data.spool import Spool

    corpus = parse_spec(spec).open(Path(".texts"), print)
    if isinstance(corpus, Path):
        raise SystemExit(f"{spec} holds tokens; a slice needs text")
    parts: dict[str, list[tuple[str, str]]] = {}
    with tempfile.TemporaryDirectory() as work, Spool(Path(work) / "spool") as spool:
        train, dev, _ = gather(replace(corpus, holdout="dev"), spool, print)
        for part, entries in (("train", train), ("val", dev)):
            size, parts[part] = 0, []
            for entry in entries:
                if entry.size <= longest and size + entry.size <= most[part]:
                    size += entry.size
                    parts[part].append((entry.digest.hex(), spool.read(entry).decode()))
    return write_parts(parts, folder)


def fetch(package: str, folder: Path) -> dict[str, str]:
    """Downloads a package and unpacks it beside the others. Returns its name, version and hash."""
    subprocess.run(["apt-get", "download", "-qq", package], check=True, cwd=folder, stderr=subprocess.DEVNULL)
    archive = next(folder.glob(f"{package}_*.deb"))
    subprocess.run(["dpkg-deb", "-x", str(archive), str(folder / "files")], check=True)
    _, version, _ = archive.name.split("_")
    return {"package": package, "version": version, "sha256": hashlib.sha256(archive.read_bytes()).hexdigest()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SOURCES, default=None)
    parser.add_argument("--out", type=Path, default=Path(".texts"))
    parser.add_argument("--slice", metavar="SPEC", default="", help="a part of this text, into --out itself")
    parser.add_argument("--train-bytes", type=int, default=10**12, help="of a slice, at most")
    parser.add_argument("--val-bytes", type=int, default=10**12, help="of a slice, at most")
    parser.add_argument("--longest", type=int, default=10**12, help="bytes of a document of a slice, at most")
    arguments = parser.parse_args()
    if arguments.slice:
        most = {"train": arguments.train_bytes, "val": arguments.val_bytes}
        about = slice_text(arguments.slice, arguments.out, most, arguments.longest)
        (arguments.out / "about.json").write_text(json.dumps(about, indent=1) + "\n")
        print(json.dumps(about, indent=1))
        return
    for name in [arguments.only] if arguments.only else list(SOURCES):
        source, folder = SOURCES[name], arguments.out / name
        with tempfile.TemporaryDirectory() as work:
            packages = [fetch(package, Path(work)) for package in source.packages]
            about = write_text(find_documents(Path(work) / "files", source.files), folder)
        (folder / "about.json").write_text(json.dumps({"packages": packages, **about}, indent=1) + "\n")
        sizes = ", ".join(f"{part} {found['text_bytes']:,} bytes" for part, found in about.items())
        print(f"{name}: {sizes}", flush=True)


if __name__ == "__main__":
    main()
