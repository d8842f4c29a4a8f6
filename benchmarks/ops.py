"""Times every op against PyTorch, eager and compiled, and against the bound of the hardware. Needs a GPU.

    python benchmarks/ops.py [--only xxt,mlp] [--quick] [--claim NAME] [--out DIR]

The cases are in the ops_*.py files beside this one; each has a function `cases(quick)`. A file that times a peer's code also
has `describe_peers(rows)`.

Bound of a row: the larger of its FLOP at the rate of a large product and its bytes at the rate of a copy, both measured in the
same run; the ops_*.py files say what they count. Writes benchmarks/results/ops, or the folder of --claim, after each file.
"""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402

MEASURED = ("parbank/ops", "parbank/optim/newton_schulz.py", "benchmarks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated ops, by the beginning of their names")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and sizes")
    parser.add_argument("--claim", default="ops", help="the result's folder")
    arguments = harness.start(parser)
    if not torch.cuda.is_available():
        sys.exit("benchmarks/ops.py needs a CUDA device")
    torch.manual_seed(0)
    settings = harness.Settings(quick=arguments.quick, only=tuple(filter(None, arguments.only.split(","))))
    rows: list[harness.Row] = []
    peers: list[dict[str, Any]] = []
    for file in sorted(HERE.glob("ops_*.py")):
        module = importlib.import_module(file.stem)
        found = harness.run_cases(module.cases(settings.quick), settings)
        if not found:
            continue
        rows += found
        if hasattr(module, "describe_peers"):
            peers += module.describe_peers(found)
        path = harness.write(
            arguments.claim,
            rows,
            out=arguments.out,
            settings=harness.settings_of(arguments),
            measured=MEASURED,
            peers=peers,
        )
        print("written:", path)


if __name__ == "__main__":
    main()
