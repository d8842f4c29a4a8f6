"""Results of scoring, and their comparison: results of different texts or methods are refused."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from parbank.config import parse_json
from parbank.errors import ConfigError, reason
from parbank.eval.adaptation import ADAPTERS

# Fields that must be equal, with their names for messages. Tokenizers may differ: bits per byte of the same text compare. So
# may the number of ranks and the length of segments, which change rounding only.
LIKE = {
    "text_sha256": "the text",
    "bytes": "the text's size in bytes",
    "documents": "the number of documents",
    "documents_sha256": "where documents begin (its hash)",
    "method": "the method",
    "context": "the context",
    "stride": "the stride",
    "adapt": "how the model adapts",
    "options": "the options of the method",
}
# Fields that older results lack. Such results compare by the other fields.
LATER = {"documents", "documents_sha256", "options"}


def read_result(path: Path) -> dict[str, Any]:
    """A result that `parbank eval --json` printed."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the result {path}: {reason(error)}; give a file that `eval --json` wrote"
        ) from error
    missing = sorted({"val_bpb", *LIKE} - LATER - set(found)) if isinstance(found, dict) else ["val_bpb"]
    if missing:
        raise ConfigError(
            f"{path} is not a result of `parbank eval --json`: it has no {missing[0]!r}; score the model again"
        )
    bpb = found["val_bpb"]
    if type(bpb) not in (int, float) or not math.isfinite(bpb):
        raise ConfigError(f"{path} has {bpb!a} for a score (val_bpb), which is no number; score the model again")
    return found


def is_result(path: Path) -> bool:
    try:
        read_result(path)
    except ConfigError:
        return False
    return True


def refuse_unlike(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> None:
    """Raises an error that names the first difference. `ours` may lack fields that are known only after scoring; both may
    lack fields that a later parbank added."""
    for key, field_name in LIKE.items():
        if key not in ours or key not in theirs:
            continue
        mine, other, part = (*(_plain(key, result[key]) for result in (ours, theirs)), "")
        if mine == other:
            continue
        if isinstance(mine, dict) and isinstance(other, dict):
            differs = next(k for k in sorted(mine.keys() | other.keys()) if mine.get(k) != other.get(k))
            part, mine, other = f" ({differs})", mine.get(differs), other.get(differs)
        raise ConfigError(
            f"these scores do not compare: {field_name}{part} is {mine} here and {other} in {name}; score both the same way on the "
            "same text"
        )


def compare(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> dict[str, Any]:
    """The difference of two comparable results; negative is better than `theirs`."""
    refuse_unlike(ours, theirs, name)
    return {
        "compared_with": name,
        "their_bpb": theirs["val_bpb"],
        "their_text": theirs.get("text", "not proved"),  # older results lack it
        "difference_bpb": ours["val_bpb"] - theirs["val_bpb"],
        "same_tokenizer": ours.get("tokenizer_sha256") == theirs.get("tokenizer_sha256"),
    }


def _plain(key: str, value: Any) -> Any:
    """The value as JSON returns it. Of an adaptation, only the settings with an effect, since older results hold all of
    them."""
    plain = json.loads(json.dumps(value))
    return _in_effect(plain) if key == "adapt" and isinstance(plain, dict) else plain


def _in_effect(adapt: dict[str, Any]) -> dict[str, Any]:
    """Without the settings that its adapter does not have, or that change rounding only, and without what it says of
    documents: that follows from the adapter, and older results lack it."""
    adapter = ADAPTERS.get(str(adapt.get("adapter")))
    if adapter is None:
        return adapt
    own = {field.name for field in fields(adapter)} - adapter.rounding
    others = {field.name for config in ADAPTERS.values() for field in fields(config)}
    kept = {key: value for key, value in adapt.items() if key in own or key not in others}
    kept.pop("documents", None)
    return kept
