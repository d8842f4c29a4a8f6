"""The container `model.pbk`: a checksummed JSON header, then the sections it lists, and nothing else.

The same meta and sections always give the same bytes. A reader checks every size against the size of the file before
it allocates memory, and every byte against a checksum. It returns a file whole, or raises an error that names it.
docs/reference/artifact.md is the specification.
"""

import hashlib
import io
import json
import os
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from parbank.errors import ArtifactError, enough_memory
from parbank.files import refuse_link, write_file

# A byte outside ASCII and both line ends: a transfer in text mode visibly breaks the magic.
MAGIC = b"\x89PBK\r\n\x1a\n"
FORMAT_VERSION = 2  # what is written; the container is the same since version 1, the weights inside are not
READABLE_VERSIONS = (1, 2)
# A golf model needs about 3 KB; the limit bounds the memory that a damaged or hostile length can allocate.
MAX_HEADER_BYTES = 1 << 20
# JSON of a few bytes a value grows some thirtyfold as Python objects. A state dict of 10,000 tensors needs 100,000 values.
MAX_JSON_VALUES = 200_000
DIGEST_BYTES = 16
_PREFIX = struct.Struct(f"<8sII{DIGEST_BYTES}s")  # magic, version, header length, digest of the three and the header
_NAME = re.compile(r"[A-Za-z0-9._/-]{1,200}\Z")
_ENTRY_FIELDS = {"name", "offset", "size", "checksum"}
_AGAIN = "copy or download it again, or write it again with `parbank pack`"


@dataclass(frozen=True)
class Artifact:
    """A container that was read and fully verified."""

    meta: dict[str, Any]
    """The writer's description of the content, as plain JSON values."""
    sections: dict[str, bytes]
    """The content by name, in the order of the file."""
    source: str = "<memory>"
    """The file it came from: errors found further up name it."""
    size: int = 0
    """Bytes of the whole file."""
    version: int = FORMAT_VERSION
    """The format it was written in."""

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each section; the rest of `size` is the header."""
        return {name: len(data) for name, data in self.sections.items()}

    @property
    def header_size(self) -> int:
        return self.size - sum(self.sizes.values())


def encode_artifact(meta: Mapping[str, Any], sections: Mapping[str, bytes]) -> bytes:
    """The bytes of a container: a function of its arguments only (no time, no host name, keys sorted)."""
    table, offset = [], 0
    for name, data in sections.items():
        if not _NAME.match(name):
            raise ArtifactError(
                f"section name {name!r} is not allowed; use 1 to 200 of the characters A-Z a-z 0-9 . _ / -"
            )
        table.append({"name": name, "offset": offset, "size": len(data), "checksum": _digest(data).hex()})
        offset += len(data)
    header = _to_json({"meta": dict(meta), "sections": table})
    if len(header) > MAX_HEADER_BYTES or count_json(header) > MAX_JSON_VALUES:
        raise ArtifactError(
            f"the artifact's header would be {len(header):,} bytes with about {count_json(header):,} values, at most "
            f"{MAX_HEADER_BYTES:,} and {MAX_JSON_VALUES:,} are allowed; move large values out of the meta into a section"
        )
    return b"".join([_prefix(header), header, *sections.values()])


def decode_artifact(data: bytes, *, source: str = "<memory>") -> Artifact:
    """Reads a container from memory; `source` is the name errors use."""
    return _read(io.BytesIO(data), len(data), source)


def write_artifact(path: str | Path, meta: Mapping[str, Any], sections: Mapping[str, bytes]) -> int:
    """Writes a container atomically and returns its size in bytes."""
    return write_file(path, encode_artifact(meta, sections))


def read_artifact(path: str | Path) -> Artifact:
    """Reads and verifies a whole container. Any fault is an ArtifactError that names the file."""
    source = str(path)
    try:
        # Check before opening: opening a named pipe would wait for a writer for ever.
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise ArtifactError(
                f"{source} is a folder, not an artifact; name the file inside it, e.g. {Path(path) / 'model.pbk'}"
            )
        if not stat.S_ISREG(mode):
            raise ArtifactError(f"{source} is not a regular file; give the path of a .pbk file")
        with open(path, "rb") as file, enough_memory(ArtifactError, path):
            return _read(file, os.fstat(file.fileno()).st_size, source)
    except FileNotFoundError:
        raise ArtifactError(
            f"{source} does not exist; check the path, a run leaves its artifact at RUN_FOLDER/model.pbk"
        ) from None
    except OSError as error:
        raise ArtifactError(
            f"{source} cannot be read: {error.strerror or error}; check the path and its permissions"
        ) from error
    except ValueError as error:  # a NUL in the path is refused by the operating system's interface with a ValueError
        raise ArtifactError(f"{source!r} is not a usable path: {error}") from error


def is_artifact(path: str | Path) -> bool:
    """Whether a file starts like an artifact. `read_artifact` verifies it."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def check_target(path: str | Path) -> None:
    """Refuses to replace the artifact of a run, or a file that is no artifact, such as a checkpoint named by mistake."""
    if os.path.isdir(path):
        raise ArtifactError(f"{path} is a folder; name a file in it, such as {Path(path) / 'model.pbk'}")
    if os.path.lexists(path) and not is_artifact(path):
        raise ArtifactError(f"{path} exists and is no artifact; choose another name, or delete it yourself")
    refuse_link(path)
    summary = Path(path).with_name("summary.json")
    if Path(path).name == "model.pbk" and os.path.lexists(path) and summary.exists():
        raise ArtifactError(f"{path} is the result of a run, and {summary} holds its score; choose another name")


