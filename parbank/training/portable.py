"""Compiled code as one file, for other machines with the same GPU and the same versions.

`parbank warmup --export FILE` writes it, `parbank warmup --import FILE` puts it into the cache of another machine. The
file is a zip archive: about.json with the key and the sha256 of every member, the entries of Triton's cache that the
warm-up used, and PyTorch's portable cache artifacts if the run uses torch.compile.

Triton lists the files of a kernel by absolute path. The archive holds names alone, and an import writes its own paths.

Imported code runs. The hashes find accidents; they do not authenticate.
"""

import hashlib
import io
import json
import os
import platform
import re
import sysconfig
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parbank.config import parse_json
from parbank.errors import DeviceError, FileError
from parbank.files import refuse_link, write_file
from parbank.runtime import versions
from parbank.training.compiled import IMPORTED, code_digest, kernel_folder, note_kernels, used_kernels

FORMAT = 1
ABOUT, GRAPHS = "about.json", "torch.bin"
_TRITON = "triton/"
_GROUP = "__grp__"  # begins the name of Triton's list of the files of a kernel
_FILE = r"[A-Za-z0-9_=+-][A-Za-z0-9_.=+-]*"  # never a folder: no slash, and no point at the beginning
_MEMBER = re.compile(rf"triton/[A-Za-z0-9_=-]+/{_FILE}")
_MOST_BYTES = 1 << 30  # unpacked: the kernels of a golf run take some 20 MB
_AGAIN = "copy it again, or write it again by `parbank warmup --export`"


@dataclass(frozen=True)
class Exported:
    """The content of a written archive."""

    kernels: int
    files: int
    size: int
    """Bytes of the archive."""


@dataclass(frozen=True)
class ImportedCache:
    """The result of an import."""

    new: int
    """Files that were written."""
    kept: int
    """Files that were there already. They stay as they are."""
    graphs: bool
    """Whether PyTorch's graphs came too."""


def describe_machine(device: torch.device) -> dict[str, str]:
    """The key: everything that compiled code depends on, by the name that a refusal uses."""
    if device.type != "cuda":
        raise DeviceError(
            f"compiled code belongs to a CUDA GPU, and this command runs on {device}; there is nothing to carry"
        )
    found, gpu = versions(), torch.cuda.get_device_properties(device)
    libc = " ".join(filter(None, platform.libc_ver()))
    return {
        "GPU": gpu.name,
        "compute capability": f"{gpu.major}.{gpu.minor}",
        "torch": found["torch"],
        "CUDA": found.get("cuda", "none"),
        "Triton": found.get("triton", "none"),
        "Python": str(sysconfig.get_config_var("SOABI") or found["python"]),
        "system": f"{found['platform']} {libc}".strip(),
        "parbank's ops": code_digest(),
    }


def export_warmed(path: Path, device: torch.device, *, graphs: bool) -> str:
    """Exports the code that this process has used, with PyTorch's graphs if it compiled some. Returns a line for the user."""
    key = describe_machine(device)
    saved = torch.compiler.save_cache_artifacts() if graphs else None
    done = export_code(path, key, kernel_folder(), used_kernels(), graphs=None if saved is None else saved[0])
    also = " and PyTorch's graphs" if saved else ""
    return f"wrote {done.kernels} kernels{also} for {key['GPU']} to {path}: {done.size:,} bytes in {done.files} files"


def import_kept(path: Path, device: torch.device) -> str:
    """Imports an archive into the caches that this process uses. Returns a line for the user."""
    done = import_code(path, describe_machine(device), kernel_folder())
    note_kernels(IMPORTED)
    also = " and PyTorch's graphs" if done.graphs else ""
    return f"took {done.new} files{also} from {path}; {done.kept} were here already and stay as they are"


def check_export(path: Path) -> None:
    """Refuses to write over a file that is no earlier export."""
    if not os.path.lexists(path):
        return
    try:
        ours = os.path.isfile(path)  # a pipe would be waited for
        if ours:
            with zipfile.ZipFile(path) as archive:
                ours = parse_json(archive.read(ABOUT))["made_by"] == "parbank"
    except (OSError, zipfile.BadZipFile, zlib.error, KeyError, TypeError, ValueError, RuntimeError, EOFError):
        ours = False
    if not ours:
        raise FileError(f"{path} exists and is no export of parbank; give another name, or delete it yourself")
    refuse_link(path)


def export_code(
    path: Path, key: Mapping[str, str], folder: Path, kernels: Iterable[Path], *, graphs: bytes | None = None
) -> Exported:
    """Writes the archive: these entries of Triton's cache `folder`, and its compiled C code, which has no kernel."""
    check_export(path)
    entries = sorted({entry.name for entry in kernels if entry.parent == folder and _is_complete(entry)})
    if not entries:
        raise FileError(f"there is nothing to export: this process used no compiled kernel in {folder}")
    members: dict[str, bytes] = {}
    for entry in sorted(folder.iterdir()):
        if entry.name in entries or _is_library(entry):
            members |= {f"{_TRITON}{entry.name}/{file.name}": _read_portable(file) for file in _files(entry)}
    odd = [name for name in members if not _MEMBER.fullmatch(name)]
    if odd:
        raise FileError(f"cannot export {odd[0]!r}: an import would not accept that name; clear {folder} and try again")
    if graphs is not None:
        members[GRAPHS] = graphs
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in members.items()}
    about = {"made_by": "parbank", "format": FORMAT, "key": dict(key), "files": hashes}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        # ZipInfo without a time: the same code gives the same archive
        for name, data in ((ABOUT, json.dumps(about, indent=1).encode()), *members.items()):
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return Exported(len(entries), len(members), write_file(path, buffer.getvalue()))


