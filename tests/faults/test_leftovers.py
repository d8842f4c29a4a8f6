"""A killed writer leaves a temporary file; the next writer of the same name removes it."""

import subprocess
import sys
from pathlib import Path

from parbank.files import write_file

KILLED = """
import sys
from parbank.files import writing
with writing(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("open", flush=True)
    sys.stdin.read()
"""


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    target = tmp_path / "model.pbk"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        write_file(target, b"mine")  # the other writer is alive: its file stays
        assert len(list(tmp_path.iterdir())) == 2
        process.kill()
    write_file(target, b"whole")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"model.pbk": b"whole"}
