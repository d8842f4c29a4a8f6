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
                self._add(row["step"], tag=name, simple_value=float(value))
        self._file.flush()

    def write_details(self, step: int, details: dict[str, Any]) -> None:
        """Samples as texts, and the histogram of the bits that tokens take."""
        for number, sample in enumerate(details.get("samples", ())):
            text = _make_text(sample["prompt"] + sample["text"])
            self._add(step, tag=f"sample/{number}/text_summary", **text)
        if found := details.get("bits_histogram"):
            self._add(step, tag="bits_of_a_token", histo=_make_histogram(found["counts"], found["width"]))
        self._file.flush()

    def _add(self, step: int, **fields: Any) -> None:
        self._write(step=step, summary=self._summary(value=[self._summary.Value(**fields)]))

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


def _make_text(text: str) -> dict[str, Any]:
    """The fields of a text, as a block of code: TensorBoard reads texts as Markdown."""
    from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    block = "\n".join(f"    {line}" for line in text.splitlines())
    about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return {"metadata": about, "tensor": TensorProto(dtype=DT_STRING, string_val=[block.encode("utf-8", "replace")])}


def _make_histogram(counts: list[int], width: float) -> Any:
    """Bins of equal width from 0 on, with sums as if values lay in the middle of their bins."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    middles = [width * (n + 0.5) for n in range(len(counts))]
    return HistogramProto(
        min=0.0,
        max=width * len(counts),
        num=sum(counts),
        sum=sum(n * x for n, x in zip(counts, middles)),
        sum_squares=sum(n * x * x for n, x in zip(counts, middles)),
        bucket_limit=[width * (n + 1) for n in range(len(counts))],
        bucket=counts,
    )
