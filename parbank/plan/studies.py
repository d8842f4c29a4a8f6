"""Rows for the fit from the folder of a study: `parbank study run` on a new machine extends the laws."""

from pathlib import Path
from typing import Any

from parbank.config import override, parse_json
from parbank.errors import ConfigError, reason
from parbank.plan.shapes import count_parameters
from parbank.plan.texts import PlanText, read_text
from parbank.training.config import RunConfig, read_config


def read_study_rows(folder: Path) -> list[dict[str, Any]]:
    """One row for each training run of the study that has ended. Its text must still lie where it lay."""
    try:
        study = parse_json((folder / "study.json").read_text(encoding="utf-8"))
        base = read_config(study["base"])
        arms = {"base": base} | {arm["name"]: override(base, *arm["settings"]) for arm in study["arms"]}
        found = {
            path.stem: parse_json(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("results/*.json"))
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder} holds no study of training that can be read: {reason(error)}") from error
    texts: dict[str, PlanText] = {}
    rows = []
    for name, result in found.items():
        arm, _, seed = name.rpartition(".")
        if "bpb_before_packing" not in result:
            continue
        config = arms[arm]
        if config.data not in texts:
            texts[config.data] = read_text(config.data)
        rows.append(_row(folder.name, arm, int(seed), config, result, texts[config.data]))
    return rows


def _row(study: str, arm: str, seed: int, config: RunConfig, result: dict[str, Any], text: PlanText) -> dict[str, Any]:
    counts = count_parameters(config.model)
    tokens_once = result["tokens"] / result["epochs"]
    return {
        "key": f"{study}-{arm}-s{seed}",
        "text": text.name,
        "scored": f"{study}: {config.data}",
        "hardness": text.hardness,
        "text_bytes": text.bytes,
        "bytes_per_token": text.bytes / tokens_once,
        "vocab": config.model.vocab_size,
        "layers": config.model.layers,
        "width": config.model.width,
        "matrices": counts.matrices,
        "params": counts.total,
        "bigrams": config.model.bigram_buckets,
        "tokens": result["tokens"],
        "steps": result["steps"],
        "batch_tokens": config.batch.batch_tokens,
        "bpb": result["bpb_before_packing"],
        "seed": seed,
    }
