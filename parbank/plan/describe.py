"""A plan as text, and as a table for --json."""

from typing import Any

from parbank.config import to_dict
from parbank.plan.choose import Choice, Plan
from parbank.plan.machine import describe_machine
from parbank.plan.notes import find_notes


def describe_plan(plan: Plan) -> str:
    """The plan as text: every choice, the expected result, and the other candidates."""
    best, config = plan.best, plan.best.config
    model, batch, optim = config.model, config.batch, config.optim
    *before, main = batch.plan()
    shares = zip((share for share, _, _ in batch.stages), before)
    stages = "".join(f"; {share:.0%} of the time at {stage.describe_lengths()}" for share, stage in shares)
    rows = {
        "text": f"about {_size(plan.text.bytes)} to train on; zlib packs a document into {plan.text.hardness:.2f} bits per byte",
        "machine": f"{plan.machine.name}{f', {plan.machine.ranks} ranks' if plan.machine.ranks > 1 else ''}",
        "vocabulary": f"{model.vocab_size:,} tokens",
        "model": f"{model.layers} layers of {model.width}; query heads: {model.heads}, key-value heads: {model.kv_heads}; "
        f"MLP {model.mlp_multiple:g}x; {'' if model.tied else 'a head of its own; '}{best.parameters:,} parameters",
        "tables": f"{model.bigram_buckets:,} x {model.bigram_width} for bigrams; value embeddings of width "
        f"{model.value_width} in layers {', '.join(map(str, model.value_layers)) or '-'}",
        "batch": f"{batch.batch_tokens:,} tokens in windows of {main.describe_lengths()}, "
        f"at most {batch.micro_batch_tokens:,} in a pass{stages}",
        "learning rates": f"matrices {optim.matrix_lr:g}, embeddings {optim.embedding_lr:g}, others {optim.scalar_lr:g}; "
        f"warmdown over the last {optim.warmdown:.0%}",
        "weight decay": f"matrices {optim.matrix_weight_decay:g}, others {optim.adam_weight_decay:g}",
        "dropout": f"{config.train.dropout:g}",
        "averaging": f"{config.average.use}, decay {config.average.ema_decay:g}",
        "bits per weight": f"{best.bits_per_weight:.1f}; rounding costs {best.packing:.4f} bits per byte",
    }
    expected = {
        "steps": f"{best.steps:,.0f}",
        "tokens": f"{best.tokens:,.0f}, {best.epochs:.2f} epochs, at {best.tokens_per_second:,.0f} a second",
        "score": f"{best.score:.3f} bits per byte, packed, +- {2 * best.deviation:.3f}",
        "twice the minutes": f"{plan.more_minutes - best.score:+.3f} bits per byte",
        "twice the bytes": f"{plan.more_bytes - best.score:+.3f} bits per byte",
    }
    lines = [*_pairs(rows), "", "expected", *_pairs(expected)]
    lines += ["", f"considered {plan.candidates:,} candidates; the next best that differ from the plan in one setting:"]
    lines += [_compare(other, best) for other in plan.others] or ["  none: the settings leave no choice"]
    if any(abs(one.untried) > 0.0005 for one in (best, *plan.others)):
        lines.append(
            f'"untried" is a penalty for sizes that no long run has tried; the score of the plan includes {best.untried:.3f}'
        )
    return "\n".join([*lines, *(f"note: {note}" for note in find_notes(plan))])


def plan_table(plan: Plan) -> dict[str, Any]:
    """For --json."""
    return {
        "config": to_dict(plan.best.config),
        "expected": _choice_table(plan.best)
        | {
            "twice_the_minutes": plan.more_minutes,
            "twice_the_bytes": plan.more_bytes,
            "half_the_minutes": plan.less_minutes,
        },
        "known": None if plan.known is None else vars(plan.known),
        "considered": plan.candidates,
        "others": [_choice_table(other) for other in plan.others],
        "text": vars(plan.text),
        "machine": describe_machine(plan.machine),
        "notes": list(find_notes(plan)),
    }


def _choice_table(choice: Choice) -> dict[str, Any]:
    model = choice.config.model
    shape = {"layers": model.layers, "width": model.width, "vocab_size": model.vocab_size}
    found = {name: value for name, value in vars(choice).items() if name != "config"}
    return shape | {"batch_tokens": choice.config.batch.batch_tokens, "steps": choice.steps} | found


def _compare(other: Choice, best: Choice) -> str:
    model, own = other.config.model, best.config.model
    batch = other.config.batch.batch_tokens
    name = f"{model.layers} x {model.width}"
    if model.vocab_size != own.vocab_size:
        name = f"{model.vocab_size:,} tokens"
    elif model.bigram_buckets != own.bigram_buckets:
        name = f"{model.bigram_buckets:,} rows of bigrams"
    elif model.tied != own.tied:
        name = "embedding as the head" if model.tied else "a head of its own"
    elif batch != best.config.batch.batch_tokens:
        name = f"batches of {batch:,}"
    reasons = [
        f"{other.tokens / best.tokens:.2f} times the tokens",
        f"{other.parameters / best.parameters:.2f} times the parameters",
    ]
    reasons += [f"{other.bits_per_weight:.1f} bits per weight"] if other.packing > best.packing + 0.001 else []
    reasons += [f"untried {other.untried:.3f}"] if other.untried > best.untried + 0.0005 else []
    return f"  {name:24} {other.score:.3f} ({other.score - best.score:+.3f}): {', '.join(reasons)}"


def _pairs(rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows))
    return [f"{name:{width}}  {value}" for name, value in rows.items()]


def _size(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"
