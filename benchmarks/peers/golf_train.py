"""The published recipe's own script on our tokens: what it scores in the time that our recipe has.

    python benchmarks/peers/golf_train.py --data SPEC [--seconds 120] [--seed 7] [--sliding] [--out DIR]

Equal to `parbank train --recipe sprint`: the tokenizer, the windows and their order, the batch and its passes, the momentum's
warm-up, the EMA's decay, the share of the time that the learning rate falls, the clock, the score. Different are the peer's
own parts: model code, kernels, optimizer, initial weights, packing. Writes benchmarks/results/peer_golf: bits per byte, bytes
and tokens per second. Bound: none.
"""

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import harness  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from parbank.data.dataset import Dataset, open_dataset  # noqa: E402
from parbank.recipes import get_recipe  # noqa: E402
from peers import golf, tokens  # noqa: E402

STAGES = ("at the start", "last weights", "before packing", "packed")
MEASURED = ("benchmarks/peers", "parbank/data", "parbank/recipes.py")


def changes(passes: int, decay: float, warmdown: float) -> dict[str, str]:
    return {
        **golf.CUDNN,
        **golf.passes(passes),
        "ema_decay = 0.997": f"ema_decay = {decay}",
        "warmdown_ms = args.warmdown_iters * step_ms": f"warmdown_ms = {warmdown} * max_wallclock_ms",
    }