def import_code(path: Path, key: Mapping[str, str], folder: Path) -> ImportedCache:
    """Puts the code of an archive into Triton's cache `folder`, and into PyTorch's. Refuses an archive for another machine,
    and names the difference. A file that exists is never replaced."""
    members = read_archive(path, key)
    graphs = members.pop(GRAPHS, None)
    files = {folder / name.removeprefix(_TRITON): data for name, data in members.items()}
    files |= {target: _localise(data, target.parent, path) for target, data in files.items() if _is_group(target.name)}
    new = [target for target in files if not target.exists()]
    # The list of a kernel comes last: Triton looks for it first, and must then find every file.
    for target in sorted(new, key=lambda target: (_is_group(target.name), target)):
        write_file(target, files[target])
    if graphs is not None:
        torch.compiler.load_cache_artifacts(graphs)
    return ImportedCache(len(new), len(files) - len(new), graphs is not None)


def read_archive(path: Path, key: Mapping[str, str]) -> dict[str, bytes]:
    """The members of an archive for this key, each with the hash that it was written with."""
    try:
        with zipfile.ZipFile(path) as archive:
            listed = archive.infolist()
            if sum(member.file_size for member in listed) > _MOST_BYTES:
                raise FileError(f"{path} would unpack to more than {_MOST_BYTES:,} bytes; it holds no code of parbank")
            about = parse_json(archive.read(ABOUT))
            hashes = _check_about(about, key, path)
            members = {member.filename: archive.read(member) for member in listed if member.filename != ABOUT}
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, RuntimeError, EOFError) as error:
        raise FileError(f"{path} is not an archive of compiled code, or damaged ({error}); {_AGAIN}") from None
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error
    wrong = [name for name in members if name != GRAPHS and not _MEMBER.fullmatch(name)]
    if wrong:
        raise FileError(f"{path} holds {wrong[0]!r}, which is no file of a compile cache; nothing was imported")
    if {name: hashlib.sha256(data).hexdigest() for name, data in members.items()} != hashes:
        raise FileError(f"{path} is damaged: a file in it differs from its sha256; {_AGAIN}")
    return members


def _check_about(about: Any, key: Mapping[str, str], path: Path) -> dict[str, str]:
    """The hashes of the members. Refuses another machine's code."""
    if not isinstance(about, dict) or about.get("made_by") != "parbank" or not isinstance(about.get("files"), dict):
        raise FileError(f"{path} is not an archive of compiled code; give a file of `parbank warmup --export`")
    theirs = about.get("key")
    if about.get("format") != FORMAT or not isinstance(theirs, dict):
        raise FileError(f"{path} has format {about.get('format')!r}, this parbank reads {FORMAT}; {_AGAIN}")
    differs = [name for name in {**key, **theirs} if key.get(name) != theirs.get(name)]
    if differs:
        named = "; ".join(f"{name}: {theirs.get(name, 'none')} there, {key.get(name, 'none')} here" for name in differs)
        raise DeviceError(
            f"{path} holds code for another machine ({named}); export it on a machine like this one, or compile here: "
            "parbank warmup"
        )
    return about["files"]


def _files(entry: Path) -> Iterator[Path]:
    """The files of an entry, without the folders in which Triton writes at this moment."""
    return (file for file in sorted(entry.iterdir()) if file.is_file() and file.name != "lock")


def _is_complete(entry: Path) -> bool:
    return any(file.name.startswith(_GROUP) for file in _files(entry))


def _is_library(entry: Path) -> bool:
    """Whether an entry is C code that Triton compiled: a launcher, or the driver's functions."""
    names = [file.name for file in _files(entry)] if entry.is_dir() else []
    return bool(names) and all(name.endswith(".so") for name in names)


def _is_group(name: str) -> bool:
    return name.startswith(_GROUP)


def _read_portable(file: Path) -> bytes:
    """A file of the cache; the list of a kernel's files without their folder."""
    data = file.read_bytes()
    if not _is_group(file.name):
        return data
    children = parse_json(data)["child_paths"]
    return json.dumps({"child_paths": {name: Path(child).name for name, child in children.items()}}).encode()


def _localise(data: bytes, entry: Path, path: Path) -> bytes:
    """The list of a kernel's files with their paths on this machine."""
    try:
        children = parse_json(data)["child_paths"]
        sound = all(re.fullmatch(_FILE, name) and re.fullmatch(_FILE, child) for name, child in children.items())
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise FileError(f"{path} is damaged: the list of a kernel's files cannot be read; {_AGAIN}")
    return json.dumps({"child_paths": {name: str(entry / child) for name, child in children.items()}}).encode()
