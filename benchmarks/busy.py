"""Training on a CPU beside other busy processes, and alone: tokens per second of the demo model.

    python benchmarks/busy.py [--busy 4] [--seconds 10] [--repeats 3]

    torch's defaults      as many threads as cores, which wait by spinning
    parbank               as `parbank train --minutes` runs: on a busy machine fewer threads, which sleep while they wait
    parbank, by steps     as `parbank train --steps` runs: the same number of threads always, which sleep while they wait

Alone, the first two take turns of two seconds within one process: two processes differ by more than what is measured.
Beside busy processes each has a process of its own, from its start. The bound there is the fair share: as many threads
as cores, beside so many busy processes, get cores / (cores + busy) of the machine. The machine must be idle when this
starts, and takes about three minutes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
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
TURN_SECONDS = 2.0


class Turns:
    """Gives the trainer the threads of each provider in turn, and adds up their tokens and seconds."""

    def __init__(self, providers: dict[str, Any], trainer: Any) -> None:
        self.trainer, self.providers = trainer, providers
        self.tokens, self.seconds = dict.fromkeys(providers, 0), dict.fromkeys(providers, 0.0)
        self._begun = time.perf_counter()
        self.now = next(iter(providers))
        trainer.threads = providers[self.now]

    def note(self, reading: Any) -> None:
        """After each step."""
        self.tokens[self.now] += self.trainer.config.batch.batch_tokens
        self.seconds[self.now] += reading.seconds
        if len(self.providers) > 1 and time.perf_counter() - self._begun > TURN_SECONDS:
            import torch

            names = list(self.providers)
            self.now = names[(names.index(self.now) + 1) % len(names)]
            self.trainer.threads = self.providers[self.now]
            torch.set_num_threads(self.trainer.threads.now)
            self._begun = time.perf_counter()


def train(seconds: float, names: list[str]) -> dict[str, dict[str, Any]]:
    """Trains the demo model in this process: tokens per second, threads and load of each provider."""
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
        chosen = {name: Threads(most, adapts=name == OURS, measures=name != DEFAULTS) for name in names}
        length = config.batch.sequence_length
        dataset = open_dataset(config.data, vocab_size=config.model.vocab_size, sequence_length=length)
        trainer = Trainer(config, place, dataset, Path(out))
        turns = Turns(chosen, trainer)
        try:
            trainer.warm_up()
            trainer.train(turns.note)
        finally:
            trainer.close()
            for threads in chosen.values():
                threads.close()
    return {
        name: {"tokens_per_second": turns.tokens[name] / turns.seconds[name], **chosen[name].describe()}
        for name in names
    }


def measure(seconds: float, names: list[str]) -> dict[str, dict[str, Any]]:
    """`train` in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    command = [sys.executable, __file__, "--train", *names, "--seconds", str(seconds)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    for name, one in found.items():
        print(f"{name:20} {one['tokens_per_second']:8,.0f} tokens/s  {one['threads']}  {one['load']}", flush=True)
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


def repeat(times: int, seconds: float, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    runs = [measure(seconds, names) for _ in range(times)]
    return {name: [run[name] for run in runs] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=4, help="processes that want a core each")
    parser.add_argument("--seconds", type=float, default=10.0, help="of training, for each provider and repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--train", nargs="+", choices=PROVIDERS, default=None, help=argparse.SUPPRESS)
    if "--train" in sys.argv:
        arguments = parser.parse_args()
        print(json.dumps(train(arguments.seconds, arguments.train)))
        return
    import harness

    arguments = harness.start(parser)
    del arguments.train
    seconds, repeats = arguments.seconds, arguments.repeats
    alone = repeat(repeats, 2 * seconds, [DEFAULTS, OURS])
    with busy(arguments.busy):
        loaded = repeat(repeats, seconds, [OURS]) | repeat(1, seconds, [STEPS]) | repeat(1, seconds, [DEFAULTS])
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
