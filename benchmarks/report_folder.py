"""The folder of a sprint without a sprint, for report.py: its page is timed on machines that cannot train a sprint.

A page is made from config.json, metrics.jsonl, details.json and summary.json. parbank's own code writes them here from

- the recipe's settings, changed to log every step and to validate every 5 seconds. A sprint logs every 50 steps and does not
  validate, so these are more rows than it has;
- the recipe's model with random weights, packed as integers per row under the recipe's cap. Bytes, errors and entropy of
  tensors are those of this file; their costs come from random curvatures (see packing.py);
- a text, cut by a tokenizer that is trained on it.

Losses, speeds, clocks, power and the bits of tokens are random numbers, and the samples are pieces of the text. So the folder
has the size of a sprint's folder, not its result.
"""

import json
import lzma
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import numpy as np  # noqa: E402
import packing  # noqa: E402

from parbank.artifact.record import read_back  # noqa: E402
from parbank.config import override, to_dict  # noqa: E402
from parbank.data.tokenizer import Tokenizer  # noqa: E402
from parbank.eval.compression import compressor_bpb  # noqa: E402
from parbank.eval.details import PROMPT_TOKENS, SAMPLE_TOKENS, describe  # noqa: E402
from parbank.eval.score import Scored  # noqa: E402
from parbank.files import write_file  # noqa: E402
from parbank.model import GPT  # noqa: E402
from parbank.recipes import get_recipe  # noqa: E402
from parbank.runtime import versions  # noqa: E402
from parbank.training.config import RunConfig  # noqa: E402
from parbank.training.details import describe_place  # noqa: E402
from parbank.training.loggers.jsonl import JsonlLogger  # noqa: E402
from parbank.training.pack import pack_run  # noqa: E402

STEPS, SECONDS = 924, 120.0  # of the sprint in benchmarks/results/sprint
SETTINGS = ("quant.method=rows", "train.log_every=1", "train.validate_every=5s")


@dataclass(frozen=True)
class Made:
    """A folder, and the seconds of some work that a run does on the CPU for its page alone."""

    folder: Path
    seconds: dict[str, float]


def make_folder(folder: Path, text: Path, *, recipe: str = "sprint", steps: int = STEPS, seed: int = 0) -> Made:
    """`text`: a .jsonl or .jsonl.xz file with a field "text", of a validation text's size."""
    folder.mkdir(parents=True)
    config = override(get_recipe(recipe), *SETTINGS, f"seed={seed}", f"data={json.dumps(f'text:{text.name}')}")
    documents = list(read_documents(text))
    tokenizer = Tokenizer.train(iter(documents), config.model.vocab_size)
    tokens = cut(documents, tokenizer)
    dice = np.random.default_rng(seed)
    scored = Scored(tokens, dice.exponential(2.0, len(tokens) - 1).astype(np.float32))
    write_rows(folder, config, steps, random.Random(seed))
    details, seconds = make_details(folder, config, scored, tokenizer, seed)
    write_file(folder / "details.json", json.dumps(details).encode())
    summary = summarise(folder, config, scored, tokenizer, steps, details, compressor_bpb("".join(documents).encode()))
    write_file(folder / "config.json", json.dumps(to_dict(config)).encode())
    write_file(folder / "summary.json", json.dumps(summary).encode())
    return Made(folder, seconds)


def read_documents(path: Path) -> Iterator[str]:
    data = path.read_bytes()
    for line in (lzma.decompress(data) if path.suffix == ".xz" else data).splitlines():
        yield json.loads(line)["text"]


def cut(documents: list[str], tokenizer: Tokenizer) -> np.ndarray:
    begin = np.array([tokenizer.bos_id], dtype=np.uint16)
    return np.concatenate([part for ids in tokenizer.encode_batch(documents) for part in (begin, ids)])


def write_rows(folder: Path, config: RunConfig, steps: int, dice: random.Random) -> None:
    """A row for every step, by the logger of a run."""
    logger, pace = JsonlLogger(folder, resume_step=0), SECONDS / steps
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "tokens": step * config.batch.batch_tokens,
            "seconds": step * pace + dice.random() * pace / 10,
            "loss": 2.6 + 4.3 * math.exp(-step / 60) + dice.gauss(0, 0.03),
            "lr": config.optim.matrix_lr * min(1.0, 2 - 2 * step / steps),
            "grad_norm": 0.2 + math.exp(-step / 90) + dice.random() / 20,
            "tokens_per_second": config.batch.batch_tokens / pace + dice.gauss(0, 9000),
            "data_wait": abs(dice.gauss(0, 2e-5)),
            "memory": 14_771_794_944,
            "skipped": 0,
            "gpu_clock_mhz": 1980.0 - 15 * dice.randrange(20),
            "gpu_power_w": 690 + dice.gauss(0, 6),
        }
        if int(row["seconds"] / 5) > int((row["seconds"] - pace) / 5):
            row["val_bpb"] = row["loss"] / 2.4
        logger.write(row)
    logger.close()


def make_details(
    folder: Path, config: RunConfig, scored: Scored, tokenizer: Tokenizer, seed: int
) -> tuple[dict[str, Any], dict[str, float]]:
    weights, context = packing.make_weights(config.recipe, seed), config.batch.sequence_length
    model = GPT(config.model)
    model.load_state_dict(weights)
    pack_run(model, config, tokenizer, None, folder / "model.pbk")
    _, details, _ = read_back(folder / "model.pbk", weights, packing.make_calibration(weights, seed))
    middle = PROMPT_TOKENS + 1
    pieces = [tokenizer.decode(part) for part in np.split(scored.tokens[1 : middle + SAMPLE_TOKENS], [PROMPT_TOKENS])]
    details["samples"] = [{"prompt": "", "text": pieces[1]}, {"prompt": pieces[0], "text": pieces[1]}]
    began = time.perf_counter()
    details |= describe(scored, tokenizer, context)
    described = time.perf_counter()
    details |= describe_place()
    seconds = {
        "bits by document, position and token": described - began,
        "machine and commit": time.perf_counter() - described,
    }
    return details, seconds


def summarise(
    folder: Path,
    config: RunConfig,
    scored: Scored,
    tokenizer: Tokenizer,
    steps: int,
    details: dict[str, Any],
    compressors: dict[str, float],
) -> dict[str, Any]:
    score, tokens = scored.total(tokenizer), steps * config.batch.batch_tokens
    return {
        "recipe": config.recipe,
        "val_bpb": score.bpb,
        "val_bpb_before_packing": score.bpb - 0.0008,
        "val_bytes": score.bytes,
        "val_tokens": score.tokens,
        "val_overlap": 0.0,
        "max_bytes": config.budget.max_bytes,
        "steps": steps,
        "tokens": tokens,
        "tokens_per_second": tokens / SECONDS,
        "train_seconds": SECONDS,
        "setup_seconds": 32.8,
        "setup_parts": {"data": 12.0, "kernels": 14.0, "warm-up": 6.8},
        "finish_seconds": 36.0,
        "finish_parts": {"scoring": 3.0, "calibration": 6.0, "packing": 24.0, "scoring the packed model": 3.0},
        "data_wait_seconds": 0.01,
        "memory_bytes": 14_771_794_944,
        "params": sum(tensor["count"] for tensor in details["tensors"]),
        "seed": config.seed,
        "world_size": 1,
        "device": "no device: random weights and random rows",
        "versions": versions(),
        "artifact_bytes": (folder / "model.pbk").stat().st_size,
        "sample": details["samples"][0]["text"],
        "compressors_bpb": compressors,
    }
