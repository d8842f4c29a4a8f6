"""Errors that say what to do, and output that can be piped."""

import builtins
import errno
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parbank import __main__ as entry
from parbank.cli import main as cli
from parbank.errors import ConfigError, DataError
from tests.cli.calls import Call

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "named", "remedy"),
    [
        ("train --recipe nan", "'nan'", "did you mean nano"),
        ("train --recpie nano", "--recpie", "--recipe"),
        ("train --recipe nano --set model.layrs=3", "model.layrs", "did you mean model.layers"),
        ("train --recipe nano --set model.layers", "'model.layers'", "model.layers=6"),
        ("train --recipe nano --set model.layers=x", "'x'", "a whole number"),
        ("train --recipe nano --set model=3", "model", "model.layers"),
        ("train --recipe nano --data nonsense", "'nonsense'", "use stdlib; text:PATH"),
        ("train --recipe nano --data text:missing.txt", "missing.txt", "give files"),
        (
            "train --recipe nano --data text:empty.txt",
            "empty.txt is empty",
            "delete it, leave it out, or skip it by --skip-bad",
        ),
        ("train --recipe nano --data text:latin.txt", "latin.txt, byte 3", "iconv"),
        ("train --recipe nano --data text:short.txt", "short.txt", "give more text"),
        ("train --recipe nano --data text:a,b.txt", "/a does not exist", "globs"),
        ("train --recipe nano --data shards:missing", "missing is not a folder", "_train_"),
        ("train --recipe nano --data shards:", "shards:", "shards:DIR"),
        ("train --recipe nano --out file --data text:short.txt", "file", "choose another --out"),
        ("train --recipe nano --minutes 1 --steps 2", "--minutes, --steps", "give one of"),
        ("train --recipe nano --steps 3 --set budget.steps=9", "--set budget.steps=9 and --steps", "give one of"),
        ("train --recipe nano --minutes 3 --set budget.tokens=9", "--set budget.tokens=9 and --minutes", "give one of"),
        ("train --seed 6 --set seed=5", "--set seed=5 and --seed", "give one of"),
        ("plan --set recipe=nano", "--set recipe=nano", "--recipe"),
        ("train --recipe nano --minutes 0", "budget.minutes", "positive"),
        ("train --recipe nano --minutes nan", "nan", "a number"),
        ("train --recipe nano --minutes soon", "--minutes", "number"),
        ("train --recipe nano --max-bytes 2000", "2,000 bytes", "raise --max-bytes (at least"),
        ("train --recipe nano --seed -1", "-1", "not be negative"),
        ("train --recipe nano --seed 99999999999999999999", "99999999999999999999", "from 0 to"),
        ("train --recipe nano --device tpu", "'tpu'", "auto, cpu, cuda"),
        ("train --resume", "--resume", "--out"),
        ("train --resume --out missing", "missing holds no run", "folder of an earlier run"),
        ("train --resume --out missing", "holds no run to resume", "add --recipe to start one there"),
        ("eval", "ARTIFACT_OR_CHECKPOINT", "--help"),
        ("eval missing", "missing does not exist", "run folder"),
        ("eval missing.pbk", "missing.pbk does not exist", "RUN_FOLDER/model.pbk"),
        ("report x x", "a run is given twice", "give each run once"),
        (
            "study show missing",
            "missing holds no study that can be read (No such file or directory)",
            "parbank study run",
        ),
        ("eval short.txt", "short.txt is neither", ".pbk"),
        ("eval .", "no checkpoint at .", "run folder"),
        ("eval .", "no checkpoint at .", "its .pbk file"),
        ("train --recipe nano --data txt:short.txt", "unknown data 'txt:short.txt'", "did you mean text:short.txt?"),
        ("sample missing.pbk", "missing.pbk does not exist", "RUN_FOLDER/model.pbk"),
        ("pack missing --max-bytes 9", "missing", "run folder"),
        ("pack missing", "--max-bytes", "--help"),
        ("inspect missing.pbk", "missing.pbk does not exist", "RUN_FOLDER/model.pbk"),
        ("inspect .", ". is a folder", "model.pbk"),
        ("inspect short.txt", "short.txt is not a parbank artifact", "give a .pbk file"),
        ("data prepare --out x", "INPUT", "--help"),
        ("data prepare missing --out x", "missing does not exist", "give files"),
        ("data prepare short.txt --out file", "file is a file", "choose a folder"),
        ("data prepare short.txt --out . --vocab 300", "holds the current folder", "choose a folder inside it"),
        ("data prepare short.txt --out x --vocab 5", "vocabulary of 5", "choose 288 to 65536"),
        ("data info missing", "missing is not a folder", "_train_"),
        ("data fetch c4", "'c4'", "fineweb"),
        ("data fetch fineweb --source ./missing", "./missing is not a folder", "its name on the hub"),
        ("data fetch fineweb --shards 0", "0 shards", "1 or more"),
        ("recipes missing", "'missing'", "demo, golf, nano, sprint"),
        ("nonsense", "nonsense", "--help"),
    ],
)
def test_mistakes_end_in_one_message_that_says_what_and_what_to_do(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, named: str, remedy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "short.txt").write_text("too short\n", encoding="utf-8")
    (tmp_path / "a,b.txt").write_text("commas separate paths\n", encoding="utf-8")
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    answer = call(*arguments.split())
    assert answer.code == 2
    said = " ".join(re.sub("[│╭╮╰╯─]", "", answer.err).split())  # a usage error comes in a frame
    assert named in said
    assert remedy in said
    assert sorted(tmp_path.iterdir()) == before, "a refused command leaves nothing behind"


