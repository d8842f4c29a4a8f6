"""Errors meant for the person at the keyboard.

Each message says what was wrong, what was given, what is allowed, and what to do. The command line prints it without a
traceback; anything that is not a ParbankError is a bug in parbank and keeps its traceback.
"""


class ParbankError(Exception):
    """Base of every error a user can cause and mend."""


class ConfigError(ParbankError):
    """A setting, or a combination of settings, that cannot be run."""


class DataError(ParbankError):
    """Text, shards or a tokenizer that cannot be used."""


class ArtifactError(ParbankError):
    """A packed model that is damaged, foreign, or does not fit its cap."""

    @classmethod
    def damaged(cls, source: str, what: str) -> "ArtifactError":
        """For a file, or a place in one, whose bytes are not those that were written."""
        return cls(f"{source} is damaged: {what}; copy or download it again, or write it anew with `parbank pack`")


class FileError(ParbankError):
    """A file or folder that cannot be written."""


class CheckpointError(ParbankError):
    """A checkpoint that is missing, damaged, or of another run."""


class DeviceError(ParbankError):
    """A device or process group that was asked for and is not there."""


class TrainingError(ParbankError):
    """Training that cannot go on."""
