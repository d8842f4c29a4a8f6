"""Files into one `.pbz` file, and back.

Names are relative and stay inside the folder that they are decompressed to. Nothing is overwritten. A file appears under
its name only when all of its bytes are there and checked.
"""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from parbank.artifact.load import LoadedModel
from parbank.data.progress import Say, say_nothing
from parbank.errors import ArtifactError, ConfigError, FileError
from parbank.eval.compressor.blocks import BlockReader, BlockWriter, Tally
from parbank.eval.compressor.container import Header, read_blocks, read_header, write_end, write_header
from parbank.eval.compressor.identity import describe_machine, find_differences, hash_model
from parbank.eval.compressor.pieces import read_pieces
from parbank.eval.score import Progress, silent
from parbank.files import writing


@dataclass(frozen=True)
class Written:
    """A file that was compressed."""

    size: int
    """Bytes of the whole file."""
    content: int
    """Bytes of the files in it."""
    tally: Tally

    @property
    def overhead(self) -> int:
        """Bytes of the header and of the blocks' heads, and of blocks that the model did not code."""
        return self.size - self.tally.coded


def compress(
    paths: Sequence[Path],
    loaded: LoadedModel,
    out: Path,
    *,
    segments: int | None = None,
    always_model: bool = False,
    progress: Progress = silent,
    say: Say = say_nothing,
) -> Written:
    """Writes the files to `out`, which must not exist. `always_model`: text is never stored by xz, even where that would be
    smaller."""
    named = name_files(paths)
    refuse_existing(out, "delete it, or give another name with -o")
    sizes = [path.stat().st_size for path, _ in named]
    files = [(name, size) for (_, name), size in zip(named, sizes)]
    header = make_header(loaded, files)
    try:
        with writing(out) as file:
            write_header(file, header)
            advance = share_of(sum(sizes), progress)
            writer = BlockWriter(file, loaded, segments, advance, always_model=always_model)
            for (path, name), size in zip(named, sizes):
                _add_file(writer, path, name, size, say)
            writer.flush()
            write_end(file)
            refuse_existing(out, "another program has just made it")
    except OSError as error:
        raise FileError(f"cannot write {out}: {error.strerror or error}; check the path and the free space") from error
    if refused := writer.tally.refused:
        say(f"note: {refused:,} bytes of text are stored by xz: the model would have made them larger")
    return Written(out.stat().st_size, sum(sizes), writer.tally)


def make_header(loaded: LoadedModel, files: list[tuple[str, int]]) -> Header:
    machine = describe_machine(loaded.model.token_embedding.weight.device)
    return Header(model=hash_model(loaded), context=loaded.context, made_with=machine, files=files)


def _add_file(writer: BlockWriter, path: Path, name: str, size: int, say: Say) -> None:
    read = stored = 0
    for piece in _read_file(path):
        by_model = writer.add(piece, new_file=read == 0)
        read += len(piece)
        stored += 0 if by_model else len(piece)
    if read != size:
        raise FileError(f"{path} changed while it was read; compress it again when nothing writes to it")
    if stored:
        say(f"note: {stored:,} of {size:,} bytes of {name!a} are not text; they are stored by xz, not by the model")


def _read_file(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            yield from read_pieces(file)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}; check its permissions") from error


def name_files(paths: Sequence[Path]) -> list[tuple[Path, str]]:
    """Every file with its name in the archive: its path if that is relative and goes down only, else its last part."""
    named: dict[str, Path] = {}
    for path in paths:
        refuse_stream(path)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; give files that exist") from error
        if not stat.S_ISREG(mode):
            if stat.S_ISDIR(mode):
                raise ConfigError(f"{path} is a folder; give files, such as {path}/*")
            raise ConfigError(f"{path} is no regular file; write its content to a file first")
        plain = PurePosixPath(os.path.normpath(path))
        name = plain.name if plain.is_absolute() or ".." in plain.parts else str(plain)
        if named.get(name) == path:
            raise ConfigError(f"{path} is given twice; give each file once")
        if name in named:
            raise ConfigError(f"{named[name]} and {path} would both be named {name!a}; compress them one by one")
        named[name] = path
    return [(path, name) for name, path in named.items()]


def check_targets(path: Path, folder: Path) -> Header:
    """The header of a compressed file, all of whose files can be written into a folder."""
    with _opened(path) as file:
        header = read_header(file, str(path))
    _find_targets(header, folder, str(path))
    return header


