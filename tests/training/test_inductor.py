"""Compiled passes on a CPU: where they pay, that a checkpoint keeps them, and that no compiler ends a run."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parbank.config import override
from parbank.data.dataset import Dataset
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from parbank.training.config import RunConfig
from parbank.training.inductor import find_compiler, wants_inductor
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


@pytest.mark.parametrize(("setting", "compiled"), [("null", False), ("true", True)])
def test_a_run_by_the_clock_does_not_compile_beside_busy_processes(
    setting: str, compiled: bool, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilation takes a minute of two cores, and many minutes of a busy machine. Who asks for it gets it."""
    monkeypatch.setattr("parbank.training.trainer.find_compiler", lambda: "c++")
    monkeypatch.setattr("parbank.training.trainer.compile_model", lambda model, threads: model)
    monkeypatch.setattr(Threads, "measure_busy", lambda self: True)
    settings = ("budget.steps=null", "budget.minutes=3", f"train.compile={setting}")
    trainer = Trainer(override(nano(), *settings), CPU, dataset, tmp_path)
    trainer.say = lambda line: None
    trainer.compile()
    assert trainer.compiled is compiled
    trainer.close()


def test_busy_is_what_others_want_now(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(2, measures=False)
    assert not threads.measure_busy(0.0), "not measured"
    threads._cores = 2
    for now, busy in ((0.1, False), (2.0, True)):
        answers = iter([9.0, now])  # the first answer is about the past
        threads._meter = SimpleNamespace(measure=lambda count, answers=answers: next(answers))  # type: ignore[assignment]
        assert threads.measure_busy(0.0) is busy


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
