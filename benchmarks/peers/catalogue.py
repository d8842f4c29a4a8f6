"""The peers: where their code comes from, at which commit, and which of their files run.

    python benchmarks/peers/catalogue.py [NAME...] [--from NAME=REPOSITORY]...

Copies the files of each peer at its pinned commit into .peers/NAME/. Repositories are cloned from their public address;
`--from` names another clone of the same repository, for machines without a network.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".peers"


class PeerError(RuntimeError):
    """A peer's code is missing, or is not what a driver was written for."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    name: str
    title: str
    """How tables call it."""
    address: str
    commit: str
    files: tuple[str, ...]
    """Files and folders to take."""
    licence: str

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    def path(self, file: str) -> Path:
        """A file of the peer, as it was brought here: changed or missing ones are refused."""
        try:
            listed = json.loads((self.folder / "PEER.json").read_text(encoding="utf-8"))
            content = (self.folder / file).read_bytes()
        except OSError as error:
            raise PeerError(
                f"{self.title} is not in {self.folder}: {error.strerror}; run python benchmarks/peers/catalogue.py {self.name}"
            ) from error
        if listed["commit"] != self.commit or listed["files"].get(file) != hashlib.sha256(content).hexdigest():
            raise PeerError(
                f"{self.folder / file} is not the file of commit {self.commit[:9]}; run python benchmarks/peers/catalogue.py "
                f"{self.name} again"
            )
        return self.folder / file

    def describe(self, *differs: str) -> dict[str, Any]:
        """What a result says of this peer; `differs` lists every way in which it was not run as published."""
        return {"name": self.name, "title": self.title, "address": self.address, "commit": self.commit,
                "licence": self.licence, "differs": list(differs)}  # fmt: skip

    def bring(self, repository: str) -> None:
        """The files at the pinned commit, from a clone of `repository`."""
        with tempfile.TemporaryDirectory() as place:
            clone = Path(place) / "clone"
            _git("clone", "--quiet", "--no-checkout", "--filter=blob:none", repository, str(clone))
            _git("-C", str(clone), "checkout", "--quiet", self.commit, "--", *self.files)
            shutil.rmtree(clone / ".git")
            shutil.rmtree(self.folder, ignore_errors=True)
            shutil.copytree(clone, self.folder)
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        digests = {p.relative_to(self.folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
        about = {"address": self.address, "commit": self.commit, "files": digests}
        (self.folder / "PEER.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


GOLF_RECORD = "records/track_10min_16mb/2026-03-23_LeakyReLU_LegalTTT_ParallelMuon/train_gpt.py"
PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            name="golf",
            title="the published recipe (parameter-golf #549)",
            address="https://github.com/openai/parameter-golf",
            commit="4908dc46f21ed3fdd08d2fdca285deb2194b9599",
            files=(GOLF_RECORD, "LICENSE"),
            licence="MIT",
        ),
        Peer(
            name="dion",
            title="microsoft/dion",
            address="https://github.com/microsoft/dion",
            commit="0a059a4542e5aa74b40dcd1dce363836c7afcd48",
            files=("dion", "LICENSE"),
            licence="MIT",
        ),
        Peer(
            name="autoresearch",
            title="karpathy/autoresearch",
            address="https://github.com/karpathy/autoresearch",
            commit="228791fb499afffb54b46200aca536f79142f117",
            files=("train.py", "README.md"),
            licence="MIT",
        ),
    )
}


def substitute(source: str, changes: dict[str, str]) -> str:
    """The source with each text replaced; a text that does not occur exactly once is an error, not a silent no-op."""
    for old, new in changes.items():
        if (count := source.count(old)) != 1:
            raise PeerError(f"a driver expects {old!r} once in the peer's source and finds it {count} times")
        source = source.replace(old, new)
    return source


def _git(*words: str) -> None:
    try:
        subprocess.run(["git", *words], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"git {words[0]} failed ({error}); --from NAME=REPOSITORY takes a clone you have") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)}; all if not given")
    parser.add_argument("--from", action="append", default=[], dest="sources", metavar="NAME=REPOSITORY")
    arguments = parser.parse_args()
    sources = dict(text.split("=", 1) for text in arguments.sources)
    unknown = sorted({*arguments.names, *sources} - set(PEERS))
    if unknown:
        sys.exit(f"there is no peer {unknown[0]!r}; there are {', '.join(PEERS)}")
    for name in arguments.names or PEERS:
        peer = PEERS[name]
        peer.bring(sources.get(name, peer.address))
        print(f"{peer.folder}: {peer.title} at {peer.commit[:9]}")


if __name__ == "__main__":
    main()
