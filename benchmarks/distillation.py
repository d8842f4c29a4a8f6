"""Does distillation within the budget pay? A student of fixed size alone, and the same student with a teacher.

    python benchmarks/distillation.py --name corpus --data text:train=A,val=B [--steps 1500] [--seeds 0,1,2]

The arms have the FLOPs of `--steps` steps of the student, except the last. With a teacher, the student learns from a
mixture of the text and the teacher's probabilities (Hinton et al. 2015), at temperature 1. Bound: `free teacher`. Writes
benchmarks/results/distillation_NAME: bits per byte of each arm by seed, and paired differences from `text`.

    text               the student alone
    larger teacher     `--share` of the FLOPs trains a larger model; its forward passes are paid from the rest
    text, fewer steps  the student alone, in the steps that are left beside the larger teacher
    own average        the teacher is the average of the student's own weights (Tarvainen and Valpola 2017), also paid
    free teacher       the larger model after as many steps as the student, at no cost: better than any teacher within the budget

The runs of docs/log/training.md, about 6 minutes of processor time for each text:

    OMP_NUM_THREADS=1 python benchmarks/distillation.py --jobs 3 --name corpus --data text:train=A,val=B \\
        --set model.vocab_size=512 --set model.width=32 --set model.heads=2 --set model.kv_heads=1 \\
        --set model.bigram_buckets=512 --set model.bigram_width=16 --set model.value_width=16 \\
        --set batch.sequence_length=128 --set batch.batch_tokens=512 --set batch.micro_batch_tokens=512 \\
        --set average.ema_decay=0.98 --set train.precision=float32 --larger model.width=64
"""

import argparse
import functools
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from parbank.config import override  # noqa: E402
from parbank.data.dataset import Dataset, open_dataset  # noqa: E402
from parbank.eval.windows import score_chunked  # noqa: E402
from parbank.model import GPT  # noqa: E402
from parbank.plan.shapes import count_parameters, count_products, orthogonalisation_flops  # noqa: E402
from parbank.recipes import demo  # noqa: E402
from parbank.runtime import Runtime, pick_device  # noqa: E402
from parbank.statistics import compare  # noqa: E402
from parbank.training.config import RunConfig  # noqa: E402
from parbank.training.trainer import Trainer  # noqa: E402

Ask = Callable[[Trainer], GPT]
Mixtures = dict[str, "Mixture"]
BASE, FEWER, LARGER, OWN, FREE = "text", "text, fewer steps", "larger teacher", "own average", "free teacher"
SHORT, LONG = "larger model, in its share", "larger model, free"
TAUGHT = {SHORT: LARGER, LONG: FREE}
OTHER_SEED = 1000  # added to the seed of the larger model: other weights, and another order of the text
MEASURED = ("parbank", "benchmarks/distillation.py")


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """How a student listens to its teacher."""

    start: float
    stop: float
    """The shares of the student's steps between which the teacher is asked."""
    weight: float
    """The weight of the teacher's probabilities; the text has the rest."""


def forward_flops(config: RunConfig) -> float:
    """FLOPs of the forward passes of one step: products, and attention to half of a window."""
    model, length = config.model, config.batch.sequence_length
    return 2.0 * config.batch.batch_tokens * (count_products(model) + model.layers * model.width * length)


def step_flops(config: RunConfig) -> float:
    """FLOPs of one step: a backward pass is two forward passes, and Newton-Schulz runs once."""
    return 3 * forward_flops(config) + orthogonalisation_flops(config.model)


def plan_steps(student: RunConfig, larger: RunConfig, steps: int, share: float, mixtures: Mixtures) -> dict[str, int]:
    """The steps of every arm and of its larger model, within the FLOPs of `steps` steps of the student."""
    own = step_flops(student)
    asked = {arm: mixture.stop - mixture.start for arm, mixture in mixtures.items()}
    left = int((1 - share) * steps * own / (own + asked[LARGER] * forward_flops(larger)))
    return {
        SHORT: int(share * steps * own / step_flops(larger)),
        BASE: steps,
        LARGER: left,
        FEWER: left,
        OWN: int(steps * own / (own + asked[OWN] * forward_flops(student))),
        LONG: steps,
        FREE: steps,
    }


def train(config: RunConfig, dataset: Dataset, ask: Ask | None = None, mixture: Mixture | None = None) -> GPT:
    """The averaged model of a complete schedule. `ask` gives the teacher of a trainer's step; None: the text alone."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, Runtime(device=pick_device(None)), dataset, Path(folder))
        if ask is not None and mixture is not None:
            trainer.passes.use(functools.partial(mixed_loss, trainer, ask, mixture))
        trainer.train()
        trainer.close()
    trainer.model.load_state_dict(trainer.averages.averaged())
    return trainer.model.requires_grad_(False)


def mixed_loss(trainer: Trainer, ask: Ask, mixture: Mixture, ids: Tensor, targets: Tensor) -> Tensor:
    """The student's cross-entropy with the mixture of the text and the teacher's probabilities, in nats."""
    steps = trainer.config.budget.steps or 1
    if not mixture.start <= trainer.step / steps < mixture.stop:
        return trainer.model(ids, targets)
    with torch.no_grad():
        probabilities = ask(trainer)(ids).softmax(-1).flatten(0, 1)
    logits = trainer.model(ids).flatten(0, 1)
    text, soft = F.cross_entropy(logits, targets.flatten()), F.cross_entropy(logits, probabilities)
    return (1 - mixture.weight) * text + mixture.weight * soft


def own_average(student: RunConfig) -> Ask:
    """Gives the average of a trainer's weights as a model."""
    model = GPT(student.model).requires_grad_(False)

    def ask(trainer: Trainer) -> GPT:
        model.load_state_dict(trainer.averages.averaged())
        return model

    return ask


