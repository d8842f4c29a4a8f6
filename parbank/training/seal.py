"""A digest of a whole checkpoint, in the file itself, so that no damaged byte goes unnoticed.

torch.save writes a zip archive, and torch.load looks at none of its checksums. The seal is the archive's comment: a mark,
and the sha256 of the archive as torch.save wrote it. Other programs read a sealed file as before.
"""

import hashlib
import os
import pickletools
import zipfile
from pathlib import Path
from typing import BinaryIO

_MARK = b"parbank sha256 "
_SEAL_BYTES = len(_MARK) + 64
_LENGTH_BYTES = 2  # the length of the comment: the last field of the archive, zero before the file is sealed
_BLOCK = 1 << 20


class SealingWriter:
    """Passes an archive on to a file and computes its digest. `seal` appends the digest when the archive is complete."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def seal(self) -> None:
        self._file.seek(-_LENGTH_BYTES, os.SEEK_CUR)
        self._file.write(_SEAL_BYTES.to_bytes(_LENGTH_BYTES, "little"))
        self._file.write(_MARK + self._digest.hexdigest().encode())


def check_archive(path: Path) -> bool:
    """Refuses an archive that is damaged, or that claims more than its size, with BadZipFile. Returns whether the file is
    sealed. Files of earlier versions are not: their members are compared with the checksums of zip instead."""
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        size = os.fstat(file.fileno()).st_size
        # torch.save compresses nothing, so members cannot be larger than their file.
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise zipfile.BadZipFile("it holds compressed members")
        if sum(member.file_size for member in members) > size:
            raise zipfile.BadZipFile("its members claim more bytes than the file has")
        for member in members:
            if member.filename.endswith("/data.pkl"):
                _check_pickle(archive.read(member))
        if archive.comment.startswith(_MARK):
            if _hash_archive(file, size) != archive.comment[len(_MARK) :]:
                raise zipfile.BadZipFile("its bytes do not match its digest")
            return True
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        return False


def _hash_archive(file: BinaryIO, size: int) -> bytes:
    """The sha256 of a sealed file as it was before the seal."""
    digest, left = hashlib.sha256(), size - _SEAL_BYTES - _LENGTH_BYTES
    file.seek(0)
    while left > 0 and (block := file.read(min(_BLOCK, left))):
        digest.update(block)
        left -= len(block)
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    digest.update((length ^ _SEAL_BYTES).to_bytes(_LENGTH_BYTES, "little"))  # zeros, as before the seal
    return digest.hexdigest().encode()


def _check_pickle(data: bytes) -> None:
    """Refuses a bytearray, which torch.load would make at any length that a few bytes claim. torch.save writes none of our
    values as one. A pickle that ends in an error here does so in torch.load, too."""
    for operation, value, _ in pickletools.genops(data):
        named = operation.name == "GLOBAL" and str(value).endswith(
            " bytearray"
        )  # also by its older module, __builtin__
        if named or operation.name == "STACK_GLOBAL":
            raise zipfile.BadZipFile("it holds an array of bytes, or code of another pickle protocol")
