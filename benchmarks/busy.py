"""Training on a CPU beside other busy processes, and alone: tokens per second of the demo model.

    python benchmarks/busy.py [--busy 4] [--seconds 12] [--repeats 3]

Every measurement is a process of its own, and the providers take turns:

    torch's defaults      as many threads as cores, which wait by spinning
    parbank               as `parbank train --minutes` runs: on a busy machine fewer threads, which sleep while they wait
    parbank, by steps     as `parbank train --steps` runs: the same number of threads always, which sleep while they wait

The bound of the loaded case is the fair share: as many threads as cores, beside so many busy processes, get
cores / (cores + busy) of the machine. The machine must be idle when this starts; the result holds its load.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

MEASURED = ("parbank", "benchmarks/busy.py")
DEFAULTS, OURS, STEPS = PROVIDERS = ("torch's defaults", "parbank", "parbank, by steps")
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
SPIN = "while True: pass"


def train(seconds: float, provider: str) -> dict[str, Any]:
    """Trains the demo model for some seconds in this process: tokens per second, threads and load."""
    import torch

    from parbank.config import override
    from parbank.data.dataset import open_dataset
    from parbank.recipes import get_recipe
    from parbank.runtime import Runtime
    from parbank.threads import use_threads
    from parbank.training.threads import Threads
    from parbank.training.trainer import Trainer

    config = override(get_recipe("demo"), f"budget.minutes={seconds / 60}", "train.checkpoint_minutes=0")
    place = Runtime(device=torch.device("cpu"))
    with use_threads() as most, tempfile.TemporaryDirectory() as out:
        threads = Threads(most, adapts=provider == OURS, measures=provider != DEFAULTS)
        length = config.batch.sequence_length
        dataset = open_dataset(config.data, vocab_size=config.model.vocab_size, sequence_length=length)
        trainer = Trainer(config, place, dataset, Path(out), threads)
        try:
            trainer.warm_up()
            trainer.train()
        finally:
            trainer.close()
            threads.close()
    return {"tokens_per_second": trainer.tokens / trainer.clock.seconds(), **threads.describe()}


def measure(seconds: float, provider: str) -> dict[str, Any]:
    """`train` in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    command = [sys.executable, __file__, "--train", provider, "--seconds", str(seconds)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{provider:20} {found['tokens_per_second']:8,.0f} tokens/s  {found}", flush=True)
    return found


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Other processes that each want a core."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def take_turns(seconds: float, repeats: int, providers: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {provider: [] for provider in providers}
    for turn in range(repeats):
        for provider in providers[:: -1 if turn % 2 else 1]:  # forth and back, so that a drift meets both
            found[provider].append(measure(seconds, provider))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=4, help="processes that want a core each")
    parser.add_argument("--seconds", type=float, default=12.0, help="of training, in each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--train", choices=PROVIDERS, default=None, help=argparse.SUPPRESS)
    if "--train" in sys.argv:
        arguments = parser.parse_args()
        print(json.dumps(train(arguments.seconds, arguments.train)))
        return
    import harness

    arguments = harness.start(parser)
    del arguments.train
    alone = take_turns(arguments.seconds, arguments.repeats, (DEFAULTS, OURS))
    with busy(arguments.busy):
        loaded = take_turns(arguments.seconds, arguments.repeats, (OURS,))
        loaded |= take_turns(arguments.seconds, 1, (STEPS, DEFAULTS))
    rows = make_rows(alone, loaded, arguments.busy)
    options = harness.settings_of(arguments)
    extra = {"measurements": {"alone": alone, "loaded": loaded}}
    path = harness.write("busy", rows, out=arguments.out, settings=options, measured=MEASURED, extra=extra)
    print(path.with_suffix(".md").read_text(encoding="utf-8"))


def make_rows(alone: dict[str, Any], loaded: dict[str, Any], count: int) -> list[Any]:
    """Medians, and the two shares that are promised."""
    import harness

    def speed(found: dict[str, Any], provider: str) -> float:
        return statistics.median(one["tokens_per_second"] for one in found[provider])

    cores = alone[OURS][0]["threads"]["cores"]
    fair = speed(alone, DEFAULTS) * cores / (cores + count)
    beside = f"beside {count} busy processes"
    rows = [harness.Row("alone", name, speed(alone, name), "tokens/s") for name in alone]
    rows += [harness.Row(beside, name, speed(loaded, name), "tokens/s", bound=fair) for name in loaded]
    rows += [
        harness.Row("lost alone", OURS, 100 * (1 - speed(alone, OURS) / speed(alone, DEFAULTS)), "%"),
        *(harness.Row("of the fair share", name, 100 * speed(loaded, name) / fair, "%") for name in loaded),
    ]
    return rows


if __name__ == "__main__":
    main()
