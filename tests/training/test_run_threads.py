"""The threads of a run: fewer beside other processes if the budget is a clock, always the same if it is steps."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from parbank.config import override
from parbank.data.dataset import Dataset
from parbank.display import Display
from parbank.errors import CheckpointError
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from parbank.threads import _WAITING, ShortWaits
from parbank.training import run as runs
from parbank.training import threads as module
from parbank.training.checkpoint import find_checkpoint, load_checkpoint
from parbank.training.config import RunConfig
from parbank.training.threads import Threads, choose_threads, plan_threads
from parbank.training.trainer import Trainer
from tests.training.test_trainer import CPU, assert_same_state, losses_of

QUIET, CROWDED = 0.0, 4.0  # cores that other processes want
CLOCK = ("budget.steps=none", "budget.minutes=0.01")


class FakeMeter:
    """Says what it is told, at every look; the last again when it has run out."""

    load: ClassVar[list[float]] = [QUIET]

    def __init__(self, cores: int) -> None:
        self._said = iter(self.load)
        self._last = self.load[0]

    def measure(self, threads: int, least_seconds: float = 0.0) -> float:
        self._last = next(self._said, self._last)
        return self._last


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of two cores and a load that is set by hand. Threads wait shortly, since the real load may be high, and
    whatever the environment says of it."""
    for name in _WAITING:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    waits = ShortWaits()
    waits.begin(2)
    monkeypatch.setattr("parbank.threads.count_cores", lambda: 2)
    monkeypatch.setattr(module, "count_cores", lambda: 2)
    monkeypatch.setattr(module, "LoadMeter", FakeMeter)
    yield
    waits.end()
    torch.set_num_threads(before)


