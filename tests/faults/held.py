"""`parbank` in a process that a test can hold at a line of its output.

    python -m tests.faults.held FILE train --recipe nano ...

FILE contains a text. After a line with this text the process waits until the test deletes FILE, or writes another text to
it. So a run cannot get ahead of its test, however long a busy machine stalls the one or the other. Only the main thread
waits: signals arrive, and a rank still answers the others.
"""

import io
import os
import sys
import time
from pathlib import Path

from parbank.cli.main import main


class HeldOutput(io.TextIOWrapper):
    """Standard output whose flush returns once its line may be passed."""

    def __init__(self, stream: io.TextIOWrapper, file: Path) -> None:
        super().__init__(stream.detach(), encoding=stream.encoding, errors=stream.errors)
        self._file, self._line, self._parent = file, "", os.getppid()

    def write(self, text: str) -> int:
        self._line += text
        return super().write(text)

    def flush(self) -> None:
        super().flush()
        line, self._line = self._line, ""
        while self._is_held(line) and os.getppid() == self._parent:  # no longer than there is a test
            time.sleep(0.01)

    def _is_held(self, line: str) -> bool:
        try:
            return self._file.read_text(encoding="utf-8") in line
        except FileNotFoundError:
            return False


if __name__ == "__main__":
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout = HeldOutput(sys.stdout, Path(sys.argv[1]))
    sys.argv[:2] = ["parbank"]
    main()
