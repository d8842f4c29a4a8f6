"""Compiled passes on a CPU: where they pay, that a checkpoint keeps them, and that no compiler ends a run."""

import json
from pathlib import Path

import pytest
import torch
import torch._dynamo

from parbank.config import override
from parbank.cores import LoadMeter
from parbank.data.dataset import Dataset
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from parbank.training.config import RunConfig
from parbank.training.inductor import find_compiler, wants_inductor
from parbank.training.run import run
from parbank.training.threads import Threads
from parbank.training.trainer import Trainer
from tests.training.test_trainer import losses_of

CPU = Runtime(device=torch.device("cpu"))


def nano(*settings: str) -> RunConfig:
    return override(get_recipe("nano"), "budget.steps=6", "train.warmup_steps=0", *settings)


@pytest.mark.parametrize(
    ("settings", "parameters", "wanted"),
    [
        (("budget.minutes=2", "budget.steps=null"), 1_000_000, True),
        (("budget.minutes=1.9", "budget.steps=null"), 1_000_000, False),
        (("budget.minutes=2", "budget.steps=null", "budget.most_steps=3300"), 1_000_000, True),
        (("budget.minutes=2", "budget.steps=null", "budget.most_steps=3200"), 1_000_000, False),
        (("budget.minutes=1.9", "budget.steps=null", "budget.most_steps=3300"), 1_000_000, False),
        (("budget.steps=3300",), 1_000_000, True),
        (("budget.steps=3200",), 1_000_000, False),
        (("budget.steps=null", "budget.tokens=1700000"), 1_000_000, True),
        (("train.compile=true",), 1, True),
        (("budget.minutes=60", "budget.steps=null", "train.compile=false"), 1_000_000, False),
    ],
)
def test_long_runs_on_one_cpu_compile(settings: tuple[str, ...], parameters: int, wanted: bool) -> None:
    config = override(get_recipe("nano"), "train.compile=null", "batch.batch_tokens=512", *settings)
    assert wants_inductor(config, CPU, parameters) is wanted
    assert not wants_inductor(config, Runtime(device=torch.device("cuda")), parameters)
    assert not wants_inductor(config, Runtime(device=CPU.device, world=2), parameters)


def test_a_resumed_run_goes_on_compiled(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parbank.training.trainer.find_compiler", lambda: "c++")
    monkeypatch.setattr("parbank.training.trainer.compile_model", lambda model, threads: model)
    trainer = Trainer(nano("train.compile=true"), CPU, dataset, tmp_path / "compiled")
    said: list[str] = []
    trainer.say = said.append
    trainer.compile()
    assert [line.split(" ")[0] for line in said] == ["compiling", "compiled"]
    trainer.compile()
    assert len(said) == 2, "once"
    plain = Trainer(nano(), CPU, dataset, tmp_path / "plain")
    assert losses_of(trainer) == losses_of(plain), "compiling leaves no gradients"
    state = trainer.state_dict()
    assert state["compiled"] is True
    again = Trainer(nano("train.compile=null"), CPU, dataset, tmp_path / "again")
    assert not again.compiled
    again.load_state_dict(state)
    assert again.compiled
    again.load_state_dict({name: value for name, value in state.items() if name != "compiled"})
    assert not again.compiled, "older checkpoints were not compiled"
    for one in (plain, trainer, again):
        one.close()


def test_every_run_of_a_process_is_compiled(
    text_spec: str, tmp_path: Path, compiled_graphs: list[torch.fx.GraphModule]
) -> None:
    """PyTorch gives up after so many models in one process, and runs the next one as it is."""
    settings = ("train.compile=true", "budget.steps=1", "quant.method=rows", f"data={json.dumps(text_spec)}")
    with torch._dynamo.config.patch(recompile_limit=1):
        for cap in (20, 25):
            run(nano(*settings, f"model.softcap={cap}"), CPU, tmp_path / str(cap), quiet=True)
    assert len(compiled_graphs) == 2


def test_without_a_compiler_training_runs_as_plain_pytorch(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert find_compiler() is None
    assert_plain(dataset, tmp_path, "there is no C++ compiler")


def test_a_broken_compiler_does_not_end_a_run(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/integrations has a real one."""

    def fail(*batch: torch.Tensor) -> torch.Tensor:
        torch.rand(1)  # a failed attempt must not move the random state
        raise RuntimeError("CppCompileError: C++ compile error\n\nCommand: ...")

    monkeypatch.setattr("parbank.training.trainer.find_compiler", lambda: "c++")
    monkeypatch.setattr("parbank.training.trainer.compile_model", lambda model, threads: fail)
    assert_plain(dataset, tmp_path, "compiling failed (RuntimeError: CppCompileError: C++ compile error)")


def test_a_run_by_the_clock_compiles_beside_busy_processes(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its clock starts. As plain PyTorch it reached 51% of the fair share of a busy machine."""
    monkeypatch.setattr("parbank.training.trainer.find_compiler", lambda: "c++")
    monkeypatch.setattr("parbank.training.trainer.compile_model", lambda model, threads: model)
    monkeypatch.setattr(LoadMeter, "measure", lambda self, threads, least_seconds=0.0: 4.0)
    settings = ("budget.steps=null", "budget.minutes=3", "train.compile=null")
    said: list[str] = []
    trainer = Trainer(override(nano(), *settings), CPU, dataset, tmp_path, Threads(2, adapts=True, say=said.append))
    trainer.say = said.append
    trainer.compile()
    assert trainer.compiled
    assert "longer on a busy machine" in said[0]
    trainer.close()


def assert_plain(dataset: Dataset, out: Path, reason: str) -> None:
    """A run that asked for compilation has the losses of one that did not, bit for bit, and says why."""
    plain = Trainer(nano(), CPU, dataset, out / "plain")
    trainer = Trainer(nano("train.compile=true"), CPU, dataset, out / "compiled")
    said: list[str] = []
    trainer.say = said.append
    assert losses_of(trainer) == losses_of(plain)
    assert not trainer.compiled
    assert [line for line in said if line.startswith(f"note: {reason}")]
    trainer.close()
    plain.close()
