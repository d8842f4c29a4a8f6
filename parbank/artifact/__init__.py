"""The file format: named sections of bytes under a checksummed header. It knows nothing of models."""

from parbank.artifact.container import (
    FORMAT_VERSION,
    Artifact,
    decode_artifact,
    encode_artifact,
    is_artifact,
    read_artifact,
    write_artifact,
    write_file,
)

__all__ = [
    "FORMAT_VERSION",
    "Artifact",
    "decode_artifact",
    "encode_artifact",
    "is_artifact",
    "read_artifact",
    "write_artifact",
    "write_file",
]
