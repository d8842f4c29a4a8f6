"""Mutated files that are no artifacts: checkpoints, manifests, tokenizers, configs, shards, the record of a fetch. For faults.py.

Checkpoints are damaged byte by byte; or their fields are changed, and the file is written again with a sound digest.
"""

import io
import json
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from faults_artifacts import many_pieces
from faults_cases import VOCABULARY, Outcome, Part, Reference, make_reference, require
from faults_mutators import judge, mutate_bytes, mutate_json, odd_value
from faults_processes import measure, run

from parbank.data.dataset import describe
from parbank.data.manifest import MANIFEST, TOKENIZER
from parbank.data.sources.pins import PINS, Pins
from parbank.data.tokenizer import Tokenizer
from parbank.display import Display
from parbank.runtime import Runtime
from parbank.training.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from parbank.training.checks import check_settings, check_size
from parbank.training.folder import load_run_config
from parbank.training.load import load_model, load_trained
from parbank.training.run import run as train

CPU = Runtime(device=torch.device("cpu"))


@dataclass(frozen=True)
class Shared:
    folder: Path
    seed: int
    reference: Reference
    shards: Path
    """Prepared data."""
    state: dict[str, Any]
    """The reference's last checkpoint."""
    case: Path
    """A folder for the case."""


def prepare(folder: Path, seed: int) -> Shared:
    reference, shards = make_reference(folder), folder / "shards"
    if not shards.exists():
        words = ["data", "prepare", reference.spec, "--vocab", str(VOCABULARY), "--out", str(shards)]
        require(run(words, folder / "shards.log", cache=reference.cache))
    load_model(find_checkpoint(reference.out), CPU.device)  # imports what a first load needs
    return Shared(folder, seed, reference, shards, load_checkpoint(find_checkpoint(reference.out)), folder / "case")


def attempt(shared: Shared, index: int) -> Outcome:
    draw = random.Random(f"{shared.seed} {index}")
    kind = KINDS[index % len(KINDS)]
    shutil.rmtree(shared.case, ignore_errors=True)
    shared.case.mkdir()
    size, use = MUTATE[kind](draw, shared)
    return judge(index, kind, size, measure(use))


Case = tuple[int, Callable[[], object]]  # the size of the mutated file, and the call that reads it


def damage_checkpoint(draw: random.Random, shared: Shared) -> Case:
    path = find_checkpoint(shared.reference.out)
    whole = path.read_bytes()
    data = mutate_bytes(draw, whole)
    target = _write(shared.case / path.name, data)
    return len(data), lambda: refuse_change(whole, data, lambda: load_trained(target, CPU.device))


def refuse_change(whole: bytes, data: bytes, load: Callable[[], object]) -> None:
    """A change that no error names is a fault of its own."""
    load()
    if data != whole:
        raise AssertionError("a changed checkpoint was loaded")


def change_checkpoint(draw: random.Random, shared: Shared) -> Case:
    """Fields of another type or size, under a sound digest."""
    state = dict(shared.state)
    for _ in range(draw.choice((1, 1, 2))):
        state = _change_state(draw, state)
    try:
        target = save_checkpoint(shared.case, state, keep=1)
    except Exception:  # no step to name the file by, or a value that cannot be pickled
        target = save_checkpoint(shared.case, shared.state, keep=1)
    return target.stat().st_size, lambda: load_model(target, CPU.device)


def _change_state(draw: random.Random, state: Any) -> Any:
    """One value anywhere in the state: tensors get another shape, dtype, stride or layout."""
    if isinstance(state, torch.Tensor):
        return draw.choice((
            state.flatten(), state[:-1] if state.ndim and len(state) else state, state.double(), state.half(), state.int(),
            state.reshape(-1)[:1].expand(draw.choice((7, 1 << 20, 1 << 40))), torch.full_like(state.float(), float("nan")),
            torch.empty(state.shape, device="meta"), state.to_sparse() if state.ndim else state, torch.empty(0),
            torch.tensor(odd_number(draw)), state.bool(), state.to(torch.complex64),
        ))  # fmt: skip
    if isinstance(state, dict) and state and draw.random() < 0.95:
        key = draw.choice(sorted(state, key=str))
        action = draw.randrange(10)
        if action == 0:
            return {k: v for k, v in state.items() if k != key}
        if action == 1:
            return {**state, key: odd_value(draw)}
        return {**state, key: _change_state(draw, state[key])}
    if isinstance(state, list) and state and draw.random() < 0.9:
        place = draw.randrange(len(state))
        return [*state[:place], _change_state(draw, state[place]), *state[place + 1 :]]
    if isinstance(state, bytes):
        return mutate_bytes(draw, state)
    return odd_value(draw)


def odd_number(draw: random.Random) -> float:
    return draw.choice((0.0, -1.0, 1e30, float("inf"), float("nan")))


def resume_checkpoint(draw: random.Random, shared: Shared) -> Case:
    """The same, and the run goes on from it. Training itself takes more than 64 MB, so only its end counts."""
    out = shared.case / "run"
    shutil.copytree(shared.reference.out, out)
    (out / "summary.json").unlink()
    state = _change_state(draw, dict(shared.state))
    try:
        save_checkpoint(out / "checkpoint", state, keep=1)
    except Exception:
        save_checkpoint(out / "checkpoint", shared.state, keep=1)

    def resume() -> None:
        torch.set_num_threads(1)
        train(load_run_config(out), CPU, out, resume=True, display=Display(enabled=False))

    return 1 << 30, resume


