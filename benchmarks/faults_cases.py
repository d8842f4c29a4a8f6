"""Shared by the parts of faults.py: the form of a case and of a part, and the runs that cases begin from."""

import json
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from faults_processes import Ended, run_first

from parbank.training.checkpoint import find_checkpoint, load_checkpoint


@dataclass(frozen=True)
class Outcome:
    """One case."""

    index: int
    kind: str
    """What was done, such as `train` or `sound: table`."""
    ending: str
    """How it ended, as long as that is one of the ways that are promised."""
    fault: str = ""
    """What broke a promise; empty if nothing did."""
    seconds: float = 0.0
    megabytes: float = 0.0


@dataclass(frozen=True)
class Part:
    """What a module faults_PART gives as PART."""

    prepare: Callable[[Path, int], Any]
    """(folder for temporary files, seed) -> what the cases share."""
    attempt: Callable[[Any, int], Outcome]
    """(that, number of the case) -> its outcome."""
    measured: tuple[str, ...]
    """Files whose change makes a result stale."""
    total: Callable[[Any], int] | None = None
    """How many cases there are, where they are not drawn without end."""


MODULES = ("argparse", "calendar", "codecs", "random", "bisect", "stat")
"""Of the standard library: text that every machine has. The last two are for validation."""
STEPS = 6
VOCABULARY = 320
# The smallest run that saves after every step, reports, and is packed by the solver with calibration.
TRAIN = (
    "train", "--recipe", "nano", "--device", "cpu", "--steps", str(STEPS), "--set", "train.checkpoint_minutes=0.00001",
    "--set", "train.log_every=2", "--set", "quant.calibration_tokens=512", "--set", "budget.max_bytes=100000",
    "--set", "model.layers=2", "--set", "model.value_layers=[1]", "--set", "model.xsa_layers=1",
)  # fmt: skip
RESUME = ("train", "--resume", "--device", "cpu")
TIMES = ("seconds", "wait_seconds", "stalled_seconds")  # of a checkpoint: no two runs have the same


def write_text(folder: Path) -> str:
    """Some modules of the standard library in `folder`; returns their data spec."""
    for split, names in (("train", MODULES[:-2]), ("val", MODULES[-2:])):
        (folder / split).mkdir(parents=True, exist_ok=True)
        for name in names:
            source = Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py"
            shutil.copyfile(source, folder / split / source.name)
    return f"text:train={folder / 'train'},val={folder / 'val'},glob=*"


@dataclass(frozen=True)
class Reference:
    """A run that nobody disturbed, and where it lies."""

    spec: str
    cache: Path
    out: Path
    result: dict[str, Any]

    def train(self, out: Path) -> list[str]:
        return [*TRAIN, "--data", self.spec, "--out", str(out)]

    def resume(self, out: Path) -> list[str]:
        return [*RESUME, "--out", str(out)]


def make_reference(folder: Path) -> Reference:
    """Trains the reference."""
    spec, cache, out = write_text(folder / "text"), folder / "cache", folder / "reference"
    plain = Reference(spec, cache, out, {})
    shutil.rmtree(out, ignore_errors=True)
    require(run_first(plain.train(out), folder / "reference.log", cache=cache))
    return Reference(spec, cache, out, read_result(out))


def require(ended: Ended) -> None:
    if ended.code:
        raise SystemExit(f"the undisturbed command failed with {ended.code}:\n{ended.said}")


def read_result(out: Path) -> dict[str, Any]:
    """Everything of a run that must be the same bit by bit: all but its times."""
    summary = json.loads((out / "summary.json").read_bytes())
    state = load_checkpoint(find_checkpoint(out))
    return {
        "files": sorted(path.name for path in out.iterdir()),
        "checkpoints": sorted(path.name for path in (out / "checkpoint").iterdir()),
        "artifact": (out / "model.pbk").read_bytes(),
        "state": {key: value for key, value in state.items() if key not in TIMES},
        "summary": {key: summary[key] for key in ("steps", "val_bpb", "val_bpb_before_packing", "artifact_bytes")},
        "losses": read_losses(out),
    }


def read_losses(out: Path) -> dict[int, float]:
    """The loss of every second step, as the run logs it. After a resume, the second step is logged too, whichever it is."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["step"] % 2 == 0}


def differ(found: Any, expected: Any, path: str = "") -> str:
    """The first place where two results differ; empty if they are equal bit by bit."""
    if isinstance(expected, torch.Tensor):
        same = isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
        return "" if same else f"{path} differs"
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        pairs = ((str(key), found[key], expected[key]) for key in expected)
    elif isinstance(expected, list | tuple) and isinstance(found, list | tuple) and len(found) == len(expected):
        pairs = ((str(i), a, b) for i, (a, b) in enumerate(zip(found, expected)))
    else:
        shown = "" if isinstance(expected, bytes) else f": {str(found)[:200]} for {str(expected)[:200]}"
        return "" if type(found) is type(expected) and found == expected else f"{path or 'the result'} differs{shown}"
    return next((fault for key, a, b in pairs if (fault := differ(a, b, f"{path}/{key}"))), "")
