"""Whether studies keep their promise on real noise: 5% false verdicts, and 80% power at the stated difference.

    python benchmarks/study_noise.py [--recipe nano] [--pairs 30] [--steps 20] [--data SPEC] [--file FILE] [--out DIR]

Trains pairs of runs that share the settings and nothing else. On a CPU a run is repeated to the bit by its seed. So the two
runs of a pair have different seeds: different initial weights, and another order of the data. That is the widest noise that a
pair can have. Then a thousand studies are simulated from that noise, in two ways: differences drawn from the pairs, and from the
normal distribution that is fitted to them. --file also writes the pairs there: tests/nano_pairs.json is made so, and the tests
of the statistics draw from it.

Bound: the 99% binomial interval of each stated share (`least allowed`, `most allowed`). Writes benchmarks/results/study_noise.
"""

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402
import torch  # noqa: E402
from provenance import read_code, without_folders  # noqa: E402

from parbank.config import override  # noqa: E402
from parbank.display import Display  # noqa: E402
from parbank.recipes import get_recipe  # noqa: E402
from parbank.runtime import Runtime, pick_device, versions  # noqa: E402
from parbank.statistics import ALPHA, POWER, Comparison, compare, smallest_difference  # noqa: E402
from parbank.study.kinds.training import Training  # noqa: E402
from parbank.study.study import BASE, Job, Study  # noqa: E402

MEASURED = ("parbank/statistics.py", "benchmarks/study_noise.py")
STUDIES = 1000
ALONE = (3, 4, 8)  # seeds of studies with one arm
ARMS = ((1, 4), (1, 8), (6, 4), (12, 8))  # arms and seeds of studies whose first arm has an effect
MANY = (12, 4)  # arms and seeds of a study in which none has
NORMAL_99 = 2.576  # many shares are held against their interval: at 95% one of them would often lie outside by chance
SMOOTH = 1 / 4  # of the standard deviation
SHRINK = math.sqrt(1 - SMOOTH**2)

Draw = Callable[[random.Random], float]
Pairs = Sequence[Sequence[float]]


def train_pairs(recipe: str, data: str, steps: int, count: int) -> list[list[float]]:
    """Bits per byte of the two runs of each pair."""
    budget = ["budget.minutes=none", f"budget.steps={steps}", "train.warmup_steps=0"]
    base = replace(override(get_recipe(recipe), *budget), data=data)
    study = Study(name="noise", base=base, seeds=tuple(range(2 * count)), score_tokens=1 << 15)
    with tempfile.TemporaryDirectory() as folder:
        runs = Training(Runtime(device=pick_device(None)), Path(folder), Display(enabled=False))
        scores = []
        for seed in study.seeds:
            scores.append(runs.measure(study, Job(BASE, seed))["value"])
            print(f"seed {seed}: {scores[-1]:.4f}", flush=True)
    return [scores[n : n + 2] for n in range(0, len(scores), 2)]


def spread(pairs: Pairs) -> float:
    """The standard deviation of the differences. Which run of a pair is first is chance: their mean is known to be zero."""
    return math.sqrt(fmean((first - second) ** 2 for first, second in pairs))


def draw_stored(pairs: Pairs) -> Draw:
    """A difference of two stored runs with a sign by chance, smoothed so that no value comes twice. Shrinking it as much
    before keeps the standard deviation (the smoothed bootstrap: Silverman and Young 1987)."""
    noise = [SHRINK * (first - second) for first, second in pairs]
    smooth = SMOOTH * spread(pairs)
    return lambda generator: generator.choice((-1, 1)) * generator.choice(noise) + generator.gauss(0, smooth)


def draw_normal(pairs: Pairs) -> Draw:
    sd = spread(pairs)
    return lambda generator: generator.gauss(0, sd)


DRAWS = {"stored pairs": draw_stored, "normal": draw_normal}


def simulate(draw: Draw, *, arms: int, seeds: int, shift: float = 0.0) -> list[dict[str, Comparison]]:
    """A thousand studies in which no arm has an effect, or only the first has `shift`."""
    generator = random.Random(20)
    studies = []
    for _ in range(STUDIES):
        differences = {f"{n}": [draw(generator) + shift * (n == 0) for _ in range(seeds)] for n in range(arms)}
        studies.append(compare(differences, target=1.0))
    return studies


def false_verdicts(draw: Draw, *, arms: int, seeds: int) -> float:
    """The share of studies that give any arm a verdict, though none has an effect."""
    studies = simulate(draw, arms=arms, seeds=seeds)
    return sum(any(found.verdict in ("better", "worse") for found in s.values()) for s in studies) / STUDIES


def seen(draw: Draw, *, sd: float, arms: int, seeds: int) -> float:
    """The share of studies that see the smallest difference that they state."""
    shift = -smallest_difference(sd=sd, pairs=seeds, comparisons=arms)
    studies = simulate(draw, arms=arms, seeds=seeds, shift=shift)
    return sum(study["0"].verdict == "better" for study in studies) / STUDIES


def binomial(expected: float) -> tuple[float, float]:
    """The 99% interval of a share of the simulated studies."""
    half = NORMAL_99 * math.sqrt(expected * (1 - expected) / STUDIES)
    return expected - half, expected + half


def rows_of(pairs: Pairs) -> list[harness.Row]:
    """Shares in percent. Of several arms without effect Holm bounds the share from above alone; with several arms the stated
    difference counts on Holm's strictest step, so it may be seen more often."""
    sd = spread(pairs)
    rows = [harness.Row("standard deviation of differences", "stored pairs", sd, "bits/byte")]
    for arms, seeds in (*((1, n) for n in ALONE), MANY):
        case = f"no effect, {describe(arms, seeds)}: a verdict"
        rows += _shares(
            case, {name: false_verdicts(make(pairs), arms=arms, seeds=seeds) for name, make in DRAWS.items()}
        )
        least, most = binomial(ALPHA)
        rows += _shares(case, {"least allowed": least if arms == 1 else 0.0, "most allowed": most})
    for arms, seeds in ARMS:
        case = f"the stated difference, {describe(arms, seeds)}: seen"
        rows += _shares(case, {name: seen(make(pairs), sd=sd, arms=arms, seeds=seeds) for name, make in DRAWS.items()})
        least, most = binomial(POWER)
        rows += _shares(case, {"least allowed": least} | ({"most allowed": most} if arms == 1 else {}))
    return rows


def describe(arms: int, seeds: int) -> str:
    return f"{arms} arm{'s' * (arms > 1)}, {seeds} seeds"


def _shares(case: str, shares: dict[str, float]) -> list[harness.Row]:
    return [harness.Row(case, provider, 100 * share, "%") for provider, share in shares.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="nano")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--file", type=Path)
    arguments = harness.start(parser)
    torch.set_num_threads(1)
    pairs = train_pairs(arguments.recipe, arguments.data, arguments.steps, arguments.pairs)
    path = harness.write(
        "study_noise",
        rows_of(pairs),
        out=arguments.out,
        settings=harness.settings_of(arguments) | {"studies": STUDIES},
        seeds=range(2 * arguments.pairs),
        measured=MEASURED,
        extra={"bpb": pairs},
    )
    if arguments.file is not None:
        made = read_code()
        about = {"recipe": arguments.recipe, "steps": arguments.steps, "data": without_folders(arguments.data)}
        found = {"made_by": "benchmarks/study_noise.py", **about, **made, "versions": versions(), "bpb": pairs}
        arguments.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(path.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