@pytest.fixture
def four_cores(two_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(4)
    monkeypatch.setattr("parbank.threads.count_cores", lambda: 4)
    monkeypatch.setattr(module, "count_cores", lambda: 4)


def set_load(monkeypatch: pytest.MonkeyPatch, *load: float) -> None:
    monkeypatch.setattr(FakeMeter, "load", list(load))


def nano(*settings: str) -> RunConfig:
    return override(get_recipe("nano"), "budget.steps=6", "train.warmup_steps=1", *settings)


def follow(threads: Threads, looks: int) -> list[int]:
    found = []
    for _ in range(looks):
        threads.look()
        assert torch.get_num_threads() == threads.now
        found.append(threads.now)
    return found


def test_fewer_threads_at_once_and_more_after_two_calm_looks(four_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_load(monkeypatch, QUIET, CROWDED, CROWDED, QUIET, CROWDED, QUIET, QUIET, QUIET)
    said: list[str] = []
    threads = Threads(4, adapts=True, say=said.append)
    assert follow(threads, 8) == [4, 2, 2, 2, 2, 2, 4, 4]
    assert said == [
        "warning: other processes want 4.0 of the 4 cores of this machine. Until they end, training uses 2 of 4 threads, and "
        "short waits between its threads"
    ]
    about = threads.describe()
    assert about["threads"] == {"cores": 4, "first": 4, "last": 4, "mean": pytest.approx(26 / 9)}
    assert about["load"] == {"mean": pytest.approx(12 / 9), "peak": 4.0}


def test_two_threads_stay_and_wait_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread had 67% of the fair share beside four busy processes, two with short waits 79%."""
    set_load(monkeypatch, CROWDED)
    said: list[str] = []
    threads = Threads(2, adapts=True, say=said.append)
    assert follow(threads, 2) == [2, 2]
    assert threads._waits._helper is not None
    threads.close()
    assert said == [
        "warning: other processes want 4.0 of the 2 cores of this machine. Until they end, training uses short waits between "
        "its threads"
    ]


@pytest.mark.parametrize(
    ("cores", "most", "others", "expected"),
    [(2, 2, 0.4, 2), (2, 2, 40.0, 2), (1, 1, 4.0, 1), (2, 1, 4.0, 1), (8, 8, 8.0, 4), (8, 8, 100.0, 2), (8, 3, 5.0, 3)],
)
def test_the_number_is_the_fair_share_but_at_least_two(cores: int, most: int, others: float, expected: int) -> None:
    assert choose_threads(cores=cores, most=most, others=others) == expected


def test_a_single_busy_look_is_no_warning_and_a_second_stretch_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    set_load(monkeypatch, CROWDED, QUIET, CROWDED, QUIET)
    said: list[str] = []
    follow(Threads(2, adapts=True, say=said.append), 4)
    assert not said
    set_load(monkeypatch, CROWDED, CROWDED, QUIET, CROWDED, CROWDED)
    follow(Threads(2, adapts=True, say=said.append), 5)
    assert len(said) == 1


def test_a_number_that_stays_waits_shortly_and_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    set_load(monkeypatch, QUIET, CROWDED, CROWDED, QUIET, CROWDED)
    said: list[str] = []
    threads = Threads(2, say=said.append)
    helped = []
    for _ in range(5):
        assert follow(threads, 1) == [2]
        helped.append(threads._waits._helper is not None)
    assert helped == [False, True, True, False, True]
    threads.close()
    assert threads._waits._helper is None
    assert len(said) == 1
    assert "keeps its number of threads (2)" in said[0]
    assert "--threads sets another one" in said[0]


def test_without_a_measurement_nothing_changes() -> None:
    threads = Threads(2, measures=False)
    assert follow(threads, 2) == [2, 2]
    assert threads.describe() == {"threads": {"cores": 2, "first": 2, "last": 2, "mean": 2.0}, "load": None}


def run_nano(spec: str, out: Path, *settings: str, **options: object) -> tuple[dict[str, object], str]:
    """The summary of a run, and what it printed."""
    printed, before = io.StringIO(), torch.get_num_threads()
    config = nano(f"data={json.dumps(spec)}", "train.loggers=[]", *settings)
    result = runs.run(config, CPU, out, display=Display(file=printed), **options)  # type: ignore[arg-type]
    assert torch.get_num_threads() == before, "given back"
    assert result.summary is not None
    assert json.loads((out / "summary.json").read_text(encoding="utf-8")) == result.summary
    return result.summary, printed.getvalue()


def test_a_run_by_the_clock_takes_fewer_threads_under_load(
    four_cores: None, text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_load(monkeypatch, CROWDED)
    summary, printed = run_nano(text_spec, tmp_path / "clock", *CLOCK)
    assert summary["threads"] | {"mean": 0} == {"cores": 4, "first": 4, "last": 2, "mean": 0}  # type: ignore[operator]
    assert 2 < summary["threads"]["mean"] < 4  # type: ignore[index]
    assert summary["load"] == {"mean": 4.0, "peak": 4.0}
    assert printed.count("other processes want") == 1


def test_a_run_by_steps_is_the_same_whatever_the_load(
    four_cores: None, text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for load in (QUIET, CROWDED):
        set_load(monkeypatch, load)
        summary, _ = run_nano(text_spec, tmp_path / str(load))
        assert summary["threads"] == {"cores": 4, "first": 4, "last": 4, "mean": 4.0}
        found.append((summary["val_bpb"], summary["val_bpb_before_packing"]))
    assert found[0] == found[1]
    quiet, crowded = ((tmp_path / str(load) / "model.pbk").read_bytes() for load in (QUIET, CROWDED))
    assert quiet == crowded


def chosen(most: int) -> Threads:
    """As a run by steps has them."""
    torch.set_num_threads(most)
    return Threads(most, restores=True, say=lambda line: None)


def test_a_resumed_run_by_steps_keeps_its_threads(dataset: Dataset, tmp_path: Path) -> None:
    """Also where fewer cores are left: as many sums are split in as many parts."""
    whole = Trainer(nano(), CPU, dataset, tmp_path / "whole", chosen(2))
    losses = losses_of(whole)
    first = Trainer(nano(), CPU, dataset, tmp_path / "parts", chosen(2))
    begun = losses_of(first, stop_after=3)
    path = first.save()
    assert path is not None
    second = Trainer(nano(), CPU, dataset, tmp_path / "parts", chosen(1))
    state = load_checkpoint(path)
    assert state["threads"] == 2
    second.resume(state, path)
    assert (second.threads.now, torch.get_num_threads()) == (2, 2)
    assert begun + losses_of(second) == losses
    assert_same_state(whole, second)
    for trainer in (whole, first, second):
        trainer.close()


@pytest.mark.parametrize("options", [{"adapts": True}, {}])
def test_a_clock_and_a_given_number_do_not_take_a_checkpoints(options: dict[str, bool]) -> None:
    threads = Threads(2, **options)
    threads.restore(1)
    assert threads.now == 2


def test_more_threads_than_cores_are_kept_with_a_word() -> None:
    said: list[str] = []
    threads = Threads(2, restores=True, say=said.append)
    threads.restore(2)
    assert not said
    threads.restore(4)
    assert (threads.now, threads.first) == (4, 4)
    assert "began with 4 threads" in said[0]
    assert "--threads 2 is faster" in said[0]


def test_a_checkpoint_of_an_older_version_has_no_threads(dataset: Dataset, tmp_path: Path) -> None:
    trainer = Trainer(nano(), CPU, dataset, tmp_path, chosen(2))
    path = trainer.save()
    assert path is not None
    state = load_checkpoint(path)
    del state["threads"]
    trainer.resume(state, path)
    assert trainer.threads.now == 2
    for wrong in (0, 2**40, "two", 1.0, True):
        with pytest.raises(CheckpointError, match="malformed"):
            trainer.resume(load_checkpoint(path) | {"threads": wrong}, path)
    trainer.close()


def test_what_adapts() -> None:
    """Only a clock on one CPU."""
    clock, steps = nano(*CLOCK), nano()
    two = Runtime(device=torch.device("cpu"), rank=0, world=2)
    for config, place, given, expected in [
        (clock, CPU, False, (True, False)),
        (clock, CPU, True, (False, False)),
        (clock, two, False, (False, False)),
        (steps, CPU, False, (False, True)),
        (steps, CPU, True, (False, False)),
        (steps, two, False, (False, True)),
    ]:
        threads = plan_threads(config, place, 2, given=given, say=print)
        assert (threads._adapts, threads._restores) == expected


def test_the_command_keeps_threads_over_a_resume(
    text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    run_nano(text_spec, out, threads=2)
    torch.set_num_threads(1)  # such as OMP_NUM_THREADS=1
    config = nano(f"data={json.dumps(text_spec)}", "train.loggers=[]", "budget.steps=8")
    result = runs.run(config, CPU, out, resume=True, quiet=True)
    assert torch.get_num_threads() == 1
    assert result.summary is not None
    assert result.summary["threads"]["last"] == 2
    assert load_checkpoint(find_checkpoint(out))["threads"] == 2
