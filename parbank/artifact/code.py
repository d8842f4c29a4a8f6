"""The source that somebody needs beside an artifact to read it, and what it counts towards a cap."""

import lzma
from pathlib import Path

import parbank


def code_bytes() -> int:
    """parbank's own source, compressed."""
    root = Path(parbank.__file__).parent
    source = b"".join(path.read_bytes() for path in sorted(root.rglob("*.py")))
    return len(lzma.compress(source, preset=9))
