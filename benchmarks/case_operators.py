"""Do case operators in the tokenizer pay? Trains on a text without and with them (parbank.data.case).

    python benchmarks/case_operators.py --data text:train=A,val=B [--recipe demo] [--steps 300] [--seeds 0,1,2] [--set a.b=v]

Both models see the same number of tokens, and both scores count the bytes of the text. Bound: none; the score without
operators is the baseline. Writes benchmarks/results/case_operators: bits per byte before packing, by seed.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402

from parbank.config import override  # noqa: E402
from parbank.data.dataset import Dataset, open_dataset  # noqa: E402
from parbank.data.tokenizer import TokenizerConfig  # noqa: E402
from parbank.eval.windows import score_chunked  # noqa: E402
from parbank.recipes import get_recipe  # noqa: E402
from parbank.runtime import Runtime, pick_device  # noqa: E402
from parbank.training.trainer import Trainer  # noqa: E402

MEASURED = ("parbank", "benchmarks/case_operators.py")


def prepare(spec: str, vocab: int, folder: Path) -> dict[str, Dataset]:
    names = {"plain": False, "case operators": True}
    found = {
        name: open_dataset(spec, vocab_size=vocab, tokenizer=TokenizerConfig(case_operators=operators), cache=folder)
        for name, operators in names.items()
    }
    assert len({dataset.val_text_sha256 for dataset in found.values()}) == 1, "both are scored on the same text"
    return found


def train(dataset: Dataset, recipe: str, steps: int, seed: int, settings: list[str]) -> dict[str, Any]:
    config = get_recipe(recipe)
    config = override(config, "budget.minutes=null", f"budget.steps={steps}", f"seed={seed}", *settings)
    config = override(config, "train.validate_every=off", f"model.bos_id={dataset.tokenizer.bos_id}")
    place = Runtime(device=pick_device(None))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, place, dataset, Path(folder))
        trainer.train()
        trainer.close()
        with trainer.averages.applied():
            length = config.batch.sequence_length
            score = score_chunked(trainer.model, dataset.val, dataset.tokenizer, context=length, runtime=place)
    return {"bpb": score.bpb, "tokens": len(dataset.val)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="a.b=v")
    arguments = harness.start(parser)
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        vocab = override(get_recipe(arguments.recipe), *arguments.settings).model.vocab_size
        datasets = prepare(arguments.data, vocab, Path(folder))
        for seed in seeds:
            for name, dataset in datasets.items():
                found = train(dataset, arguments.recipe, arguments.steps, seed, arguments.settings)
                print(f"{name}, seed {seed}: {found['bpb']:.4f}, {found['tokens']:,} tokens to score", flush=True)
                rows.append(harness.Row(name, f"seed {seed}", found["bpb"], "bits/byte"))
    settings = harness.settings_of(arguments)
    harness.write("case_operators", rows, out=arguments.out, settings=settings, seeds=seeds, measured=MEASURED)


if __name__ == "__main__":
    main()
