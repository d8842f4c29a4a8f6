"""summary.json: the settings and the result of a run."""

import hashlib
from typing import Any

import torch

from parbank.artifact.pack import Packed
from parbank.eval.score import Score
from parbank.runtime import versions
from parbank.training.compiled import count_lookups
from parbank.training.metrics import memory_bytes
from parbank.training.trainer import Trainer


def describe_start(trainer: Trainer) -> dict[str, Any]:
    """The part of the summary that is known before the first step."""
    runtime = trainer.runtime
    return {
        "params": sum(p.numel() for p in trainer.model.parameters()),
        "seed": trainer.config.seed,
        "world_size": runtime.world,
        "device": torch.cuda.get_device_name(runtime.device) if runtime.is_cuda else "cpu",
        "versions": versions(),
    }


def summarise(trainer: Trainer, before: Score, after: Score, setup: dict[str, float]) -> dict[str, Any]:
    """The part of the summary that every rank knows. `before` and `after` packing; `setup`: the seconds of each part."""
    config, runtime, dataset = trainer.config, trainer.runtime, trainer.dataset
    seconds = trainer.clock.seconds()
    tokens = trainer.tokens
    return {
        "recipe": config.recipe,
        "val_bpb": after.bpb,
        "val_loss": after.loss,
        "val_bpb_before_packing": before.bpb,
        "val_bytes": after.bytes,
        "val_tokens": after.tokens,
        "text": dataset.text,
        "val_overlap": dataset.overlap,
        "skipped_bad": dataset.skipped_bad,
        "dataset": dataset.fingerprint,
        "max_bytes": config.budget.max_bytes,
        "steps": trainer.step,
        "skipped_steps": trainer.skipped,
        "tokens": tokens,
        "tokens_per_second": tokens / max(seconds, 1e-9),
        "train_seconds": seconds,
        "stalled_seconds": trainer.stalled_seconds,
        "recompilations": trainer.recompilations,
        "setup_seconds": sum(setup.values()),
        "setup_parts": setup,
        "compile_cache": count_lookups().start,
        "data_wait_seconds": trainer.wait_seconds,
        "memory_bytes": memory_bytes(runtime.device),
        "precision": trainer.precision,
        "compiled": trainer.compiled,
        **trainer.threads.describe(),
        **describe_start(trainer),
    }


def summarise_packed(packed: Packed, text: bytes, sample: str) -> dict[str, Any]:
    """The part of the summary that only the first rank knows. `text` is the validation text."""
    return {
        "val_text_sha256": hashlib.sha256(text).hexdigest(),
        "artifact_bytes": packed.size,
        "code_bytes": packed.code_bytes,
        "matrix_q": packed.matrix_q,
        "sample": sample,
    }