def change_archive(draw: random.Random, shared: Shared) -> Case:
    """The members of the zip archive themselves: pickled code, other names, compression, sizes."""
    source, target = io.BytesIO(find_checkpoint(shared.reference.out).read_bytes()), shared.case / "step_00000006.pt"
    kind = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", kind) as new:
        chosen = draw.choice(old.namelist())
        for name in old.namelist():
            data = old.read(name)
            if name == chosen or (name.endswith("data.pkl") and draw.random() < 0.3):
                data = draw.choice(
                    (mutate_bytes(draw, data), b"", pickle.dumps([[]] * 10_000), bytes(500_000), data * 2)
                )
            if name != chosen or draw.random() < 0.9:
                new.writestr(name, data)
    return target.stat().st_size, lambda: load_trained(target, CPU.device)


def change_manifest(draw: random.Random, shared: Shared) -> Case:
    out = _copy_shards(shared)
    whole = (shared.shards / MANIFEST).read_bytes()
    data = mutate_text(draw, whole)
    (out / MANIFEST).write_bytes(data)
    return len(data), lambda: describe(out)


def change_config(draw: random.Random, shared: Shared) -> Case:
    """config.json of a run, as `train --resume` reads it."""
    out = shared.case / "run"
    out.mkdir()
    data = mutate_text(draw, (shared.reference.out / "config.json").read_bytes())
    (out / "config.json").write_bytes(data)

    return len(data), lambda: load_run_config(out)


def check_config(draw: random.Random, shared: Shared) -> Case:
    """The same, and then the checks before a run. They take what the model takes that the config asks for."""
    change_config(draw, shared)

    def use() -> None:
        config = load_run_config(shared.case / "run")
        check_settings(config, CPU)
        check_size(config, Display(enabled=False))

    return 1 << 30, use


def change_tokenizer(draw: random.Random, shared: Shared) -> Case:
    whole = (shared.shards / TOKENIZER).read_bytes()
    data = draw.choice(
        (mutate_bytes(draw, whole), mutate_bytes(draw, whole), many_pieces(draw), whole * 3, draw.randbytes(99))
    )
    target = _write(shared.case / TOKENIZER, data)

    def use() -> None:
        tokenizer = Tokenizer.load(target)
        text = "def f(x):\n\treturn x  # \u2581 é 漢字 \U0001f600\n"
        tokenizer.decode(tokenizer.encode(text))

    return len(data), use


def change_shard(draw: random.Random, shared: Shared) -> Case:
    """A shard, with the manifest that lists it or without."""
    out = _copy_shards(shared)
    if draw.random() < 0.7:
        (out / MANIFEST).unlink()
    path = draw.choice(sorted(out.glob("*.bin")))
    data = mutate_bytes(draw, path.read_bytes())
    path.write_bytes(data)
    return len(data), lambda: describe(out)


def change_pins(draw: random.Random, shared: Shared) -> Case:
    whole = {"source": "a/b", "revision": "c" * 40, "files": {"x.bin": "0" * 64}}
    data = mutate_text(draw, json.dumps(whole).encode())
    _write(shared.case / PINS, data)
    _write(shared.case / "x.bin", b"x")

    def use() -> None:
        pins = Pins.read(shared.case)
        pins.agree("a/b", "")
        pins.check(shared.case / "x.bin", "x.bin")

    return len(data), use


def mutate_text(draw: random.Random, whole: bytes) -> bytes:
    """JSON with other values, or other bytes, or nested far too deep."""
    action = draw.randrange(10)
    if action < 6:
        return json.dumps(mutate_json(draw, json.loads(whole))).encode("utf-8", "surrogatepass")
    if action < 9:
        return mutate_bytes(draw, whole)
    return draw.choice(
        (b"[" * 100_000, b'{"a":' * 100_000, b"\xff" + whole, b"", b"1" * 100_000, b"[" + b"{}," * 300_000 + b"0]")
    )


def _copy_shards(shared: Shared) -> Path:
    out = shared.case / "shards"
    shutil.copytree(shared.shards, out)
    return out


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


MUTATE: dict[str, Callable[[random.Random, Shared], Case]] = {
    "checkpoint: bytes": damage_checkpoint,
    "checkpoint: fields": change_checkpoint,
    "checkpoint: archive": change_archive,
    "checkpoint: resumed": resume_checkpoint,
    "manifest": change_manifest,
    "config": change_config,
    "config: checked": check_config,
    "tokenizer": change_tokenizer,
    "shard": change_shard,
    "record of a fetch": change_pins,
}
# A resume takes a second where the others take milliseconds, so it is one case in nineteen.
KINDS = (*(kind for kind in MUTATE if kind != "checkpoint: resumed"), *(kind for kind in MUTATE))
PART = Part(prepare, attempt, ("benchmarks/faults_files.py", "benchmarks/faults_mutators.py"))
