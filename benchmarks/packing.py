"""Where the seconds of packing go: factorising, choosing rotations, rounding, building files, reading the file back.

    python benchmarks/packing.py [--recipe sprint] [--max-bytes 15800000] [--device cuda] [--claim NAME]

The model is the recipe's, with random Gaussian weights and random curvatures: rows and columns of different spread, as trained
matrices have. Bound: none. Writes benchmarks/results/packing: seconds of each part, and the file's sha256. A change that makes
packing quicker must not change this hash on the same machine.
"""

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402
import torch  # noqa: E402

from parbank.artifact.contents import pack_contents  # noqa: E402
from parbank.artifact.pack import read_tensors  # noqa: E402
from parbank.files import write_file  # noqa: E402
from parbank.model import GPT  # noqa: E402
from parbank.quant.bank import Contents  # noqa: E402
from parbank.quant.calibration import Calibration  # noqa: E402
from parbank.quant.roles import role  # noqa: E402
from parbank.quant.solver import Solver  # noqa: E402
from parbank.recipes import get_recipe  # noqa: E402

MEASURED = ("parbank/quant", "parbank/artifact", "benchmarks/packing.py")


class Stopwatch:
    """The seconds of each part, summed over its calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def around(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*arguments, **options)
            finally:
                if self._device.type == "cuda":
                    torch.cuda.synchronize()
                self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began
                self.calls[part] = self.calls.get(part, 0) + 1

        return timed


def make_weights(recipe: str, seed: int) -> dict[str, torch.Tensor]:
    """Gaussian matrices whose rows and columns differ in spread by a factor of e^0.5 (one standard deviation)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in GPT(get_recipe(recipe).model).state_dict().items()}
    made = {}
    for name, shape in shapes.items():
        weights = torch.randn(shape, generator=generator)
        for side in range(len(shape) if len(shape) == 2 else 0):
            line = [-1 if d == side else 1 for d in range(2)]
            weights *= (0.5 * torch.randn(shape[side], generator=generator)).exp().view(line)
        made[name] = 0.02 * weights
    return made


def make_calibration(weights: dict[str, torch.Tensor], seed: int) -> Calibration:
    """Second moments of inputs that are correlated and differ in variance."""
    generator = torch.Generator().manual_seed(seed + 1)
    hessians, sensitivity = {}, {}
    for name, tensor in weights.items():
        if role(name, tuple(tensor.shape)) == "other":
            continue
        rows, cols = tensor.shape
        x = torch.randn(2 * cols, cols, generator=generator) + torch.randn(2 * cols, 1, generator=generator)
        x = x * torch.randn(cols, generator=generator).exp()
        hessians[name] = x.T @ x / len(x)
        sensitivity[name] = 1e-8 * torch.randn(rows, generator=generator).exp()
    return Calibration(hessians=hessians, sensitivity=sensitivity, tokens=131_072)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="sprint")
    parser.add_argument("--max-bytes", type=int, default=15_800_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--claim", default="packing", help="the result's folder")
    arguments = harness.start(parser)
    device, config = torch.device(arguments.device), get_recipe(arguments.recipe).quant
    weights = make_weights(arguments.recipe, arguments.seed)
    roles = {name: role(name, tuple(tensor.shape)) for name, tensor in weights.items()}
    calibration = make_calibration(weights, arguments.seed)
    weights = {name: tensor.to(device) for name, tensor in weights.items()}
    watch = Stopwatch(device)

    def build(contents: Contents) -> bytes:
        return pack_contents(contents, {name: roles[name] for name in contents}, {}, {}, coder=config.coder)

    def pack() -> bytes:
        solver = watch.around("factorising", Solver)(weights, roles, calibration, config, say=print)
        solver.choose = watch.around("choosing rotations", solver.choose)
        solver.contents = watch.around("rounding", solver.contents)
        return bytes(solver.solve(watch.around("building files", build), arguments.max_bytes).data)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pbk")
        data = watch.around("packing", pack)()
        write_file(path, data)
        watch.around("reading back", read_tensors)(path)
    whole = watch.seconds.pop("packing")
    rows = [harness.Row("packing", "seconds", whole, "s", note=f"sha256 {hashlib.sha256(data).hexdigest()}")]
    rows += [
        harness.Row(f"packing: {part}", "seconds", seconds, "s", note=f"{watch.calls[part]} calls")
        for part, seconds in watch.seconds.items()
    ]
    options = harness.settings_of(arguments)
    seeds = [arguments.seed]
    written = harness.write(arguments.claim, rows, out=arguments.out, settings=options, measured=MEASURED, seeds=seeds)
    print(written.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
