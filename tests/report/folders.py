"""Run folders as parbank writes them, without training: quick, and the same every time."""

import json
import math
import random
from pathlib import Path
from typing import Any

from parbank.config import override, to_dict
from parbank.recipes import get_recipe

TEXT = "The sea was calm, and the boat lay still. def main(self):\n    return value\n"


def make_run(
    folder: Path,
    *settings: str,
    recipe: str = "sprint",
    seed: int = 0,
    gpu: bool = True,
    rows_of: int = 90,
    **changes: Any,
) -> Path:
    """A finished run with so many rows. `changes` replace entries of the summary; a None for `details` leaves that file
    out."""
    folder.mkdir(parents=True)
    dice = random.Random(seed)
    config = override(get_recipe(recipe), f"seed={seed}", *settings)
    _write(folder / "config.json", to_dict(config))
    rows = [_row(n, dice, config.optim.matrix_lr, gpu) for n in range(1, rows_of + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    details = changes.pop("details", {})
    score = rows[-1]["loss"] / 2.4 + dice.gauss(0, 0.001)
    if details is not None:
        _write(folder / "details.json", make_details(dice, score) | details)
    _write(folder / "summary.json", _summary(rows, score, seed, recipe, gpu) | changes)
    return folder


def _row(n: int, dice: random.Random, lr: float, gpu: bool) -> dict[str, Any]:
    row = {
        "step": 10 * n,
        "tokens": 1_966_080 * n,
        "seconds": 1.31 * n,
        "loss": 2.7 + 4.2 * math.exp(-n / 7) + 0.9 * math.exp(-n / 60) + dice.gauss(0, 0.02),
        "lr": lr * max(0, min(1, 2 - n / 45)),
        "grad_norm": 0.3 + 0.6 * math.exp(-n / 12) + dice.random() / 20,
        "tokens_per_second": 1.5e6 + dice.gauss(0, 9000),
        "data_wait": abs(dice.gauss(0, 2e-5)),
        "memory": 38_000_000_000,
        "skipped": 0,
    }
    if gpu:
        row |= {"gpu_clock_mhz": 1905 - 150 * (n > 12), "gpu_power_w": min(690, 300 + 60 * n) + dice.gauss(0, 4)}
    if n % 9 == 0:
        row["val_bpb"] = row["loss"] / 2.4 + 0.02
    return row


def make_details(dice: random.Random, score: float) -> dict[str, Any]:
    sizes = [500 + 37 * n % 3500 for n in range(120)]  # one text for all runs
    pieces = TEXT.split(" ")
    return {
        "format": 1,
        "ended_at": "2026-11-16T10:20:30+00:00",
        "commit": "8493a9e61",
        "machine": {"processor": "Xeon", "cores": 16, "memory": 137_438_953_472},
        "sections": {"tokenizer": 14_211},
        "tensors": [_tensor(n, dice) for n in range(24)],
        "by_context": [_part(n, dice, 2.4) for n in range(12)],
        "by_place": [_part(n, dice, 2.1) for n in range(14)],
        "documents": {"bytes": sizes, "bits": [round(n * (score + dice.gauss(0, 0.2)), 2) for n in sizes]},
        "surprise": {
            "pieces": [f"{piece} " for piece in pieces] * 20,
            "bits": [round(dice.expovariate(0.35), 2) for _ in pieces * 20],
        },
        "samples": [{"prompt": "", "text": TEXT * 3}, {"prompt": "The boat", "text": " lay still." + TEXT}],
    }


def _tensor(n: int, dice: random.Random) -> dict[str, Any]:
    small, weights = n % 6 == 5, (512, 512 * 1536, 512 * 512, 256 * 512)[n % 4]
    bits = 16 if small else dice.uniform(3.5, 5.5)
    return {
        "name": f"blocks.{n}.{('attention.query', 'mlp.up', 'mlp.down', 'attention.out', 'norm', 'gains')[n % 6]}.weight",
        "shape": [weights // 512, 512],
        "role": "other" if small else "matrix",
        "count": weights,
        "levels": 0 if small else 31,
        "packed_bytes": weights * bits / 8 + 20,
        "integer_bits": 0 if small else weights * bits,
        "entropy_bits": 0 if small else weights * (bits + 0.1),
        "error": None if small else dice.uniform(0.02, 0.06),
        "cost_nats": None if small else dice.uniform(1e-6, 8e-5),
    }


def _part(n: int, dice: random.Random, start: float) -> dict[str, Any]:
    first, last = (0, 0) if n == 0 else (2 ** (n - 1), 2**n - 1)
    size = 1000 * (last - first + 1)
    return {"first": first, "last": last, "tokens": size // 2, "bytes": size, "bits": size * (1 + start / (n + 1))}


def _summary(rows: list[dict[str, Any]], score: float, seed: int, recipe: str, gpu: bool) -> dict[str, Any]:
    last = rows[-1]
    return {
        "recipe": recipe,
        "val_bpb": score + 0.0008,
        "val_bpb_before_packing": score,
        "val_loss": score * 2.4,
        "val_bytes": 526_910,
        "val_tokens": 198_986,
        "val_overlap": 0.11,
        "max_bytes": 16_000_000,
        "steps": last["step"],
        "skipped_steps": 0,
        "tokens": last["tokens"],
        "tokens_per_second": 1_508_123.0,
        "train_seconds": 119.7,
        "stalled_seconds": 0.0,
        "setup_seconds": 33.2,
        "setup_parts": {"data": 9.1, "kernels": 11.0, "model": 1.1, "warm-up": 12.0},
        "data_wait_seconds": 0.02,
        "memory_bytes": last["memory"],
        "params": 27_002_000,
        "seed": seed,
        "world_size": 1,
        "device": "NVIDIA H200" if gpu else "cpu",
        "versions": {"parbank": "0.1.0", "python": "3.12.3", "torch": "2.11.0"},
        "artifact_bytes": 15_844_557,
        "code_bytes": 140_992,
        "matrix_q": 31,
        "sample": TEXT,
        "compressors_bpb": {"zlib -9": 1.69, "xz -9": 1.46, "zstd -19": 1.50},
        "finish_seconds": 36.0,
        "finish_parts": {
            "scoring": 3.0,
            "calibration": 6.0,
            "packing": 22.0,
            "scoring the packed model": 3.0,
            "sample and compressors": 2.0,
        },
    }


def _write(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values), encoding="utf-8")