def _find_targets(header: Header, folder: Path, source: str) -> list[Path]:
    """Where the files go. Nothing may be there."""
    targets = [place_inside(folder, name, source) for name, _ in header.files]
    if len(set(targets)) < len(targets):
        raise ArtifactError(f"{source} holds two files of one name; parbank does not write such files")
    for target in targets:
        refuse_existing(target, "move it, or give another folder with -o")
    return targets


def refuse_existing(path: Path, remedy: str) -> None:
    """A symbolic link counts as a file, even if its target is missing."""
    if os.path.lexists(path):
        raise FileError(f"{path} exists, and nothing is overwritten; {remedy}")


def refuse_stream(path: Path) -> None:
    """Refuses -, which other programs take for standard input or output."""
    if str(path) == "-":
        raise ConfigError("- stands for standard input or output, and only files are read and written; name a file")


def _opened(path: Path) -> BinaryIO:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ArtifactError(f"{path} is not a regular file; give a .pbz file")
        return open(path, "rb")
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}; check the path and its permissions") from error


def decompress(
    path: Path,
    loaded: LoadedModel,
    folder: Path,
    *,
    progress: Progress = silent,
    say: Say = say_nothing,
) -> list[Path]:
    """Writes the files of `path` into a folder, and returns their paths."""
    with _opened(path) as file:
        header = read_header(file, str(path))
        targets = _find_targets(header, folder, str(path))
        content = read_content(file, header, loaded, str(path), progress=progress, say=say)
        try:
            _write_files(targets, [size for _, size in header.files], content)
        except OSError as error:
            raise FileError(f"cannot write into {folder}: {error.strerror or error}; give another with -o") from error
    return targets


def read_content(
    file: BinaryIO,
    header: Header,
    loaded: LoadedModel,
    source: str,
    *,
    progress: Progress = silent,
    say: Say = say_nothing,
) -> Iterator[bytes]:
    """The content after a header, block by block; every block is checked before it is given. Another model is refused at
    once, before a caller has written anything."""
    if header.model != (ours := hash_model(loaded)):
        raise ArtifactError(
            f"{source} was compressed with another model ({header.model[:12]}) than {loaded.source} ({ours[:12]}); give that "
            "model with --model"
        )
    if header.context != loaded.context:
        raise ArtifactError(
            f"{source} was compressed with a window of {header.context:,} tokens, and {loaded.source} has {loaded.context:,}; give "
            "that model with --model"
        )
    differs = find_differences(header.made_with, describe_machine(loaded.model.token_embedding.weight.device))
    if differs:
        say(f"note: made elsewhere ({'; '.join(differs)}): what does not decode exactly is refused")
    return _decode(file, header, loaded, source, progress, differs)


def _decode(
    file: BinaryIO, header: Header, loaded: LoadedModel, source: str, progress: Progress, differs: list[str]
) -> Iterator[bytes]:
    """`differs`: phrases for what differs between this machine and the one that made the file."""
    total = sum(size for _, size in header.files)
    reader = BlockReader(loaded, header.context, source, share_of(total, progress))
    for block in read_blocks(file, total, source):
        data = reader.read(block)
        if data is None:
            raise ArtifactError(
                f"{source} cannot be decoded here: the model computes other probabilities than when it was compressed "
                f"({'; '.join(differs) or 'the header shows no difference'}); use the machine and versions that compressed it"
            )
        yield data


def _write_files(targets: list[Path], sizes: list[int], content: Iterator[bytes]) -> None:
    held = b""
    for number, (target, size) in enumerate(zip(targets, sizes), start=1):
        with writing(target) as file:
            left = size
            while left:
                held = held or next(content)  # the container checks that there are enough
                file.write(held[:left])
                left, held = left - min(left, len(held)), held[left:]
            if number == len(targets):
                next(content, None)  # checks the end before the last file gets its name
            refuse_existing(target, "another program has just made it")


def place_inside(folder: Path, name: str, source: str) -> Path:
    """The path of a file inside the folder. A name that leads out of the folder is refused."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or not _can_name(name):
        raise ArtifactError(f"{source} holds the unsafe name {name!a}; parbank does not write such names")
    target = folder.joinpath(*parts)
    root = folder.resolve()
    if root not in target.parent.resolve().joinpath(target.name).parents:  # a link inside the folder leads out of it
        raise ArtifactError(f"{name!a} of {source} would be written outside {folder}, through a link; remove the link")
    return target


def _can_name(name: str) -> bool:
    """Whether a file system has such names: without a zero byte, and encodable."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def share_of(total: int, progress: Progress) -> Callable[[float], None]:
    done = 0.0

    def advance(more: float) -> None:
        nonlocal done
        done += more
        progress(min(done / max(total, 1), 1.0))

    return advance
