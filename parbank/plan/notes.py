"""What a plan says of itself: where it leaves the runs behind the laws, what the laws do not know, and what to change."""

from collections.abc import Iterator, Sequence

from parbank.display import plural
from parbank.plan.choose import Plan
from parbank.plan.shapes import count_parameters

LEAST_STEPS = 20
NO_GAIN = 0.001
"""Bits per byte: with half of the minutes so near, they are more than the model can use."""
KNOWN = (
    "data", "seed", "budget.", "model.layers", "model.width", "model.vocab_size", "model.mlp_multiple", "model.kv_heads",
    "model.bigram_buckets", "batch.batch_tokens", "batch.micro_batch_tokens", "batch.prefetch",
    "train.compile", "train.cuda_graph", "train.warmup_steps", "train.log_every", "train.loggers", "train.validate",
    "train.checkpoint_minutes", "train.keep_checkpoints", "train.max_skipped",
)  # fmt: skip
"""Beginnings of settings that the expected score counts with, or that change no score."""
KNOWN_GPU = ("model.tied",)
"""More of them, on a GPU alone."""


def find_notes(plan: Plan) -> tuple[str, ...]:
    """The notes of a plan, each a sentence."""
    return (*_known(plan), *_extrapolations(plan), *_end(plan), *_ignored(plan), *_load(plan))


def find_ignored(settings: Sequence[str], *, cuda: bool) -> list[str]:
    """The names of settings that change the score, and are in no law."""
    names = dict.fromkeys(setting.partition("=")[0].strip() for setting in settings)
    return [name for name in names if not name.startswith(KNOWN + KNOWN_GPU * cuda)]


def _known(plan: Plan) -> Iterator[str]:
    if (known := plan.known) is not None:
        yield (
            f"this text was trained on before, on {known.on}: that run scored {known.bpb:.3f} bits per byte before packing, "
            f"{known.factor:.2f} times what the laws expect, and every expected score here has this factor"
        )


def _extrapolations(plan: Plan) -> Iterator[str]:
    best, text = plan.best, plan.text
    model = best.config.model
    values = {
        "matrices": (float(count_parameters(model).matrices), "parameters in matrices"),
        "tokens": (best.tokens, "training tokens"),
        "epochs": (best.epochs, "epochs"),
        "vocab": (float(model.vocab_size), "tokens in the vocabulary"),
        "bigrams": (float(model.bigram_buckets), "rows of bigrams"),
        "batch_tokens": (float(best.config.batch.batch_tokens), "tokens a batch"),
        "text_bytes": (text.bytes, "bytes of text"),
        "hardness": (text.hardness, "bits per byte under zlib"),
    }
    for name, (value, what) in values.items():
        low, high = plan.ranges[name]
        if not low * 0.99 <= value <= high * 1.01:
            shown, *bounds = (f"{x:,.2f}" if x < 100 else f"{x:,.0f}" for x in (value, low, high))
            yield f"{shown} {what} lie outside the runs behind this plan ({' to '.join(bounds)}): extrapolated"


def _end(plan: Plan) -> Iterator[str]:
    best, steps = plan.best, plan.best.config.budget.most_steps
    if steps is not None:
        minutes = best.tokens / best.tokens_per_second / 60
        yield (
            f"training ends after {plural(steps, 'step')}, about {minutes:.2g} of {plan.minutes:g} minutes: by the laws, a model "
            f"that sees this text more than {best.epochs:.2g} times learns it by heart and scores worse; give more text to use "
            "the minutes"
        )
    elif best.steps < LEAST_STEPS:
        yield f"about {plural(max(1, round(best.steps)), 'step')} fit the clock, too few to learn much: give more minutes"
    elif plan.less_minutes - best.score < NO_GAIN:
        yield f"half of the minutes would score within {NO_GAIN:g}: give fewer minutes, or a larger --max-bytes"


def _ignored(plan: Plan) -> Iterator[str]:
    if unknown := find_ignored(plan.settings, cuda=plan.machine.cuda):
        yield f"the expected score does not know {', '.join(unknown)}: it is that of the usual values"


def _load(plan: Plan) -> Iterator[str]:
    machine = plan.machine
    if machine.others:
        yield (
            f"other processes want {plural(machine.others, 'core')}. The plan counts on their end: a run now would get about "
            f"{machine.share:.0%} of its steps. End them, or give more minutes"
        )
    if not machine.calm and machine.threads > 1:
        yield (
            f"the machine was busy when it was probed: the gain of {plural(machine.threads, 'thread')} over one is assumed, and is "
            "measured by the next plan that finds it calm"
        )
