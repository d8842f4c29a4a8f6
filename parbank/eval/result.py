"""What a score is worth later: a result says what was measured, and unlike results are not compared."""

import json
from pathlib import Path
from typing import Any

from parbank.errors import ConfigError

# What must be equal. The tokenizer need not be: bits per byte of the same text compare across tokenizers. Nor need the
# number of ranks or the length of segments: they change rounding only.
LIKE = {
    "text_sha256": "the text",
    "bytes": "the text's size in bytes",
    "documents": "the number of documents",
    "documents_sha256": "where documents begin (its hash)",
    "method": "the method",
    "context": "the context",
    "stride": "the stride",
    "adapt": "how the model adapts",
}
LATER = {"documents", "documents_sha256"}  # older results lack them, and are compared by the rest
# Settings without effect must not make like scores unlike: what an adapter does not have, and what changes rounding only.
IDLE = {"sgd": {"rank", "micro_tokens"}, "low-rank": {"momentum", "micro_tokens"}}


def in_effect(adapt: dict[str, Any]) -> dict[str, Any]:
    """The settings of an adaptation that its adapter makes use of."""
    idle = IDLE.get(str(adapt.get("adapter")), set())
    return {key: value for key, value in adapt.items() if key not in idle}


def read_result(path: Path) -> dict[str, Any]:
    """A result that `parbank eval --json` printed."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the result {path}: {error}; give a file that `eval --json` wrote") from error
    missing = sorted({"val_bpb", *LIKE} - LATER - set(found)) if isinstance(found, dict) else ["val_bpb"]
    if missing:
        raise ConfigError(
            f"{path} is no result of `parbank eval --json`: it has no {missing[0]!r}; score the model again"
        )
    return found


def is_result(path: Path) -> bool:
    try:
        read_result(path)
    except ConfigError:
        return False
    return True


def refuse_unlike(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> None:
    """Names the first thing that differs. `ours` may still lack what is only known after scoring, and either what results
    did not say at its time."""
    for key, what in LIKE.items():
        if key not in ours or key not in theirs:
            continue
        mine, other, part = _plain(ours[key]), _plain(theirs[key]), ""
        if mine == other:
            continue
        if isinstance(mine, dict) and isinstance(other, dict):
            differs = next(k for k in sorted(mine.keys() | other.keys()) if mine.get(k) != other.get(k))
            part, mine, other = f" ({differs})", mine.get(differs), other.get(differs)
        raise ConfigError(
            f"these scores do not compare: {what}{part} is {mine} here and {other} in {name}; score both the same way on the "
            "same text"
        )


def compare(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> dict[str, Any]:
    """The difference of two like results; negative is better than `theirs`."""
    refuse_unlike(ours, theirs, name)
    return {
        "compared_with": name,
        "their_bpb": theirs["val_bpb"],
        "difference_bpb": ours["val_bpb"] - theirs["val_bpb"],
        "same_tokenizer": ours.get("tokenizer_sha256") == theirs.get("tokenizer_sha256"),
    }


def _plain(value: Any) -> Any:
    """As JSON would give it back; of an adaptation what has an effect, since older results hold all of it."""
    plain = json.loads(json.dumps(value))
    return in_effect(plain) if isinstance(plain, dict) else plain
