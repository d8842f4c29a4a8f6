"""Errors for the person at the keyboard.

Each message says what was wrong, what was given, what is allowed, and what to do. The command line prints it without
a traceback. Any other exception is a bug in parbank and keeps its traceback.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class ParbankError(Exception):
    """Base of every error that a user can cause and fix."""


class ConfigError(ParbankError, ValueError):
    """A setting, or a combination of settings, that cannot be run. Also a ValueError, as PyTorch raises for options."""


class DataError(ParbankError):
    """Text, shards or a tokenizer that cannot be used."""


class ArtifactError(ParbankError):
    """A packed model that is damaged, foreign, or does not fit its cap."""

    @classmethod
    def damaged(cls, source: str, what: str) -> "ArtifactError":
        """The error for a file, or a part of one, whose bytes differ from those that were written."""
        return cls(f"{source} is damaged: {what}; copy or download it again, or write it again with `parbank pack`")


class FileError(ParbankError):
    """A file or folder that cannot be written."""


class CheckpointError(ParbankError):
    """A checkpoint that is missing, damaged, or of another run."""


class DeviceError(ParbankError):
    """A requested device or process group that does not exist."""


class RankError(ParbankError):
    """Ranks that differ from each other, or a rank that is lost."""


class TrainingError(ParbankError):
    """Training that cannot continue."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that this machine's memory is used up. Threads that cannot start are a sign of it, too: each
    needs memory for its stack. So are libraries that cannot be loaded."""
    text = str(error)
    if isinstance(error, ImportError):  # where the system forbids to map a library, the reason comes after these words
        return text.rstrip().endswith(("failed to map segment from shared object", "annot allocate memory"))
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, SystemError):  # an extension failed without a word: it did not get memory
        return text == "error return without exception set"
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in _OUT_OF_MEMORY)
    )


def reason(error: Exception) -> str:
    """The text of an error. Of an OSError, only the system's words: the message around them names the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


# Words of PyTorch, C++, Python and pthreads, whose errors have no type of their own for this.
_OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc", "can't start new thread", "Resource temporarily unavailable")


@contextmanager
def enough_memory(kind: type[ParbankError], path: object) -> Iterator[None]:
    """Inside this context, too little memory to read a file is an error of `kind` that names the file."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise kind(f"there is not enough memory to read {path}; end other programs, or use a larger machine") from error
