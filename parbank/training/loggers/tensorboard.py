"""TensorBoard events, in the folder `tensorboard` of the run.

Events are written at once, by this process. TensorBoard's own writer has a thread, and when the thread fails, as on a full
disk, it prints a traceback of its own.
"""

import itertools
import os
import socket
import time
import warnings
from pathlib import Path
from typing import Any

_numbers = itertools.count()


class TensorBoardLogger:
    """Writes each number of a row as a scalar of its name."""

    def __init__(self, out: Path, *, resume_step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside tensorboard's own imports
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        self._event, self._summary = Event, Summary
        folder = out / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers):06d}"
        self._file = open(folder / name, "xb")  # noqa: SIM115 (closed by `close`)
        self._records = RecordWriter(self._file)
        # A start hides the events of an abandoned attempt; its files stay.
        first = resume_step + 1
        self._write(step=first, file_version="brain.Event:2")
        self._write(step=first, session_log=SessionLog(status=SessionLog.START))
        self._file.flush()

    def write(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if name != "step" and value is not None:
                scalar = self._summary.Value(tag=name, simple_value=float(value))
                self._write(step=row["step"], summary=self._summary(value=[scalar]))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