def test_debug_keeps_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["--debug", "recipes", "x"], ["recipes", "x", "--debug"]):
        monkeypatch.setattr(sys, "argv", ["parbank", *arguments])
        with pytest.raises(ConfigError, match="there is no recipe 'x'"):
            cli.main()


def test_ctrl_c_outside_training_ends_by_a_word(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    handlers: dict[int, object] = {}
    monkeypatch.setattr("parbank.cli.main.signal.signal", handlers.__setitem__)
    monkeypatch.setattr("parbank.data.prepare.prepare_text", interrupt)
    answer = call("data", "prepare", "x", "--out", tmp_path / "x")
    assert (answer.code, answer.err) == (130, "interrupted\n")
    assert handlers == {signal.SIGINT: signal.SIG_IGN}


def test_ctrl_c_during_imports_ends_by_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "parbank.cli.main":
            raise KeyboardInterrupt
        return importing(name, *arguments, **options)

    importing = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", interrupt)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")


def test_a_message_moves_no_cursor(call: Call) -> None:
    """A file may have any name, and a foreign one any field."""
    answer = call("eval", "a\x1b[2Jb.pbk")
    assert answer.code == 2
    assert "a\u241b[2Jb.pbk does not exist" in answer.err


class OutOfMemoryError(RuntimeError):
    """Named as PyTorch's."""


def test_what_is_said_by_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli._explain(ConfigError("wrong")) == "error: wrong"
    assert cli._explain(ValueError("a bug")) is None
    full = cli._explain(OSError(28, "No space left on device", "/full"))
    assert full is not None
    assert "No space left on device: '/full'" in full
    assert "free space" in full
    assert "micro_batch_tokens" in (cli._explain(OutOfMemoryError("CUDA out of memory")) or "")
    monkeypatch.setenv("RANK", "3")
    assert cli._explain(ConfigError("wrong")) == "", "eight ranks say it once"
    assert cli._explain(DataError("gone")) == "error on rank 3: gone"
    assert cli._explain(ValueError("a bug")) is None


def test_a_closed_pipe_is_no_crash() -> None:
    command = f"'{sys.executable}' -m parbank recipes golf | head -n 1"
    ended = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, cwd=ROOT, timeout=300, env=os.environ
    )
    assert ended.stdout == 'recipe = "golf"    # The recipe this started from.\n'
    assert ended.stderr == ""


def test_a_narrow_output_encoding_is_no_crash(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["parbank", "sample", str(trained), "--prompt", "é∞", "--tokens", "2"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    sys.stdout.flush()
    assert not ended.value.code
    assert raw.getvalue().startswith(b"??")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object: Cannot allocate memory"),
        ImportError("NumPy cannot be imported: libscipy_openblas64.so: failed to map segment from shared object\n"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        SystemError("error return without exception set"),
    ],
)
def test_too_little_memory_is_a_sentence(error: Exception) -> None:
    assert "this machine has too little memory" in (cli._explain(error) or "")


def test_a_library_that_may_not_be_loaded_is_no_lack_of_memory() -> None:
    assert cli._explain(ImportError("x.so: failed to map segment from shared object: Operation not permitted")) is None
