"""Ranks: one of several processes is killed at a random moment, and twelve ways for ranks to differ. For faults.py.

Within 60 seconds of a kill every other rank must have ended with a message that names the lost rank. The twelve ways are
those of tests/training/test_agreement.py.
"""

import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from faults_cases import Outcome, Part, Reference, make_reference

from tests.faults.ranks import LIMIT_SECONDS, lose_rank

ROOT = Path(__file__).resolve().parents[1]
DIFFERENCES = 12
# (the text that the first rank has printed, steps of the run, the longest wait after it): setup, training, and what follows
MOMENTS = (("training tokens", 10_000, 2.0), ("step 1 ", 10_000, 2.0), ("trained ", 4, 0.3))


@dataclass(frozen=True)
class Shared:
    folder: Path
    seed: int
    reference: Reference
    said: str
    """What pytest said of the twelve ways."""


def prepare(folder: Path, seed: int) -> Shared:
    words = [sys.executable, "-m", "pytest", "-rA", "-q", "-p", "no:cacheprovider", "tests/training/test_agreement.py"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    reference = make_reference(folder)
    os.environ["PARBANK_CACHE"] = str(reference.cache)  # for the ranks, which are processes of their own
    return Shared(folder, seed, reference, done.stdout)


def attempt(shared: Shared, index: int) -> Outcome:
    if index < DIFFERENCES:
        return judge_difference(shared, index)
    draw = random.Random(f"{shared.seed} {index}")
    world = draw.choice((2, 2, 4))
    victim = draw.randrange(world)
    after, steps, longest = draw.choice(MOMENTS)
    folder, loss = shared.folder / f"case-{index}", None
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            loss = lose_rank(
                shared.reference.spec, folder, world=world, victim=victim, delay=draw.uniform(0, longest), after=after, steps=steps
            )  # fmt: skip
            break
        except AssertionError as error:  # the run was faster than the kill
            if "has ended before the signal" not in str(error):
                return Outcome(index, f"one of {world} ranks killed", "broken", str(error)[:2000])
    kind = f"one of {world} ranks killed"
    if loss is None:
        return Outcome(index, kind, "not killed", "5 kills came too late")
    late = "" if loss.seconds < LIMIT_SECONDS else f"not ended within {LIMIT_SECONDS:.0f} s after {loss.moment!r}"
    fault = late or loss.complaint()
    return Outcome(index, kind, "broken" if fault else "a sentence names the lost rank", fault, seconds=loss.seconds)


def judge_difference(shared: Shared, index: int) -> Outcome:
    ways = dict.fromkeys(re.findall(r"test_a_difference_is_named\[([^\]]+)\]", shared.said))
    if len(ways) != DIFFERENCES:
        return Outcome(index, "ranks differ", "broken", f"{len(ways)} ways were tested: {shared.said[-1500:]}")
    way = list(ways)[index]
    named = re.search(rf"^PASSED .*is_named\[{re.escape(way)}\]$", shared.said, re.MULTILINE)
    fault = "" if named else f"{way} was not named: {shared.said[-1500:]}"
    return Outcome(index, f"ranks differ: {way}", "broken" if fault else "the rank and the field are named", fault)


PART = Part(
    prepare,
    attempt,
    (
        "benchmarks/faults_ranks.py",
        "tests/faults/held.py",
        "tests/faults/ranks.py",
        "tests/training/test_agreement.py",
    ),
)
