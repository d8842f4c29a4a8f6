"""The noise that a study counts on before it has runs of its own, and where that number comes from."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median, stdev
from typing import Any

from parbank.errors import ParbankError
from parbank.study.queue import Queue
from parbank.study.study import BASE, STUDY, TRAINED, Job, Study, describe_budget, read_study

# Two runs that share nothing: sqrt(2) times an assumed deviation over seeds, until benchmarks/studies/QUEUE.md measures it.
USUAL = math.sqrt(2) * 0.0007
NANO = 0.083  # 30 pairs of `nano` runs of 20 steps that share nothing: benchmarks/results/study_noise
FEWEST = 3  # differences, or seeds, below which a deviation is no estimate

Results = Mapping[Job, dict[str, Any]]


@dataclass(frozen=True)
class Noise:
    sd: float
    """The standard deviation of paired differences."""
    source: str


_SPRINT = "two independent sprint runs of 120 s on one H200 differ by as much"
RECIPES = {
    "sprint": Noise(USUAL, f"no earlier runs here; {_SPRINT}"),
    "nano": Noise(NANO, "no earlier runs here; two independent nano runs of 20 steps differ by as much"),
}
ANY_RECIPE = Noise(USUAL, f"a guess: no earlier runs here; {_SPRINT}, and smaller models by far more")
DEFAULTS = {
    "packing": Noise(0.0005, "a guess: no earlier runs here"),
    "scoring": Noise(0.0005, "a guess: no earlier runs here"),
    "kernels": Noise(1.0, "a guess, in percent: no earlier runs here"),
}


def assume_noise(study: Study, folder: Path) -> Noise:
    """The noise: the user's number; else that of the study's runs; else that of a like study beside it; else the default."""
    if study.noise is not None:
        return Noise(study.noise, "as given by --noise")
    for place, like in find_like(study, folder):
        found = measure_noise(like, Queue(place).results(like.jobs()), place.name)
        if found is not None:
            return found
    if study.kind in TRAINED:
        return RECIPES.get(study.base.recipe, ANY_RECIPE)
    return DEFAULTS[study.kind]


def find_like(study: Study, folder: Path) -> Iterator[tuple[Path, Study]]:
    """The study of a folder, then others beside it, if their runs are of the same kind, recipe and budget."""
    beside = sorted(path.parent for path in folder.parent.glob(f"*/{STUDY}") if path.parent != folder)
    for place in (folder, *beside):
        with suppress(ParbankError):
            there = read_study(place)
            same = (there.kind, there.base.recipe, describe_budget(there.base))
            if same == (study.kind, study.base.recipe, describe_budget(study.base)):
                yield place, there


def measure_noise(study: Study, results: Results, name: str) -> Noise | None:
    """The deviation of differences, the median over arms, since an arm that goes wrong is noisy, too; of a study without
    arms, sqrt(2) times the deviation of its runs. An arm that changes nothing says nothing of the noise: it is left out."""
    found = [values for values in differences(study, results).values() if len(values) > 1 and stdev(values) > 0]
    pairs = sum(map(len, found))
    if pairs - len(found) >= FEWEST - 1:
        return Noise(median(stdev(values) for values in found), f"{pairs} pairs of runs in {name}")
    values = [result["value"] for job, result in results.items() if job.arm == BASE]
    if len(values) >= FEWEST and stdev(values) > 0:
        return Noise(
            math.sqrt(2) * stdev(values), f"{len(values)} seeds of the base in {name}, as if pairs shared nothing"
        )
    return None


def differences(study: Study, results: Results) -> dict[str, list[float]]:
    """Arm minus base for every seed that both have. A kind that measures its own baseline gives percent of it."""
    found: dict[str, list[float]] = {}
    for arm in study.arms:
        mine = found[arm.name] = []
        for seed in study.seeds:
            result, base = results.get(Job(arm.name, seed)), results.get(Job(BASE, seed))
            if result is not None and "against" in result:
                mine.append(100 * (result["value"] / result["against"] - 1))
            elif result is not None and base is not None:
                mine.append(result["value"] - base["value"])
    return found
