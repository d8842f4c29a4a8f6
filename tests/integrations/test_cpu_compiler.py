"""A real C++ compiler under the training step, and one that fails."""

import sys
from pathlib import Path

import pytest
import torch

from parbank.config import override
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from parbank.training.inductor import find_compiler
from parbank.training.trainer import Trainer
from parbank.training.warmup import random_data
from tests.training.test_trainer import losses_of

CPU = Runtime(device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()


def make(out: Path, *settings: str) -> Trainer:
    config = override(get_recipe("nano"), "budget.steps=6", "train.warmup_steps=0", *settings)
    return Trainer(config, CPU, random_data(config, 40 * config.batch.batch_tokens), out)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_compiled_passes_change_rounding_only(precision: str, tmp_path: Path) -> None:
    """Also with another number of threads, for which nothing is compiled again."""
    assert find_compiler(), "these tests need g++ or clang++"
    plain = make(tmp_path, f"train.precision={precision}")
    trainer = make(tmp_path, f"train.precision={precision}", "train.compile=true")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        trainer.compile()
        assert trainer.compiled
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        torch.set_num_threads(1)
        losses = losses_of(trainer)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
        assert losses == pytest.approx(losses_of(plain), rel=1e-5 if precision == "float32" else 1e-3)
    finally:
        torch.set_num_threads(threads)
        trainer.close()
        plain.close()


def test_a_compiler_that_fails_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "g++"
    broken.write_text(f"#!{sys.executable}\nraise SystemExit(1)\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, str(broken)))
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    plain, trainer = make(tmp_path), make(tmp_path, "train.compile=true")
    said: list[str] = []
    trainer.say = said.append
    assert losses_of(trainer) == losses_of(plain)
    assert not trainer.compiled
    assert any(line.startswith("note: compiling failed") for line in said)
    trainer.close()
    plain.close()
