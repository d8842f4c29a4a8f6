"""Training on a CPU beside other busy processes, and alone: tokens per second of the demo model.

    python benchmarks/busy.py [--busy 4] [--seconds 10] [--repeats 5]

    torch's defaults      as many threads as cores, which wait by spinning
    parbank               as `parbank train --minutes` runs: on a busy machine threads sleep while they wait, and on more than
                          two cores their number is the fair share of the cores
    parbank, by steps     as `parbank train --steps` runs: the same number of threads always, which sleep while they wait

The model is compiled, as the demo's is. Alone, the first two take turns of two seconds within one process, because two
processes differ by more than the effect. Beside busy processes each has a process of its own. The busy processes start after
the compilation, or before it ("from the start"): then the model is compiled beside them, with a cache that earlier cases have
filled. The machine must be idle when this starts. It takes about five minutes.

Bound: the fair share. As many threads as cores, beside B busy processes, get cores / (cores + B) of the machine, and so of the
speed alone. Writes benchmarks/results/busy.
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
READY = "ready"
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
    """Trains the demo model in this process: tokens per second, threads and load of each provider. Says when it is ready to
    train, and waits for a line."""
    import torch

    from parbank.config import override
    from parbank.data.dataset import open_dataset
    from parbank.recipes import get_recipe
    from parbank.runtime import Runtime
    from parbank.threads import use_threads
    from parbank.training.threads import Threads
    from parbank.training.trainer import Trainer

    settings = f"budget.minutes={seconds / 60}", "train.checkpoint_minutes=0", "train.compile=true", "batch.stages=[]"
    config = override(get_recipe("demo"), *settings)
    place = Runtime(device=torch.device("cpu"))
    with use_threads() as most, tempfile.TemporaryDirectory() as out:
        chosen = {name: Threads(most, adapts=name == OURS, measures=name != DEFAULTS) for name in names}
        length = config.batch.sequence_length
        dataset = open_dataset(config.data, vocab_size=config.model.vocab_size, sequence_length=length)
        trainer = Trainer(config, place, dataset, Path(out))
        turns = Turns(chosen, trainer)
        try:
            trainer.warm_up()
            assert trainer.compiled, "the compiler failed; its message is above"
            print(READY, flush=True)
            sys.stdin.readline()
            trainer.train(turns.note)
        finally:
            trainer.close()
            for threads in chosen.values():
                threads.close()
    return {
        name: {"tokens_per_second": turns.tokens[name] / turns.seconds[name], **chosen[name].describe()}
        for name in names
    }


def measure(seconds: float, names: list[str], *, before: int = 0, later: int = 0) -> dict[str, dict[str, Any]]:
    """`train` in a process of its own. before, later: busy processes that come before its start, or when it is ready."""
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    command = [sys.executable, __file__, "--train", *names, "--seconds", str(seconds)]
    with (
        busy(before),
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child,
    ):
        assert child.stdout is not None
        while (line := child.stdout.readline().strip()) != READY:
            assert line or child.poll() is None, "the training failed; its message is above"
        with busy(later):
            lines = child.communicate("go\n")[0].splitlines()
    assert child.returncode == 0, "the training failed; its message is above"
    found = json.loads(lines[-1])
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


def repeat(times: int, seconds: float, names: list[str], **others: int) -> dict[str, list[dict[str, Any]]]:
    runs = [measure(seconds, names, **others) for _ in range(times)]
    return {name: [run[name] for run in runs] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=4, help="processes that want a core each")
    parser.add_argument("--seconds", type=float, default=10.0, help="of training, for each provider and repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--train", nargs="+", choices=PROVIDERS, default=None, help=argparse.SUPPRESS)
    if "--train" in sys.argv:
        arguments = parser.parse_args()
        print(json.dumps(train(arguments.seconds, arguments.train)))
        return
    import harness

    arguments = harness.start(parser)
    del arguments.train
    seconds, repeats, count = arguments.seconds, arguments.repeats, arguments.busy
    alone = repeat(repeats, 2 * seconds, [DEFAULTS, OURS])
    later = {
        name: repeat(n, seconds, [name], later=count)[name] for name, n in [(OURS, repeats), (STEPS, 2), (DEFAULTS, 1)]
    }
    before = repeat(repeats, seconds, [OURS], before=count)
    rows = make_rows(alone, later, before, count)
    options = harness.settings_of(arguments)
    extra = {"measurements": {"alone": alone, "later": later, "before": before}}
    path = harness.write("busy", rows, out=arguments.out, settings=options, measured=MEASURED, extra=extra)
    print(path.with_suffix(".md").read_text(encoding="utf-8"))


def make_rows(alone: dict[str, Any], later: dict[str, Any], before: dict[str, Any], count: int) -> list[Any]:
    """Medians, and the shares that are promised."""
    import harness

    def speed(found: dict[str, Any], provider: str) -> float:
        return statistics.median(one["tokens_per_second"] for one in found[provider])

    cores = alone[OURS][0]["threads"]["cores"]
    fair = speed(alone, DEFAULTS) * cores / (cores + count)
    rows = [harness.Row("alone", name, speed(alone, name), "tokens/s") for name in alone]
    rows.append(harness.Row("lost alone", OURS, 100 * (1 - speed(alone, OURS) / speed(alone, DEFAULTS)), "%"))
    for when, found in (("", later), (" from the start", before)):
        beside, share = f"beside {count} busy processes{when}", f"of the fair share{when}"
        rows += [harness.Row(beside, name, speed(found, name), "tokens/s", bound=fair) for name in found]
        rows += [harness.Row(share, name, 100 * speed(found, name) / fair, "%") for name in found]
    return rows


if __name__ == "__main__":
    main()