def _read(file: BinaryIO, size: int, source: str) -> Artifact:
    header, version = _read_header(file, size, source)
    meta, table = header["meta"], header["sections"]
    if not isinstance(meta, dict) or not isinstance(table, list):
        _refuse(source, "its header is malformed")
    start = file.tell()
    end = _check_table(table, source)
    if start + end != size:
        what = "it is cut short" if start + end > size else "bytes follow its last section"
        _refuse(source, f"{what}: {start + end:,} bytes are listed in its header, {size:,} are there")
    sections = {}
    for entry in table:
        data = file.read(entry["size"])
        if len(data) != entry["size"]:
            _refuse(source, f"section {entry['name']} ends early")
        if _digest(data).hex() != entry["checksum"]:
            _refuse(source, f"section {entry['name']} does not match its checksum")
        sections[entry["name"]] = data
    return Artifact(meta=meta, sections=sections, source=source, size=size, version=version)


def _read_header(file: BinaryIO, size: int, source: str) -> tuple[dict[str, Any], int]:
    prefix = file.read(_PREFIX.size)
    if not prefix:
        raise ArtifactError(f"{source} is empty; {_AGAIN}")
    if not prefix.startswith(MAGIC[: len(prefix)]):
        raise ArtifactError(f"{source} is not a parbank artifact (it starts with {prefix[:8]!r}); give a .pbk file")
    if len(prefix) < _PREFIX.size:
        _refuse(
            source, f"it is cut short: {size} bytes are there, the first {_PREFIX.size} are needed to read any further"
        )
    _, version, length, digest = _PREFIX.unpack(prefix)
    if version not in READABLE_VERSIONS:
        raise ArtifactError(
            f"{source} says format version {version}, this parbank reads versions up to {FORMAT_VERSION}; "
            f"it was made by a newer parbank (upgrade this one) or is damaged ({_AGAIN})"
        )
    if length > MAX_HEADER_BYTES or _PREFIX.size + length > size:
        _refuse(
            source,
            f"its header claims {length:,} bytes; the file has {size:,}, and at most {MAX_HEADER_BYTES:,} are allowed",
        )
    text = file.read(length)
    if len(text) != length or _digest(prefix[:-DIGEST_BYTES] + text) != digest:
        _refuse(source, "its header does not match its checksum")
    if count_json(text) > MAX_JSON_VALUES:
        _refuse(source, f"its header holds more than {MAX_JSON_VALUES:,} values")
    try:
        header = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        _refuse(source, "its header is not valid JSON")
    if not isinstance(header, dict) or set(header) != {"meta", "sections"}:
        _refuse(source, "its header is malformed")
    return header, version


def count_json(text: bytes) -> int:
    """The most values that a JSON text can hold, found without parsing it."""
    return 1 + text.count(b",") + text.count(b"[") + text.count(b"{")


def _check_table(table: list[Any], source: str) -> int:
    """Checks that the sections follow each other without gap or overlap; returns where the last one ends."""
    seen: set[str] = set()
    offset = 0
    for entry in table:
        if not isinstance(entry, dict) or set(entry) != _ENTRY_FIELDS:
            _refuse(source, "its section table is malformed")
        name, size = entry["name"], entry["size"]
        if not isinstance(name, str) or not _NAME.match(name) or name in seen:
            _refuse(source, f"its section table has a bad or repeated name: {name!r}")
        if type(size) is not int or size < 0 or type(entry["offset"]) is not int or entry["offset"] != offset:
            _refuse(source, f"section {name} lies at {entry['offset']!r} with size {size!r}, expected at {offset}")
        seen.add(name)
        offset += size
    return offset


def _prefix(header: bytes) -> bytes:
    start = _PREFIX.pack(MAGIC, FORMAT_VERSION, len(header), b"")[:-DIGEST_BYTES]
    return start + _digest(start + header)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def _to_json(value: Any) -> bytes:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise ArtifactError(
            f"the artifact's meta must be plain JSON (tables, lists, text, finite numbers): {error}"
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("repeated key")
    return table


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse(source: str, what: str) -> NoReturn:
    raise ArtifactError(f"{source} is damaged: {what}; {_AGAIN}")
