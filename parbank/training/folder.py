"""The folder of a run: new, or resumed."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from parbank.config import override
from parbank.errors import CheckpointError, ConfigError
from parbank.runtime import Runtime
from parbank.training.checkpoint import find_checkpoint, list_checkpoints
from parbank.training.config import RunConfig, read_config


def load_run_config(out: Path, *assignments: str) -> RunConfig:
    """The config of an earlier run, with changes."""
    try:
        values = json.loads((out / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{out} holds no run to resume ({error}); give --out the folder of an earlier run"
        ) from error
    return override(read_config(values), *assignments)


@contextmanager
def open_folder(out: Path, resume: bool, runtime: Runtime) -> Iterator[Path | None]:
    """The checkpoint to resume from, or None in an unused folder.

    Tests here, before the data is prepared, whether the folder can be written. If the block fails, a folder that was
    created here is deleted again.
    """
    if resume:
        yield find_checkpoint(out)
        return
    if list_checkpoints(out / "checkpoint") or (out / "summary.json").exists():
        raise ConfigError(f"{out} already holds a run; go on with it by --resume, or choose another --out")
    if not runtime.is_main:
        yield None
        return
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror or error}; choose another --out") from error
    try:
        yield None
    except BaseException:
        with suppress(OSError):  # a folder that somebody else has put something into meanwhile stays
            for folder in made:
                folder.rmdir()
        raise