def run_seed(
    student: RunConfig, larger: RunConfig, dataset: Dataset, steps: dict[str, int], mixtures: Mixtures, seed: int
) -> dict[str, float]:
    """Bits per byte of the larger models, and of every arm."""
    place, context = Runtime(device=pick_device(None)), student.batch.sequence_length
    found: dict[str, float] = {}
    ask: dict[str, Ask] = {OWN: own_average(student)}
    for arm, count in steps.items():
        base, own_seed = (larger, seed + OTHER_SEED) if arm in TAUGHT else (student, seed)
        config = override(base, f"budget.steps={count}", f"seed={own_seed}")
        model = train(config, dataset, ask.get(arm), mixtures.get(arm))
        if arm in TAUGHT:
            ask[TAUGHT[arm]] = functools.partial(lambda teacher, _: teacher, model)
        found[arm] = score_chunked(model, dataset.val, dataset.tokenizer, context=context, runtime=place).bpb
        print(f"seed {seed}, {arm}: {found[arm]:.4f} bits per byte after {count:,} steps", flush=True)
    return found


def make_rows(name: str, runs: dict[int, dict[str, float]]) -> tuple[list[harness.Row], dict[str, Any]]:
    """Every score, then the comparison of each arm with the student alone."""
    rows = [harness.Row(f"{name}, seed {n}", arm, run[arm], "bits/byte") for n, run in runs.items() for arm in run]
    differences = {arm: [run[arm] - run[BASE] for run in runs.values()] for arm in (LARGER, OWN, FREE)}
    compared = compare(differences, target=0.01)
    for arm, one in compared.items():
        note = f"{one.low:+.4f} to {one.high:+.4f}, {one.describe()}"
        print(f"{name}, {arm}: {one.mean:+.4f}, {note}", flush=True)
        rows.append(harness.Row(f"{name}, minus {BASE}", arm, one.mean, "bits/byte", note=note))
    return rows, {arm: asdict(one) for arm, one in compared.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a data spec; its validation text is scored")
    parser.add_argument("--name", required=True, help="a word for the text; the result is distillation_<name>")
    parser.add_argument("--steps", type=int, default=1500, help="steps of the student alone: the budget of all arms")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=1, help="seeds that run at the same time")
    parser.add_argument("--share", type=float, default=0.3, help="the share of the FLOPs that trains the larger model")
    parser.add_argument("--weight", type=float, default=0.5, help="weight of the teacher's probabilities")
    about = "the shares of the student's steps between which this teacher is asked"
    for arm, asked in (("larger", (0.0, 0.3)), ("own", (0.5, 1.0)), ("free", (0.0, 1.0))):
        parser.add_argument(f"--ask-{arm}", type=float, nargs=2, default=asked, metavar=("START", "STOP"), help=about)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="a.b=v", help="of both models")
    parser.add_argument("--larger", action="append", default=[], metavar="a.b=v", help="of the larger model alone")
    arguments = harness.start(parser)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    asked = {LARGER: arguments.ask_larger, OWN: arguments.ask_own, FREE: arguments.ask_free}
    mixtures = {arm: Mixture(start=a, stop=b, weight=arguments.weight) for arm, (a, b) in asked.items()}
    fixed = ["budget.minutes=null", f"budget.steps={arguments.steps}", "train.validate_every=off", "batch.stages=[]"]
    student = override(demo(), *fixed, "train.compile=false", *arguments.settings)
    with tempfile.TemporaryDirectory() as folder:
        dataset = open_dataset(arguments.data, vocab_size=student.model.vocab_size, cache=Path(folder))
        student = override(student, f"model.bos_id={dataset.tokenizer.bos_id}")
        larger = override(student, *arguments.larger)
        steps = plan_steps(student, larger, arguments.steps, arguments.share, mixtures)
        run = functools.partial(run_seed, student, larger, dataset, steps, mixtures)
        with ProcessPoolExecutor(arguments.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            runs = dict(zip(seeds, pool.map(run, seeds), strict=True))
    rows, compared = make_rows(arguments.name, runs)
    models = {"student": student, "larger": larger}
    extra = {
        "text": {"train_tokens": len(dataset.train), "fingerprint": dataset.fingerprint},
        "steps": steps,
        "parameters": {model: count_parameters(config.model).total for model, config in models.items()},
        "step_flops": {model: step_flops(config) for model, config in models.items()},
        "compared": compared,
    }
    options, name = harness.settings_of(arguments), f"distillation_{arguments.name}"
    harness.write(name, rows, out=arguments.out, settings=options, seeds=seeds, measured=MEASURED, extra=extra)


if __name__ == "__main__":
    main()
