"""The folder of a run: new, or resumed."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from parbank.config import override
from parbank.errors import CheckpointError, ConfigError, reason
from parbank.files import HOLDER, locked, remove_leftovers, write_json
from parbank.runtime import Runtime
from parbank.training.checkpoint import list_checkpoints
from parbank.training.config import RunConfig, read_config

LOCK = ".run.lock"
UNFINISHED = ".unfinished"  # marks the folder as one that parbank writes to, until the run ends
WRITTEN = ("config.json", "metrics.jsonl", "model.pbk", "details.json", "summary.json", "report.html")


def load_run_config(out: Path, *assignments: str) -> RunConfig:
    """The config of an earlier run, with changes, from its folder or its config.json."""
    path = out / "config.json" if out.is_dir() else out
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{out} holds no run to resume ({reason(error)}); give --out the folder of an earlier run, or add --recipe to start "
            "one there"
        ) from error
    try:
        config = read_config(values)
    except ConfigError as error:
        raise ConfigError(
            f"{path} is not the config of a run: {error}; put back the file that the run wrote, or start another run"
        ) from error
    return override(config, *assignments)


@dataclass
class RunFolder:
    """A folder that this run holds."""

    checkpoint: Path | None
    """The checkpoint to resume from; none if the run starts at its beginning."""
    started: bool = False
    """Set when training begins. Until then a failure deletes the folder again, if it was created here."""


@contextmanager
def open_folder(out: Path, resume: bool, runtime: Runtime) -> Iterator[RunFolder]:
    """Holds the folder for one run, from before the data is prepared to the end. Only the first rank writes to it."""
    with ExitStack() as stack:
        folder = RunFolder(None)
        runtime.in_turn(lambda: stack.enter_context(_claim(out, resume, folder)) if runtime.is_main else None)
        folder.checkpoint = _newest(out) if resume else None
        yield folder


@contextmanager
def _claim(out: Path, resume: bool, folder: RunFolder) -> Iterator[None]:
    """Locks the folder, after checking that it can be written and that it holds nothing that this run would destroy."""
    for name in (HOLDER, UNFINISHED, *WRITTEN):  # first: files that a killed run left are not the user's
        remove_leftovers(out, name)
    _check_contents(out, resume)
    made = [path for path in (out, *out.parents) if not path.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(f"cannot write to {out}: {error.strerror or error}; choose another --out") from error
    try:
        with locked(out / LOCK, out):
            _check_contents(out, resume)  # again: another run may have ended since
            if not (resume and _newest(out)):
                write_json(out / UNFINISHED, {"made_by": "parbank"})
            try:
                yield
            except BaseException:
                if not folder.started:
                    (out / UNFINISHED).unlink(missing_ok=True)
                raise
            (out / UNFINISHED).unlink(missing_ok=True)
    except BaseException:
        if not folder.started:
            with suppress(OSError):  # keep a folder that other programs have written to meanwhile
                for path in made:
                    path.rmdir()
        raise


def _newest(out: Path) -> Path | None:
    """The checkpoint to resume from. A run that ended before its first checkpoint has none, and starts anew."""
    found = list_checkpoints(out / "checkpoint") or list_checkpoints(out)
    return found[-1] if found else None


def _check_contents(out: Path, resume: bool) -> None:
    """A new run needs an empty folder, or that of a run which ended before its first checkpoint."""
    if not out.is_dir():
        return
    names = {path.name for path in out.iterdir()} - {LOCK, HOLDER}
    if resume and _newest(out):
        others = sorted(names.intersection(WRITTEN))
        if others and "config.json" not in names:  # a run writes it before any other
            raise ConfigError(
                f"{out} holds {others[0]} and no config.json of a run, so the run would overwrite files that may be yours; move "
                "them away, or put the config.json back"
            )
        return
    if resume and "summary.json" in names:
        raise CheckpointError(f"the run in {out} has ended, and its checkpoints are gone; choose another --out")
    if list_checkpoints(out / "checkpoint") or "summary.json" in names:
        raise ConfigError(f"{out} already holds a run; continue it by --resume, or choose another --out")
    if names and (UNFINISHED not in names or "model.pbk" in names):
        some = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ConfigError(f"{out} is not empty ({some}), and a run would overwrite files; choose a new or empty --out")
