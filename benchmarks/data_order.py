"""What the order of the data is worth: windows in a random order against the same windows one after the other.

    python benchmarks/data_order.py [--data SPEC] [--tokens N] [--out DIR]

The demo model, the same tokens, the same number of steps, on whatever device there is. A contiguous batch is a stretch of one or
two documents, so its windows say much the same; a shuffled batch holds as many documents as windows. Bound: none. Writes
benchmarks/results/data_order: bits per byte of both orders.
"""

import argparse
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402

from parbank.config import override  # noqa: E402
from parbank.data.dataset import Dataset, open_dataset  # noqa: E402
from parbank.eval.windows import score_chunked  # noqa: E402
from parbank.recipes import get_recipe  # noqa: E402
from parbank.runtime import Runtime, pick_device  # noqa: E402
from parbank.training.config import RunConfig  # noqa: E402
from parbank.training.trainer import Trainer  # noqa: E402


def train(config: RunConfig, dataset: Dataset, order: str) -> harness.Row:
    """One run; only the order in which an epoch's windows are visited differs."""
    config = override(config, f"batch.order={order}")
    place = Runtime(device=pick_device(None))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, place, dataset, Path(folder))
        trainer.train()
        trainer.close()
        with trainer.averages.applied():
            score = score_chunked(
                trainer.model, dataset.val, dataset.tokenizer, context=config.batch.sequence_length, runtime=place
            )
    print(f"{order}: {score.bpb:.4f} bits per byte after {trainer.step} steps", flush=True)
    tokens = trainer.step * config.batch.batch_tokens
    return harness.Row(f"demo model, {tokens:,} tokens: val bpb", order, score.bpb, "bits/byte")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    arguments = harness.start(parser)
    settings = ["budget.minutes=none", f"budget.tokens={arguments.tokens}"]
    settings += ["batch.batch_tokens=2048", "batch.micro_batch_tokens=2048", "batch.stages=[]"]
    config = override(get_recipe("demo"), *settings)
    dataset = open_dataset(arguments.data, vocab_size=config.model.vocab_size)
    rows = [train(config, dataset, order) for order in ("contiguous", "shuffled")]
    measured = (
        "parbank/data/batches.py",
        "parbank/data/orders.py",
        "parbank/data/windows.py",
        "benchmarks/data_order.py",
    )
    options = harness.settings_of(arguments)
    print("written:", harness.write("data_order", rows, out=arguments.out, settings=options, measured=measured))


if __name__ == "__main__":
    main()