class Hooks:
    """What main() finds instead of its own data and score, and what they learn."""

    def __init__(
        self, dataset: Dataset, *, length: int, rows: int, batch_rows: int, seed: int, with_sliding: bool
    ) -> None:
        self.dataset, self.length, self.rows, self.batch_rows, self.seed = dataset, length, rows, batch_rows, seed
        self.with_sliding = with_sliding
        self.scores: list[tokens.ChunkedScore] = []
        self.began = time.perf_counter()
        self.setup_seconds = 0.0
        self.sliding: dict[str, float] = {}

    def install(self, module: Any) -> None:
        hooks, original = self, module.eval_val_sliding

        class Loader:
            def __init__(self, pattern: str, rank: int, world_size: int, device: torch.device) -> None:
                self.windows = tokens.Windows(
                    hooks.dataset,
                    length=hooks.length,
                    batch_rows=hooks.batch_rows,
                    rows=hooks.rows,
                    seed=hooks.seed,
                    device=device,
                )

            def next_batch(self, *_: Any) -> tuple[Tensor, Tensor]:
                return self.windows.next()

        def eval_val(args: Any, model: Any, rank: int, world: int, device: torch.device, *_: Any, **__: Any) -> Any:
            model.eval()
            if not self.scores:  # main() scores once before its first step, outside its clock
                self.setup_seconds = time.perf_counter() - self.began

            def total_nats(x: Tensor, y: Tensor) -> Tensor:
                with torch.autocast("cuda", torch.bfloat16):
                    mean = model(x, y)  # over the targets that are not -100, PyTorch's default
                return mean.double() * (y != -100).sum()

            found = tokens.score_chunked(
                total_nats, self.dataset, length=self.length, rows=self.rows, ignored=-100, device=device
            )
            model.train()
            self.scores.append(found)
            return found.loss, found.bpb

        def sliding(*arguments: Any, **more: Any) -> Any:
            if not self.with_sliding:
                raise golf.Stop
            original(*arguments, **more)  # compiles
            torch.cuda.synchronize()
            began = time.perf_counter()
            loss, bpb = original(*arguments, **more)
            torch.cuda.synchronize()
            self.sliding = {"bpb": bpb, "tokens_per_second": len(self.dataset.val) / (time.perf_counter() - began)}
            return loss, bpb

        module.DistributedTokenLoader = Loader
        module.load_validation_tokens = lambda *_: torch.from_numpy(
            self.dataset.val.read(0, len(self.dataset.val)).astype("int32")
        )
        module.build_sentencepiece_luts = self.byte_tables
        module.eval_val, module.eval_val_sliding = eval_val, sliding

    def byte_tables(self, sp: Any, vocab: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Bytes of each token; none has a leading space to add, because ours count it."""
        lengths = torch.from_numpy(self.dataset.tokenizer.byte_lengths.astype("int16")).to(device)
        return (
            lengths,
            torch.zeros(vocab, dtype=torch.bool, device=device),
            torch.ones(vocab, dtype=torch.bool, device=device),
        )


def find(pattern: str, log: str) -> float:
    """The last number that the pattern finds in the log."""
    found = re.findall(pattern, log)
    if not found:
        raise SystemExit(f"the peer's log holds no {pattern!r}: its main() did not reach that point")
    return float(found[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--sliding", action="store_true", help="also its sliding-window score, and how fast that is, warm"
    )
    arguments = harness.start(parser)
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, and torch sees none")
    ours = get_recipe("sprint")
    batch, length = ours.batch, ours.batch.sequence_length
    dataset = open_dataset(arguments.data, vocab_size=ours.model.vocab_size)
    passes = batch.batch_tokens // batch.micro_batch_tokens
    settings = {
        **golf.RECORD, "DATA_PATH": str(dataset.folder), "TOKENIZER_PATH": str(dataset.folder / "tokenizer.model"),
        "TRAIN_BATCH_TOKENS": str(batch.batch_tokens), "TRAIN_SEQ_LEN": str(length), "EVAL_SEQ_LEN": str(length),
        "MAX_WALLCLOCK_SECONDS": str(arguments.seconds), "SEED": str(arguments.seed), "TRAIN_LOG_EVERY": "50",
        "ITERATIONS": "1000000", "VAL_LOSS_EVERY": "1000000",
    }  # fmt: skip
    hooks = Hooks(
        dataset,
        length=length,
        rows=batch.sequences // passes,
        batch_rows=batch.sequences,
        seed=arguments.seed,
        with_sliding=arguments.sliding,
    )
    decay, warmdown = ours.average.ema_decay, ours.optim.warmdown
    module = golf.load(changes(passes, decay, warmdown), settings)
    hooks.install(module)
    log = golf.call_main(module)
    steps = find(r"stopping_early: wallclock_cap train_time:\d+ms step:(\d+)/", log)
    seconds = find(r"stopping_early: wallclock_cap train_time:(\d+)ms", log) / 1e3
    name = "published recipe"
    scores = zip(STAGES, hooks.scores, strict=True)
    rows = [harness.Row(f"bits per byte, {stage}", name, score.bpb, "bits/byte") for stage, score in scores]
    if hooks.sliding:
        rows += [
            harness.Row("bits per byte, packed, sliding windows", name, hooks.sliding["bpb"], "bits/byte"),
            harness.Row("sliding windows, stride 64, warm", name, hooks.sliding["tokens_per_second"], "tokens/s"),
        ]
    rows += [
        harness.Row("tokens per second", name, steps * batch.batch_tokens / seconds, "tokens/s"),
        harness.Row("steps", name, steps, "steps"),
        harness.Row("training", name, seconds, "s"),
        harness.Row("setup", name, hooks.setup_seconds, "s", note="loading, compiling, 20 warm-up steps"),
        harness.Row("packed weights", name, find(r"Serialized model int6\+lzma: (\d+) bytes", log), "bytes"),
        harness.Row("code", name, find(r"Code size: (\d+) bytes", log), "bytes", note="not compressed"),
        harness.Row("peak memory", name, find(r"peak memory allocated: (\d+) MiB", log) / 1024, "GiB"),
    ]
    peer = golf.describe(
        "tokens: our tokenizer's, in our shuffled windows, by a loader of ours",
        "score: our chunked one, over every validation token, bytes counted by our tokenizer",
        f"batch: {batch.batch_tokens:,} tokens in {passes} passes, as ours; published 786,432 over 8 GPUs",
        f"EMA decay {decay} as ours; published 0.997, which averages more steps than half of this run",
        f"the learning rate falls over the last {warmdown:.0%} of the time, as ours; published: over 3,500 steps",
        f"{arguments.seconds:g} s on one GPU; published 600 s on eight",
    )
    logged = re.findall(r"step:(\d+)/\d+ train_loss:([\d.]+) train_time:(\d+)ms", log)
    curve = [[float(ms) / 1e3, int(step), float(loss)] for step, loss, ms in logged]
    path = harness.write(
        "peer_golf",
        rows,
        out=arguments.out,
        settings=harness.settings_of(arguments) | {"environment": _without_paths(settings)},
        seeds=[arguments.seed],
        measured=MEASURED,
        peers=[peer],
        extra={"curve": curve},
    )
    (path.parent / "log.txt").write_text(log, encoding="utf-8")
    print(path.with_suffix(".md").read_text())


def _without_paths(settings: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in settings.items() if not name.endswith("_PATH")}


if __name__ == "__main__":
    main()
