"""Errors for the person at the keyboard.

Each message says what was wrong, what was given, what is allowed, and what to do. The command line prints it without
a traceback. Any other exception is a bug in parbank and keeps its traceback.
"""


class ParbankError(Exception):
    """Base of every error that a user can cause and fix."""


class ConfigError(ParbankError):
    """A setting, or a combination of settings, that cannot be run."""


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


class TrainingError(ParbankError):
    """Training that cannot continue."""
