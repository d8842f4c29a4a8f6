"""The noise of a recipe: pairs of runs that share the settings and nothing else.

    python benchmarks/study_noise.py [--recipe nano] [--pairs 30] [--steps 20] [--data SPEC] --file FILE

On a CPU a run is repeated to the bit by its seed. So the two runs of a pair have different seeds: different weights at
the start, and another order of the data. That is the widest noise that a pair can have. tests/nano_pairs.json is
made by this script, and the tests of the statistics draw from it.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from provenance import read_commit, without_folders  # noqa: E402

from parbank.config import override  # noqa: E402
from parbank.recipes import get_recipe  # noqa: E402
from parbank.runtime import Runtime, pick_device, versions  # noqa: E402
from parbank.study.kinds.training import Training  # noqa: E402
from parbank.study.study import BASE, Job, Study  # noqa: E402
from parbank.training.display import Display  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="nano")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--file", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    budget = ["budget.minutes=none", f"budget.steps={arguments.steps}", "train.warmup_steps=0"]
    base = replace(override(get_recipe(arguments.recipe), *budget), data=arguments.data)
    study = Study(name="noise", base=base, seeds=tuple(range(2 * arguments.pairs)), score_tokens=1 << 15)
    with tempfile.TemporaryDirectory() as folder:
        runs = Training(Runtime(device=pick_device(None)), Path(folder), Display(enabled=False))
        scores = [runs.measure(study, Job(BASE, seed))["value"] for seed in study.seeds]
    pairs = [scores[n : n + 2] for n in range(0, len(scores), 2)]
    about = {"recipe": arguments.recipe, "steps": arguments.steps, "data": without_folders(arguments.data)}
    found = {"made_by": "benchmarks/study_noise.py", **about, **read_commit(), "versions": versions(), "bpb": pairs}
    arguments.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
