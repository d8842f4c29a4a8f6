"""The precision of training on a CPU: chosen by its instructions, kept by a checkpoint, and never that of a score."""

from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from parbank.config import override
from parbank.data.dataset import Dataset
from parbank.errors import CheckpointError, ConfigError
from parbank.eval.windows import score_chunked
from parbank.model import GPT
from parbank.optim.newton_schulz import orthogonalize
from parbank.precision import training_precision
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from parbank.training.checkpoint import find_checkpoint, load_checkpoint
from parbank.training.config import RunConfig
from parbank.training.trainer import Trainer
from tests.training.test_trainer import assert_same_state, losses_of

CPU = Runtime(device=torch.device("cpu"))


def nano(precision: str) -> RunConfig:
    return override(get_recipe("nano"), "budget.steps=8", "train.warmup_steps=0", f"train.precision={precision}")


def pretend(monkeypatch: pytest.MonkeyPatch, **instructions: bool) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: MappingProxyType(instructions))


@pytest.mark.parametrize("instruction", ["avx512_bf16", "amx_bf16"])
def test_auto_follows_the_instructions_of_the_cpu(instruction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, avx512_f=True, **{instruction: True})
    assert training_precision("auto", CPU.device) == "bfloat16"
    assert training_precision("float32", CPU.device) == "float32"
    pretend(monkeypatch, avx512_f=True, **{instruction: False})
    assert training_precision("auto", CPU.device) == "float32"
    assert training_precision("bfloat16", CPU.device) == "bfloat16"
    assert training_precision("auto", torch.device("cuda")) == "bfloat16"


def test_all_ranks_train_in_the_precision_that_each_of_them_has(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, avx512_bf16=True)
    monkeypatch.setattr(Runtime, "agree", lambda self, values: [1.0] * len(values))  # another rank has no bfloat16
    trainer = Trainer(nano("auto"), CPU, dataset, tmp_path)
    trainer.close()
    assert trainer.precision == "float32"


def test_a_resumed_run_is_bit_identical_on_a_machine_without_bfloat16(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, avx512_bf16=True)
    whole = Trainer(nano("auto"), CPU, dataset, tmp_path / "whole")
    losses = losses_of(whole)
    first = Trainer(nano("auto"), CPU, dataset, tmp_path / "parts")
    begun = losses_of(first, stop_after=3)
    first.save()
    pretend(monkeypatch)
    second = Trainer(nano("auto"), CPU, dataset, tmp_path / "parts")
    assert second.precision == "float32"
    path = find_checkpoint(tmp_path / "parts")
    second.resume(load_checkpoint(path), path)
    assert second.precision == "bfloat16"
    assert begun + losses_of(second) == losses
    assert_same_state(whole, second)
    plain = Trainer(nano("float32"), CPU, dataset, tmp_path / "plain")
    exact = losses_of(plain)
    assert exact != losses
    assert exact == pytest.approx(losses, rel=0.02)
    for trainer in (whole, first, second, plain):
        trainer.close()


def test_a_checkpoint_without_a_precision_goes_on_in_float32(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, avx512_bf16=True)
    trainer = Trainer(nano("auto"), CPU, dataset, tmp_path)
    assert trainer.precision == "bfloat16"
    path = trainer.save()
    assert path is not None
    state = load_checkpoint(path)
    assert state.pop("precision") == "bfloat16"
    trainer.resume(state, path)
    assert trainer.precision == "float32"
    with pytest.raises(CheckpointError, match=r"malformed.*a precision of 'float8'"):
        trainer.resume({**state, "precision": "float8"}, path)
    trainer.close()


def test_scoring_is_in_float32_whatever_training_was(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(nano("bfloat16"), CPU, dataset, tmp_path)
    compute, seen = GPT._compute_dtype, list[torch.dtype]()

    def watch(self: GPT, device: torch.device) -> torch.dtype:
        seen.append(compute(self, device))
        return seen[-1]

    monkeypatch.setattr(GPT, "_compute_dtype", watch)
    losses_of(trainer, stop_after=1)
    assert set(seen) == {torch.bfloat16}
    seen.clear()
    score_chunked(trainer.model, dataset.val, dataset.tokenizer, context=64, runtime=CPU)
    assert set(seen) == {torch.float32}
    trainer.close()


def test_newton_schulz_follows_autocast_on_a_cpu() -> None:
    torch.manual_seed(0)
    G = torch.randn(3, 48, 144)
    exact = orthogonalize(G.double()).float()
    assert torch.allclose(orthogonalize(G), exact, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        reduced = orthogonalize(G)
    assert reduced.dtype == torch.float32
    assert 1e-3 < (reduced - exact).norm() / exact.norm() < 0.04


def test_fp8_needs_bfloat16_around_it() -> None:
    with pytest.raises(ConfigError, match=r"train.fp8=mlp needs bfloat16 .* train.precision is float32"):
        override(get_recipe("golf"), "train.fp8=mlp", "train.precision=float32")
