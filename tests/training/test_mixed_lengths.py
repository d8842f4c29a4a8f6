"""Mixed sequence lengths in a step: a window's length does not depend on the ranks, and every token counts the same."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, example, given
from hypothesis import strategies as st

from parbank.config import from_dict, to_dict
from parbank.data.batches import BatchStream
from parbank.data.dataset import Dataset, open_dataset
from parbank.errors import ConfigError
from parbank.runtime import Runtime
from parbank.training.checkpoint import load_checkpoint
from parbank.training.config import BatchConfig, RunConfig, Stage
from parbank.training.reports import introduce
from parbank.training.trainer import Trainer
from tests.distributed import run_distributed_test
from tests.training.test_trainer import CPU, nano, readings_of

MIXED = "batch.mixed_lengths=[32, 64]"  # nano has 8 windows of 64 tokens in a step, and at most 4 in a pass
STAGED = "batch.stages=[[0.5, [16, 64, 64, 64], 256]]"


def shapes_of(trainer: Trainer) -> list[tuple[int, ...]]:
    """Filled while the trainer trains: the shape of each pass."""
    shapes: list[tuple[int, ...]] = []
    trainer.model.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    return shapes


def losses_of(config: RunConfig, dataset: Dataset, out: Path) -> list[float]:
    trainer = Trainer(config, CPU, dataset, out)
    losses = [reading.loss for reading in readings_of(trainer)]
    trainer.close()
    return losses


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["batch.mixed_lengths=[48, 64]"], r"mixed_lengths has a sequence length of 48; it must divide .*\(64\)"),
        (["batch.mixed_lengths=[0, 64]"], "must divide"),
        (["batch.mixed_lengths=[-64, 64]"], "must divide"),
        (["batch.mixed_lengths=[16, 32]"], r"longest must be batch.sequence_length \(64\), the length that is scored"),
        (["batch.mixed_lengths=[64, 128]"], "longest must be"),
        (["batch.mixed_lengths=[16, 32, 64]"], r"3 lengths.*8 windows.*cannot be split into 3 equal parts"),
        (["batch.mixed_lengths=32"], "must be a list"),
        (["batch.mixed_lengths=[32.5, 64]"], "a whole number"),
        (["batch.stages=[[0.5, [48, 64], 512]]"], r"stages\[0\] has a sequence length of 48"),
        (["batch.stages=[[0.5, [32, 64], 192]]"], r"stages\[0\] has 2 lengths.*3 windows"),
        (["batch.stages=[[0.5, [], 512]]"], r"stages\[0\] has 0 lengths"),
        (["batch.stages=[[0.5, [32.5], 512]]"], r"a whole number or a list \(each a whole number\)"),
        (
            [
                "batch.sequence_length=256",
                "batch.batch_tokens=2048",
                "batch.mixed_lengths=[256, 1, 2, 4]",
                "batch.stages=[[0.5, [8, 16, 32, 64, 128, 8, 8, 8], 2048]]",
            ],
            "9 different sequence lengths; 8 at most",
        ),
    ],
)
def test_lengths_that_cannot_be_mixed_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        nano(*settings)


def test_a_config_with_mixed_lengths_survives_a_file() -> None:
    config = nano(MIXED, STAGED)
    assert from_dict(RunConfig, to_dict(config)) == config
    assert config.batch.plan() == [Stage(0.5, (16, 64, 64, 64), 256), Stage(math.inf, (32, 64), 512)]
    assert config.batch.all_lengths() == [16, 64, 32]
    assert nano().batch.all_lengths() == [64]


@given(st.integers(1, 24), st.lists(st.sampled_from([4, 8]), max_size=6), st.integers(1, 8), st.integers(1, 24))
@example(sequences=8, lengths=[4], world=2, most=2)
def test_a_window_has_the_same_length_on_any_number_of_ranks(
    sequences: int, lengths: list[int], world: int, most: int
) -> None:
    lengths = [*lengths, 8]
    assume(sequences % len(lengths) == 0 and sequences % world == 0)
    batch = BatchConfig(
        sequence_length=8, batch_tokens=8 * sequences, micro_batch_tokens=8 * most, mixed_lengths=tuple(lengths)
    )
    micro, (stage,) = batch.micro_sequences(world), batch.plan()
    assert micro <= most
    found = np.zeros((sequences // (micro * world), world, micro), dtype=int)  # as BatchStream deals: pass, rank, row
    for rank in range(world):
        found[:, rank] = np.array(stage.deal(len(found), rank, world))[:, None]
    assert found.reshape(-1).tolist() == np.repeat(lengths, sequences // len(lengths)).tolist()


def test_two_ranks_have_a_length_each_and_one_has_both() -> None:
    stage = nano(MIXED).batch.plan()[0]
    assert [nano(MIXED).batch.micro_sequences(world) for world in (1, 2, 4, 8)] == [4, 4, 2, 1]
    assert stage.deal(2, 0, 1) == [32, 64]
    assert [stage.deal(1, rank, 2) for rank in range(2)] == [[32], [64]]
    assert [stage.deal(1, rank, 4) for rank in range(4)] == [[32], [32], [64], [64]]
    assert [stage.deal(2, rank, 2) for rank in range(2)] == [[32, 64], [32, 64]], "several passes: ranks stay level"


def test_every_pass_has_its_shape(dataset: Dataset, tmp_path: Path) -> None:
    trainer = Trainer(nano(MIXED, STAGED), CPU, dataset, tmp_path)
    shapes = shapes_of(trainer)
    assert introduce(trainer).endswith("in 8 passes a rank, in windows of 32 and 64, after 1 stages of other batches")
    readings_of(trainer)
    trainer.close()
    assert shapes == 6 * [(4, 16), (1, 64), (1, 64), (1, 64)] + 6 * ([(2, 32)] * 4 + [(1, 64)] * 4)


def test_one_length_is_no_mix(dataset: Dataset, tmp_path: Path) -> None:
    plain = losses_of(nano(), dataset, tmp_path)
    assert losses_of(nano("batch.mixed_lengths=[64, 64]"), dataset, tmp_path) == plain
    assert losses_of(nano(MIXED), dataset, tmp_path) != plain


def test_the_tokens_are_those_of_a_run_without_mixed_lengths(dataset: Dataset, tmp_path: Path) -> None:
    """In the same order, so every token is a target once an epoch in both."""
    seen = []
    for settings in ((MIXED,), ()):
        trainer = Trainer(nano(*settings), CPU, dataset, tmp_path)
        pieces: list[torch.Tensor] = []
        trainer.model.register_forward_pre_hook(
            lambda module, inputs, to=pieces: to.append(inputs[1].reshape(-1).clone())
        )
        readings_of(trainer)
        trainer.close()
        seen.append(torch.cat(pieces))
    assert torch.equal(*seen)


def test_the_gradient_is_that_of_a_loop_over_windows(dataset: Dataset, tmp_path: Path) -> None:
    """Each window alone, weighted by its tokens."""
    trainer = Trainer(nano(MIXED, "train.precision=float32"), CPU, dataset, tmp_path)
    model = trainer.model
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    loss = trainer._accumulate_gradients(trainer.stages[-1])
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    trainer.close()
    stream = BatchStream(
        dataset.train, sequence_length=64, batch_sequences=8, micro_sequences=8, bos_id=model.config.bos_id
    )
    rows = np.empty(stream.shape, dtype=np.uint16)
    stream.fill(rows)
    model.zero_grad()
    total = 0.0
    for row, length in zip(torch.from_numpy(rows.astype(np.int64)), [32] * 4 + [64] * 4, strict=True):
        for start in range(0, 64, length):
            ids = row[start : start + length + 1]
            own = model(ids[None, :-1], ids[None, 1:]) * length / (8 * 64)
            own.backward()
            total += own.item()
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert len(found) > 10
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            error = (found[name] - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-12)
            assert error < 1e-4, name


def test_warm_up_runs_every_length_and_is_undone(dataset: Dataset, tmp_path: Path) -> None:
    plain = losses_of(nano(MIXED), dataset, tmp_path)
    trainer = Trainer(nano(MIXED, "train.warmup_steps=1"), CPU, dataset, tmp_path)
    shapes = shapes_of(trainer)
    trainer.warm_up()
    assert shapes == [(8, 32), (4, 64)]
    assert [reading.loss for reading in readings_of(trainer)] == plain
    trainer.close()


def test_compiling_runs_every_length(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parbank.training.trainer.find_compiler", lambda: "c++")
    monkeypatch.setattr("parbank.training.trainer.compile_model", lambda model, threads: model)
    trainer = Trainer(nano(MIXED, "train.compile=true"), CPU, dataset, tmp_path)
    trainer.say = lambda line: None
    shapes = shapes_of(trainer)
    trainer.compile()
    trainer.close()
    assert shapes == [(8, 32), (4, 64)]


def rank_run(
    settings: tuple[str, ...], spec: str, cache: str, out: str, start: str | None, stop: int | None
) -> tuple[list[float], set[tuple[int, ...]], str | None]:
    """A run on the ranks of this group, from a checkpoint if one is given: its losses, its shapes, and a checkpoint."""
    torch.set_num_threads(1)
    place = Runtime(device=torch.device("cpu"), rank=dist.get_rank(), world=dist.get_world_size())
    data = open_dataset(spec, vocab_size=320, cache=Path(cache), say=lambda line: None)
    trainer = Trainer(nano(*settings), place, data, Path(out))
    if start is not None:
        trainer.resume(load_checkpoint(Path(start)), Path(start))
    shapes = shapes_of(trainer)
    losses = [reading.loss for reading in readings_of(trainer, stop_after=stop)]
    path = trainer.save() if stop else None
    trainer.close()
    return losses, set(shapes), path and str(path)


def test_any_number_of_ranks_gives_the_losses_of_one(dataset: Dataset, text_spec: str, tmp_path: Path) -> None:
    """And a checkpoint of two ranks, each with a length of its own, is continued by one and by four."""
    alone = losses_of(nano(MIXED), dataset, tmp_path / "alone")
    common = ((MIXED,), text_spec, str(dataset.folder.parent))
    first, second = run_distributed_test(rank_run, 2, args=(*common, str(tmp_path / "two"), None, 5))
    assert first[0] == second[0] == pytest.approx(alone[:5], rel=1e-4)
    assert (first[1], second[1]) == ({(8, 32)}, {(4, 64)})
    path = first[2]
    trainer = Trainer(nano(MIXED), CPU, dataset, tmp_path / "one")
    trainer.resume(load_checkpoint(Path(path)), Path(path))
    assert [reading.loss for reading in readings_of(trainer)] == pytest.approx(alone[5:], rel=1e-4)
    trainer.close()
    four = run_distributed_test(rank_run, 4, args=(*common, str(tmp_path / "four"), path, None))
    assert [ranks[1] for ranks in four] == [{(4, 32)}] * 2 + [{(2, 64)}] * 2
    assert four[0][0] == pytest.approx(alone[5:], rel=1e-4)


@pytest.mark.parametrize("stop", [4, 8])  # in the stage, in the main one
def test_a_resumed_run_is_bit_identical(dataset: Dataset, tmp_path: Path, stop: int) -> None:
    config = nano(MIXED, STAGED)
    whole = losses_of(config, dataset, tmp_path)
    first = Trainer(config, CPU, dataset, tmp_path)
    before = readings_of(first, stop_after=stop)
    path = first.save()
    first.close()
    assert path is not None
    second = Trainer(config, CPU, dataset, tmp_path)
    second.resume(load_checkpoint(path), path)
    after = readings_of(second)
    second.close()
    assert [reading.loss for reading in before + after] == whole
