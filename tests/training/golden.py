"""The losses that test_golden.py holds the trainer to, and how they are made anew:

    python -m tests.training.golden        # from the root of the repository

The text is a random walk over the vocabulary, drawn from raw words of a bit generator, which numpy promises never to
change. It therefore depends on neither the Python version (as the standard library's text does) nor SentencePiece's.
Regenerate only when the mathematics was meant to change, and say in the commit what changed it.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch

from parbank.config import override
from parbank.data.dataset import Dataset
from parbank.data.shards import TokenSet
from parbank.data.tokenizer import Tokenizer
from parbank.recipes import get_recipe
from parbank.runtime import Runtime, versions
from parbank.training.config import RunConfig
from parbank.training.telemetry import Reading
from parbank.training.trainer import Trainer

RECORDED = Path(__file__).parent / "data" / "golden.json"
STEPS = 30
VOCAB = 320
BOS = 1


def configs() -> dict[str, RunConfig]:
    """nano with every option of the model and the optimizer on, and nano with every one of them off."""
    nano = override(get_recipe("nano"), f"budget.steps={STEPS}", "train.warmup_steps=0", "seed=7")
    on = override(
        nano, "model.gated_attention=true", "model.value_residual=true", "model.isolate_documents=true",
        "optim.warmup_steps=4", "average.swa_every=2", "average.swa_tail=0.5",
    )  # fmt: skip
    off = override(
        nano, "model.activation=gelu", "model.qk_gain=0", "model.rope_dims=0", "model.norm_scale=false",
        "model.unet_skips=false", "model.residual_mix=false", "model.block_gains=false", "model.smear=false",
        "model.bigram_buckets=0", "model.value_layers=[]", "model.xsa_layers=0", "model.softcap=0", "model.tied=false",
        "optim.clip=0", "optim.warmdown=0", "optim.matrix_weight_decay=0", "optim.adam_weight_decay=0",
    )  # fmt: skip
    return {"every option on": on, "every option off": off}


def make_tokens(count: int) -> np.ndarray:
    """A walk in which each token allows eight successors, so that there is something to learn; a BOS now and then."""
    bits = np.random.PCG64(2026)
    successors = bits.random_raw(8 * VOCAB).astype(np.uint64).reshape(VOCAB, 8) % (VOCAB - 3) + 3
    tokens, last = np.empty(count, dtype=np.uint16), BOS
    for place, word in enumerate(bits.random_raw(count).tolist()):
        # 1 in 64 tokens opens a document: about one in each window of 64, so that boundaries matter
        last = BOS if place == 0 or word % 64 == 0 else int(successors[last, word >> 32 & 7])
        tokens[place] = last
    return tokens


def make_dataset(folder: Path) -> Dataset:
    """The trainer only saves the tokenizer: it has the right size, and no token comes from it."""
    tokenizer = Tokenizer.train([" ".join(f"{n:x}" for n in range(4096))], VOCAB)
    tokens = make_tokens(12_000)  # less than the 30 steps of 512 tokens use: a second epoch begins
    return Dataset(TokenSet([tokens]), TokenSet([tokens[:2000]]), tokenizer, "golden", folder, "golden")


def train(config: RunConfig, folder: Path) -> list[float]:
    """Every step's loss, in float32 on one thread of the CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    readings: list[Reading] = []
    trainer = Trainer(config, Runtime(device=torch.device("cpu")), make_dataset(folder), folder)
    try:
        trainer.train(readings.append)
    finally:
        trainer.close()
        torch.set_num_threads(threads)
    return [reading.loss for reading in readings]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        losses = {name: train(config, Path(folder)) for name, config in configs().items()}
    RECORDED.parent.mkdir(exist_ok=True)
    made_with = {name: versions()[name] for name in ("parbank", "torch", "numpy", "platform")}
    RECORDED.write_text(json.dumps({"made_with": made_with, "losses": losses}, indent=1) + "\n", encoding="utf-8")
    for name, values in losses.items():
        print(f"{name}: {values[0]:.4f} -> {values[-1]:.4f} in {len(values)} steps")


if __name__ == "__main__":
    main()
