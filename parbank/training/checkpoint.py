"""Checkpoints: one file each, written under another name and renamed, so that a kill at any moment leaves the previous
one readable.

A checkpoint holds everything a run needs to continue exactly (weights, optimizer, averages, data position, random
states, clock) and everything `eval` and `pack` need (config, tokenizer). A file carries a digest of its bytes (seal.py).
It is read with torch.load's weights_only, which runs no pickled code.
"""

import math
import random
import re
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch

from parbank.errors import CheckpointError, enough_memory
from parbank.files import remove_leftovers, writing
from parbank.training.seal import SealingWriter, check_archive

FORMAT = 1
SEALED = "sealed"  # the field that says that the file has a digest, so that a digest cannot go missing
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RuntimeError)
"""The errors of reading fields that are missing, of another type, or of another size."""
_AGAIN = "use an older one, or train again"
_NAME = re.compile(r"step_(\d+)\.pt")


def save_checkpoint(folder: Path, state: dict[str, Any], *, keep: int) -> Path:
    """Writes step_N.pt for state["step"] and deletes all but the newest `keep`."""
    path = folder / f"step_{state['step']:08d}.pt"
    try:
        with writing(path) as file:
            sealing = SealingWriter(file)
            torch.save({"format": FORMAT, SEALED: True, **state}, cast(BinaryIO, sealing))
            sealing.seal()
    except (OSError, RuntimeError, MemoryError) as error:  # torch.save wraps whatever ends a write in a RuntimeError
        if isinstance(error.__context__, KeyboardInterrupt | SystemExit):
            raise error.__context__ from None
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {reason}; free some space or choose another --out"
        ) from error
    remove_leftovers(folder, "step_*.pt")
    for stale in list_checkpoints(folder)[:-keep]:
        stale.unlink(missing_ok=True)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    found = [(int(match[1]), path) for path in folder.glob("step_*.pt") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def find_checkpoint(path: Path) -> Path:
    """A checkpoint file from a path to one, to a checkpoint folder, or to a run folder (the newest)."""
    if path.is_file():
        return path
    for folder in (path / "checkpoint", path):
        if found := list_checkpoints(folder):
            return found[-1]
    if (path / "config.json").is_file():
        raise CheckpointError(
            f"the run in {path} ended before it wrote a checkpoint; start it again. train.checkpoint_minutes says how often one is "
            "written"
        )
    raise CheckpointError(
        f"no checkpoint at {path}; give a run folder, its checkpoint folder, a step_N.pt file, or for a packed model its .pbk file"
    )


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Reads one file onto the CPU. Anything but a complete parbank checkpoint is an error that names the file."""
    try:
        with enough_memory(CheckpointError, path):
            sealed = check_archive(path)
            state = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint at {path}") from None
    except Exception as error:  # torch.load has no one error for damaged files
        raise CheckpointError(f"{path} is damaged or not a checkpoint ({first_line(error)}); {_AGAIN}") from error
    if not isinstance(state, dict) or "format" not in state or "model" not in state:
        raise CheckpointError(f"{path} is a PyTorch file, but not a parbank checkpoint")
    if state["format"] != FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {state['format']}; this parbank reads format {FORMAT}")
    if state.pop(SEALED, False) and not sealed:
        raise CheckpointError(f"{path} is damaged: its digest is missing; {_AGAIN}")
    _check_tensors(state, path)
    return state


def _check_tensors(state: dict[str, Any], path: Path) -> None:
    """Refuses tensors that together claim more numbers than the file has: copies of them could take any memory."""
    left: float = path.stat().st_size
    waiting, seen = [state], set()
    while waiting:
        value: Any = waiting.pop()
        if isinstance(value, dict | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, torch.Tensor):
            whole = value.layout is torch.strided and value.device.type == "cpu"
            left -= value.nbytes if whole else math.inf
            if left < 0:
                raise CheckpointError(f"{path} is damaged: its tensors claim more numbers than it holds; {_AGAIN}")


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def random_state() -> dict[str, Any]:
    """The states of all random generators of a run, as plain values and tensors."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
