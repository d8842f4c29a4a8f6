"""The demo's training step on this CPU: float32 and bfloat16, plain PyTorch and compiled by Inductor.

    python benchmarks/cpu.py [--steps 30]

Each setting has a process of its own. Rows for one thread are CPU time, which other processes disturb little. Rows for all
threads are tokens per second of wall time, and need an idle machine. A compiled setting starts without a cache, so that its
compilation is measured, too. Bound of a step: its products at the rate of one large product in the same precision; attention and
everything pointwise come on top. Writes benchmarks/results/cpu.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

MEASURED = ("parbank", "benchmarks/cpu.py")
PROVIDERS = {
    "float32": ("float32", False),
    "bfloat16": ("bfloat16", False),
    "float32, compiled": ("float32", True),
    "bfloat16, compiled": ("bfloat16", True),
}


def least(count: int, clock: Callable[[], float], work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(count):
        began = clock()
        work()
        seconds.append(clock() - began)
    return min(seconds)


def measure_here(provider: str, steps: int) -> dict[str, float]:
    """The seconds of one setting, in this process."""
    import torch

    from parbank.config import override
    from parbank.recipes import get_recipe
    from parbank.runtime import Runtime
    from parbank.threads import use_threads
    from parbank.training.trainer import Trainer
    from parbank.training.warmup import random_data

    precision, compiled = PROVIDERS[provider]
    chosen = (f"train.precision={precision}", f"train.compile={str(compiled).lower()}")
    config = override(
        get_recipe("demo"), "train.warmup_steps=2", "train.validate_every=off", "batch.stages=[]", *chosen
    )
    data = random_data(config, 8 * config.batch.batch_tokens)
    with use_threads() as threads, tempfile.TemporaryDirectory() as out:
        trainer = Trainer(config, Runtime(device=torch.device("cpu")), data, Path(out))

        def step() -> None:
            trainer._accumulate_gradients(trainer.stages[-1])
            trainer._update_weights(1.0)

        try:
            found = {"threads": float(threads), "compile": least(1, time.perf_counter, trainer.compile)}
            trainer.warm_up()
            found["all"] = least(steps, time.perf_counter, step)
            torch.set_num_threads(1)
            found["one"] = least(steps, time.process_time, step)
            found["product"] = least(5, time.process_time, _product(precision)) / 2e9  # seconds per FLOP
        finally:
            trainer.close()
        weights = (
            sum(p.numel() for p in trainer.model.banks.parameters()) + trainer.model.token_embedding.weight.numel()
        )
        found["flop"] = 6.0 * weights * config.batch.batch_tokens
        found["tokens"] = float(config.batch.batch_tokens)
    if compiled != trainer.compiled:
        raise SystemExit("nothing was compiled: see above")
    return found


def _product(precision: str) -> Callable[[], object]:
    import torch

    left = torch.randn(1000, 1000).to(getattr(torch, precision))
    return lambda: left @ left


def measure(provider: str, steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, __file__, "--provider", provider, "--steps", str(steps)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(f"{provider:20} {found}", flush=True)
    return found


def make_rows(results: dict[str, dict[str, float]]) -> list[Any]:
    import harness

    rows = []
    for provider, found in results.items():
        bound = 1e3 * found["flop"] * found["product"]
        rows.append(harness.Row("a step, CPU time of one thread", provider, 1e3 * found["one"], "ms", bound=bound))
        case = f"{found['threads']:.0f} threads"
        rows.append(harness.Row(case, provider, found["tokens"] / found["all"], "tokens/s"))
        if PROVIDERS[provider][1]:
            rows.append(harness.Row("first compilation", provider, found["compile"], "s"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="repeats of each measurement")
    parser.add_argument("--provider", choices=PROVIDERS, default=None, help=argparse.SUPPRESS)
    if "--provider" in sys.argv:
        arguments = parser.parse_args()
        print(json.dumps(measure_here(arguments.provider, arguments.steps)))
        return
    import harness

    arguments = harness.start(parser)
    del arguments.provider
    results = {provider: measure(provider, arguments.steps) for provider in PROVIDERS}
    options = harness.settings_of(arguments)
    extra = {"measurements": results}
    path = harness.write("cpu", make_rows(results), out=arguments.out, settings=options, measured=MEASURED, extra=extra)
    print(path.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
