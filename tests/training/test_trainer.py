"""The loop's promises, on real text: what is undone is undone, what resumes goes on exactly, and ranks agree."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from parbank.config import override
from parbank.data.dataset import Dataset, open_dataset
from parbank.errors import CheckpointError, ConfigError, TrainingError
from parbank.optim.schedules import SCHEDULES
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from parbank.training import telemetry
from parbank.training.checkpoint import find_checkpoint, load_checkpoint
from parbank.training.config import RunConfig
from parbank.training.telemetry import Reading
from parbank.training.trainer import Trainer
from tests.distributed import run_distributed_test

CPU = Runtime(device=torch.device("cpu"))


def nano(*settings: str) -> RunConfig:
    return override(get_recipe("nano"), "budget.steps=12", "train.warmup_steps=0", *settings)


def readings_of(trainer: Trainer, stop_after: int | None = None) -> list[Reading]:
    """Of every step of a run, or of so many, and then a signal."""
    readings: list[Reading] = []

    def note(reading: Reading) -> None:
        readings.append(reading)
        if len(readings) == stop_after:
            trainer.stop_signal = 2

    trainer.train(note)
    return readings


def losses_of(trainer: Trainer, stop_after: int | None = None) -> list[float]:
    return [reading.loss for reading in readings_of(trainer, stop_after)]


def run(config: RunConfig, dataset: Dataset, out: Path, warm: bool = False) -> tuple[list[float], Trainer]:
    trainer = Trainer(config, CPU, dataset, out)
    if warm:
        trainer.warm_up()
    losses = losses_of(trainer)
    trainer.close()
    return losses, trainer


def assert_same_state(a: Trainer, b: Trainer) -> None:
    """Everything a checkpoint holds but times, bit for bit."""

    def compare(left: object, right: object, path: str) -> None:
        if isinstance(left, dict):
            assert isinstance(right, dict)
            assert left.keys() == right.keys(), path
            for key in left:
                compare(left[key], right[key], f"{path}.{key}")
        elif isinstance(left, (list, tuple)):
            assert isinstance(right, (list, tuple))
            assert len(left) == len(right), path
            for n, (x, y) in enumerate(zip(left, right)):
                compare(x, y, f"{path}[{n}]")
        elif isinstance(left, torch.Tensor):
            assert isinstance(right, torch.Tensor)
            assert torch.equal(left, right), path
        else:
            assert left == right, path

    left, right = a.state_dict(), b.state_dict()
    for state in (left, right):
        del state["seconds"], state["wait_seconds"]
        for group in state["optimizer"]["param_groups"]:
            group.pop("differentiable", None)  # PyTorch adds it, always false, to every optimizer it loads
    compare(left, right, "state")


def test_training_learns(dataset: Dataset, tmp_path: Path) -> None:
    losses, _ = run(nano("budget.steps=60"), dataset, tmp_path)
    assert len(losses) == 60
    assert losses[0] > 5.5  # near uniform over 320 tokens
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5


def test_everything_learns(dataset: Dataset, tmp_path: Path) -> None:
    """Two factors that both start at zero get no gradient, ever; such a part would go unnoticed in the loss."""
    options = ("model.gated_attention=true", "model.value_residual=true", "model.tied=false", "optim.warmdown=0")
    config = nano("budget.steps=6", *options)
    trainer = Trainer(config, CPU, dataset, tmp_path)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    losses_of(trainer)
    trainer.close()
    still = [name for name, parameter in trainer.model.named_parameters() if torch.equal(parameter, before[name])]
    assert still == []


def test_warm_up_is_undone_completely(dataset: Dataset, tmp_path: Path) -> None:
    plain, a = run(nano(), dataset, tmp_path)
    warmed, b = run(nano("train.warmup_steps=3"), dataset, tmp_path, warm=True)
    assert plain == warmed
    assert_same_state(a, b)


def test_prefetching_changes_nothing(dataset: Dataset, tmp_path: Path) -> None:
    ahead, a = run(nano("batch.prefetch=3"), dataset, tmp_path)
    at_once, b = run(nano("batch.prefetch=0"), dataset, tmp_path)
    assert ahead == at_once
    assert_same_state(a, b)


def test_accumulation_changes_only_rounding(dataset: Dataset, tmp_path: Path) -> None:
    few, _ = run(nano("batch.micro_batch_tokens=512"), dataset, tmp_path)
    many, _ = run(nano("batch.micro_batch_tokens=64"), dataset, tmp_path)
    assert many == pytest.approx(few, rel=1e-4)
    assert many != few, "eight passes instead of one should round differently, or nothing was accumulated"


@pytest.mark.parametrize("stop", [1, 7])
def test_a_resumed_run_is_bit_identical(dataset: Dataset, tmp_path: Path, stop: int) -> None:
    config = nano("average.swa_every=2", "average.swa_tail=1.0")
    whole, uninterrupted = run(config, dataset, tmp_path)
    first = Trainer(config, CPU, dataset, tmp_path)
    before = losses_of(first, stop_after=stop)
    path = first.save()
    first.close()
    assert path is not None
    second = Trainer(config, CPU, dataset, tmp_path)
    second.resume(load_checkpoint(path), path)
    after = losses_of(second)
    second.close()
    assert before + after == whole
    assert_same_state(second, uninterrupted)


@pytest.mark.parametrize(("first", "second"), [("0.035", "0.025"), ("0.025", "0.035")])
def test_a_resumed_run_may_have_learning_rates_that_are_equal_or_no_longer(
    dataset: Dataset, tmp_path: Path, first: str, second: str
) -> None:
    """Parameters of one learning rate share a group. Each keeps its own moments."""
    trainers = []
    for rate in (first, second):
        trainer = Trainer(
            nano("budget.steps=2", "optim.scalar_lr=0.025", f"optim.embedding_lr={rate}"), CPU, dataset, tmp_path
        )
        trainers.append(trainer)
    one, other = trainers
    losses_of(one)
    path = one.save()
    assert path is not None
    other.resume(load_checkpoint(path), path)
    assert len(one.optimizer.param_groups) != len(other.optimizer.param_groups)
    for (name, a), b in zip(one.model.named_parameters(), other.model.parameters()):
        held, kept = one.optimizer.state[a], other.optimizer.state[b]
        assert held.keys() == kept.keys(), name
        assert all(torch.equal(held[key], kept[key]) for key in held), name
    rates = {group["peak_lr"] for group in other.optimizer.param_groups if group["algorithm"] == "adamw"}
    assert rates == {0.025, float(second)}
    for trainer in trainers:
        trainer.close()


def test_other_data_or_another_model_is_refused_and_nothing_changes(dataset: Dataset, tmp_path: Path) -> None:
    _, trainer = run(nano("budget.steps=2"), dataset, tmp_path)
    state = trainer.state_dict() | {"dataset": dataset.fingerprint}
    other = Trainer(nano("model.layers=3", "model.value_layers=[2]"), CPU, dataset, tmp_path)
    start = {k: v.clone() for k, v in other.model.state_dict().items()}
    with pytest.raises(CheckpointError, match="another model"):
        other.resume(state, tmp_path)
    with pytest.raises(CheckpointError, match="other data"):
        other.resume({**state, "dataset": "something else"}, tmp_path)
    assert all(torch.equal(v, start[k]) for k, v in other.model.state_dict().items())
    assert other.step == 0
    other.close()


def test_non_finite_steps_are_skipped_then_end_the_run_with_a_good_checkpoint(dataset: Dataset, tmp_path: Path) -> None:
    config = nano("budget.steps=50", "optim.scalar_lr=1e38", "optim.warmdown=0", "train.checkpoint_minutes=1e-9")
    trainer = Trainer(config, CPU, dataset, tmp_path)
    readings: list[Reading] = []
    with pytest.raises(TrainingError, match="10 steps in a row"):
        trainer.train(readings.append)
    trainer.close()
    assert [r.skipped for r in readings[-9:]] == [1] * 9
    assert readings[0].skipped == 0
    assert trainer.skipped == 10
    kept = load_checkpoint(find_checkpoint(tmp_path))
    assert all(torch.isfinite(t).all() for t in kept["model"].values())
    assert kept["step"] == 0, "the first step's weights overflowed, so the last good ones are those before it"


def test_the_clock_is_kept_and_the_learning_rate_ends_with_it(dataset: Dataset, tmp_path: Path) -> None:
    config = override(nano(), "budget.steps=none", "budget.minutes=0.05", "optim.warmdown=0.5")
    trainer = Trainer(config, CPU, dataset, tmp_path)
    readings: list[Reading] = []
    trainer.train(readings.append)
    trainer.close()
    seconds, step = (
        trainer.clock.seconds(),
        max(reading.seconds for reading in readings),
    )  # a busy machine may stall one
    assert 3 - 4 * step <= seconds <= 3 + 2 * step
    assert readings[0].lr_share == 1
    assert readings[-1].lr_share < 10 * step / 1.5


def test_a_checkpoint_has_plain_names_only(dataset: Dataset, tmp_path: Path) -> None:
    trainer = Trainer(nano(), CPU, dataset, tmp_path)
    path = trainer.save()
    trainer.close()
    assert path is not None
    state = load_checkpoint(path)
    assert "blocks.1.mlp.down.weight" in state["model"]
    for names in (state["model"], state["averages"]["ema"]):
        assert not any("banks" in name for name in names)


def test_late_quantisation_changes_the_last_steps_and_nothing_before(dataset: Dataset, tmp_path: Path) -> None:
    plain, _ = run(nano(), dataset, tmp_path / "a")
    late, trainer = run(nano("quant.qat_share=0.5", "quant.qat_bits=2"), dataset, tmp_path / "b")
    assert late[:6] == plain[:6]
    assert all(a != b for a, b in zip(late[6:], plain[6:]))
    assert trainer.fake is not None
    assert trainer.fake.switch == 0, "weights are packed as they are"


def rank_losses(config: RunConfig, spec: str, cache: str, out: str) -> list[float]:
    torch.set_num_threads(1)
    place = Runtime(device=torch.device("cpu"), rank=dist.get_rank(), world=dist.get_world_size())
    data = open_dataset(spec, vocab_size=320, cache=Path(cache), say=lambda line: None)
    trainer = Trainer(config, place, data, Path(out))
    losses = losses_of(trainer)
    trainer.save()
    trainer.close()
    return losses


def test_two_ranks_give_the_losses_of_one(dataset: Dataset, text_spec: str, tmp_path: Path) -> None:
    config = nano()
    alone, trainer = run(config, dataset, tmp_path / "one")
    cache = str(dataset.folder.parent)
    first, second = run_distributed_test(rank_losses, 2, args=(config, text_spec, cache, str(tmp_path / "two")))
    assert first == second
    assert first == pytest.approx(alone, rel=1e-4)
    # and a checkpoint of two ranks goes on alone
    path = find_checkpoint(tmp_path / "two")
    resumed = Trainer(replace(config, budget=replace(config.budget, steps=14)), CPU, dataset, tmp_path / "two")
    resumed.resume(load_checkpoint(path), path)
    assert len(losses_of(resumed)) == 2
    resumed.close()
    for name, tensor in trainer.model.state_dict().items():
        torch.testing.assert_close(load_checkpoint(path)["model"][name], tensor, rtol=1e-3, atol=1e-4)


def test_a_run_that_only_skips_ends_with_a_checkpoint_of_its_last_good_step(dataset: Dataset, tmp_path: Path) -> None:
    config = nano("budget.steps=50", "train.checkpoint_minutes=0")
    trainer = Trainer(config, CPU, dataset, tmp_path)
    forward = trainer.passes._forward
    trainer.passes._forward = lambda *args: forward(*args) * (1.0 if trainer.step < 3 else torch.nan)
    with pytest.raises(
        TrainingError, match=r"10 steps in a row, up to step 13; .*last good step are in .*step_00000013"
    ):
        trainer.train()
    trainer.close()
    kept = load_checkpoint(find_checkpoint(tmp_path))
    good = Trainer(config, CPU, dataset, tmp_path / "good")
    assert len(losses_of(good, stop_after=3)) == 3
    good.close()
    assert all(torch.equal(kept["model"][name], tensor) for name, tensor in good.model.state_dict().items())


def test_an_infinite_loss_skips_the_step_though_its_gradients_are_finite(dataset: Dataset, tmp_path: Path) -> None:
    trainer = Trainer(nano(), CPU, dataset, tmp_path)
    forward = trainer.passes._forward
    trainer.passes._forward = lambda *args: forward(*args) + (torch.inf if trainer.step == 4 else 0.0)
    readings: list[Reading] = []
    trainer.train(readings.append)
    trainer.close()
    assert [r.skipped for r in readings] == [0] * 4 + [1] + [0] * 7


def test_weights_that_are_not_finite_are_not_saved(dataset: Dataset, tmp_path: Path) -> None:
    config = nano("train.keep_checkpoints=1")
    trainer = Trainer(config, CPU, dataset, tmp_path)
    good = trainer.save()

    def spoil(reading: Reading) -> None:
        if reading.step == 3:
            next(trainer.model.parameters()).data.view(-1)[0] = torch.inf
            trainer.stop_signal = 2

    with pytest.raises(TrainingError, match=f"weights are not finite after step 4; the last good checkpoint is {good}"):
        trainer.train(spoil)
    trainer.close()
    assert find_checkpoint(tmp_path) == good


def test_a_warm_up_leaves_no_count_of_skipped_steps(dataset: Dataset, tmp_path: Path) -> None:
    trainer = Trainer(nano("train.warmup_steps=9"), CPU, dataset, tmp_path)
    forward = trainer.passes._forward
    trainer.passes._forward = lambda *args: forward(*args) * torch.nan
    trainer.warm_up()
    trainer.close()
    assert trainer.optimizer.skipped_in_a_row == 0


def test_a_slow_checkpoint_counts_towards_the_clock(dataset: Dataset, tmp_path: Path) -> None:
    """The step after it knows what it took: none is started that ends after the limit, and none with an old learning rate."""
    config = override(nano(), "budget.steps=none", "budget.minutes=1", "train.checkpoint_minutes=0.02")
    trainer = Trainer(config, CPU, dataset, tmp_path)
    saved, save = [], trainer.save

    def slow_save() -> Path | None:
        saved.append((trainer.step, trainer.clock.seconds()))
        trainer.clock.set(trainer.clock.seconds() + 60)  # as if it had taken a minute
        trainer.clock.start()
        return save()

    trainer.save = slow_save  # type: ignore[method-assign]
    readings: list[Reading] = []
    trainer.train(readings.append)
    trainer.close()
    ((step, seconds),) = saved
    assert 0 < step == trainer.step == len(readings), "no step is started after it"
    assert seconds < 60
    assert readings[-1].seconds < 30
    assert 60 < trainer.clock.seconds() < 120


def test_the_time_of_a_checkpoint_is_no_stalled_step(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("budget.steps=none", "budget.minutes=60", "budget.most_steps=5", "train.checkpoint_minutes=1e-9")
    trainer = Trainer(override(nano(), *settings), CPU, dataset, tmp_path)
    now = [0.0]
    monkeypatch.setattr(telemetry, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    trainer.telemetry.restart()
    saved: list[int] = []

    def slow_save() -> None:
        saved.append(trainer.step)
        now[0] += 100

    forward = trainer.passes._forward

    def compute(*batch: torch.Tensor) -> torch.Tensor:
        now[0] += 0.25  # twice a step
        return forward(*batch)

    trainer.passes._forward = compute
    trainer.save = slow_save  # type: ignore[method-assign, assignment]
    seconds = [reading.seconds for reading in readings_of(trainer)]
    trainer.close()
    assert saved == [0, 1, 2, 3, 4]
    assert seconds == [0.5] * 5
    assert trainer.stalled_seconds == 0


def test_the_rise_of_the_learning_rate_is_no_tail(dataset: Dataset, tmp_path: Path) -> None:
    """Its first steps have a low rate, too. Weights that are hardly trained must not enter the mean of the tail."""
    swa = ("average.use=swa", "average.swa_every=1", "optim.warmup_steps=8")
    _, trainer = run(nano(*swa, "optim.warmdown=0"), dataset, tmp_path / "no tail")
    assert trainer.averages.state_dict()["snapshots"] == 0
    _, trainer = run(nano(*swa, "optim.warmdown=0.5"), dataset, tmp_path / "tail")
    assert trainer.averages.state_dict()["snapshots"] == 1, "the last of 12 steps has a sixth of the rate"


def test_a_closed_terminal_is_a_signal_unless_nohup_said_otherwise(dataset: Dataset, tmp_path: Path) -> None:
    trainer = Trainer(nano(), CPU, dataset, tmp_path)
    trainer.close()
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler, noticed in ((signal.SIG_DFL, signal.SIGHUP), (signal.SIG_IGN, 0)):
            signal.signal(signal.SIGHUP, handler)
            trainer.stop_signal = 0
            with trainer.watch_signals():
                os.kill(os.getpid(), signal.SIGHUP)
            assert trainer.stop_signal == noticed
            assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_step_in_flight_that_goes_well_does_not_undo_the_stop(dataset: Dataset, tmp_path: Path) -> None:
    """On a GPU the next steps are queued before the tenth skipped one is seen; the loop has been told to end by then."""
    trainer = Trainer(nano("budget.steps=1"), CPU, dataset, tmp_path)
    readings: list[Reading] = []
    trainer.train(readings.append)
    trainer._report(
        [replace(readings[0], skipped_in_a_row=10), replace(readings[0], skipped_in_a_row=0)], lambda r: None
    )
    with pytest.raises(TrainingError, match="10 steps in a row"):
        trainer._end_if_lost()
    trainer.close()


def test_algorithms_are_chosen_by_name(dataset: Dataset, tmp_path: Path) -> None:
    config = nano("optim.matrix_algorithm=adamw", "optim.matrix_lr=0.003", "optim.beta2=0.9", "budget.steps=6")
    losses, trainer = run(config, dataset, tmp_path)
    assert {group["algorithm"] for group in trainer.optimizer.param_groups} == {"adamw"}
    assert {group["betas"] for group in trainer.optimizer.param_groups} == {(0.9, 0.9)}
    assert losses[-1] < losses[0] - 0.5
    with pytest.raises(ConfigError, match=r"optim\.matrix_algorithm must be one of muon, adamw, lion, got 'sgd'"):
        nano("optim.matrix_algorithm=sgd")
    with pytest.raises(ConfigError, match="works on matrices"):
        nano("optim.other_algorithm=muon")


def test_schedule_and_order_are_chosen_by_name(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCHEDULES, "half", lambda progress, warmdown, floor: 0.5)
    trainer = Trainer(nano("optim.schedule=half", "batch.order=contiguous", "budget.steps=2"), CPU, dataset, tmp_path)
    first = trainer.batches.next().clone()
    assert first.reshape(-1)[:8].tolist() == dataset.train.read(0, 8).tolist()
    assert [reading.lr_share for reading in readings_of(trainer)] == [0.5, 0.5]
    trainer.close()
    for setting, choices in (
        ("optim.schedule=step", "linear, cosine, half"),
        ("batch.order=x", "shuffled, contiguous"),
    ):
        with pytest.raises(ConfigError, match=f"must be one of {choices}"):
            nano(setting)
