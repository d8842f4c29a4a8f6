"""A run folder that commit 796cb6c wrote, before the packages got their present names: it loads, scores and continues."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import parbank
from parbank.config import override
from parbank.data.dataset import open_dataset
from parbank.runtime import Runtime
from parbank.training.checkpoint import load_checkpoint
from parbank.training.folder import load_run_config
from parbank.training.trainer import Trainer

FOLDER = Path(__file__).parent / "data" / "first_run"
CHECKPOINT = Path("checkpoint", "step_00000003.pt")
TEXT = "It was the best of times, it was the worst of times.\n"
PACKED_BITS, TRAINED_BITS = 344.61305030252095, 344.61884955750804
"""Of TEXT, as that commit scored the artifact and the checkpoint."""


@pytest.mark.parametrize(("name", "bits"), [("", PACKED_BITS), ("model.pbk", PACKED_BITS), (CHECKPOINT, TRAINED_BITS)])
def test_every_file_loads_with_its_old_score(name: str | Path, bits: float) -> None:
    score = parbank.load(FOLDER / name, device="cpu").score(TEXT)
    assert (score.bits, score.bytes) == (pytest.approx(bits, rel=1e-6), len(TEXT))


def test_the_run_opens() -> None:
    run = parbank.Run.open(FOLDER, device="cpu")
    assert (run.summary["steps"], run.model.context) == (3, 32)


def test_its_training_continues_as_plain_pytorch(tmp_path: Path, text_spec: str) -> None:
    """Its config says `compile`, which then meant a GPU alone."""
    assert json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))["train"]["compile"] is True
    shutil.copytree(FOLDER, tmp_path / "run")
    config = override(load_run_config(tmp_path / "run"), "budget.steps=5")
    dataset = open_dataset(text_spec, vocab_size=config.model.vocab_size, say=lambda line: None)
    trainer = Trainer(config, Runtime(device=torch.device("cpu")), dataset, tmp_path / "run")
    try:
        other_text = {"data": trainer.batches.state_dict()}
        trainer.load_state_dict(load_checkpoint(FOLDER / CHECKPOINT) | other_text)
        assert (trainer.step, trainer.compiled, trainer.precision) == (3, False, "float32")
        trainer.train()
        assert trainer.step == 5
    finally:
        trainer.close()
