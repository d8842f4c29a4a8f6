"""Stages of other sequence lengths and batches: the same tokens in the same order, exact resumes, ranks that agree."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from parbank.config import from_dict, to_dict
from parbank.data.dataset import Dataset, open_dataset
from parbank.errors import ConfigError
from parbank.runtime import Runtime
from parbank.training.checkpoint import load_checkpoint
from parbank.training.config import RunConfig, Stage
from parbank.training.passes import cut_windows
from parbank.training.trainer import Trainer
from tests.distributed import run_distributed_test
from tests.training.test_trainer import CPU, nano, readings_of

STAGES = "batch.stages=[[0.25, 16, 128], [0.25, 32, 256]]"  # nano then has 64 and 512
TOKENS = [128] * 3 + [256] * 3 + [512] * 6  # of the twelve steps


def losses_of(config: RunConfig, dataset: Dataset, out: Path, *, warm: bool = False) -> list[float]:
    trainer = Trainer(config, CPU, dataset, out)
    if warm:
        trainer.warm_up()
    losses = [reading.loss for reading in readings_of(trainer)]
    trainer.close()
    return losses


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))
def test_cutting_keeps_every_target_and_what_came_just_before_it(rows: int, length: int, pieces: int) -> None:
    batch = torch.arange(rows * (length * pieces + 1)).view(rows, -1)
    cut = cut_windows(batch, length)
    assert cut.shape == (rows * pieces, length + 1)
    assert torch.equal(cut[:, 1:].reshape(-1), batch[:, 1:].reshape(-1))
    assert torch.equal(cut[:, :-1].reshape(-1), batch[:, :-1].reshape(-1))


def test_the_plan_ends_with_the_main_stage() -> None:
    config = nano(STAGES)
    assert config.batch.plan() == [Stage(0.25, (16,), 128), Stage(0.5, (32,), 256), Stage(math.inf, (64,), 512)]
    assert nano().batch.plan() == [Stage(math.inf, (64,), 512)]
    assert from_dict(RunConfig, to_dict(config)) == config
    assert config.batch.micro_sequences(1) == 2, "the largest that divides 2, 4 and 8 sequences"
    assert config.batch.micro_sequences(2) == 1
    with pytest.raises(ConfigError, match="4 ranks"):
        config.batch.micro_sequences(4)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("[[0.5, 48, 512]]", r"stages\[0\].*48.*must divide batch.sequence_length \(64\)"),
        ("[[0.5, 0, 512]]", "must divide"),
        ("[[0.5, 32, 96]]", r"96 tokens; it must be a multiple of batch.sequence_length \(64\)"),
        ("[[0, 32, 512]]", "positive share"),
        ("[[0.5, 32, 512], [0.5, 64, 512]]", "come to 1; they must leave something"),
        ("[[0.5, 32]]", "a list of 3"),
        ("[[0.5, 32.5, 512]]", "a whole number"),
        ("[0.5, 32, 512]", "must be a list"),
        (str([[0.1, 32, 512]] * 8), "7 stages at most"),
    ],
)
def test_stages_that_cannot_run_are_refused(stages: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        nano(f"batch.stages={stages}")


def test_a_budget_in_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="not in tokens"):
        nano(STAGES, "budget.steps=none", "budget.tokens=10000")
    assert nano("batch.stages=[[0.5,32,512]]", "budget.steps=none", "budget.tokens=10000").batch.stages, (
        "as many a step"
    )


def test_a_stage_like_the_main_one_changes_nothing(dataset: Dataset, tmp_path: Path) -> None:
    plain = losses_of(nano(), dataset, tmp_path)
    assert losses_of(nano("batch.stages=[[0.5, 64, 512]]"), dataset, tmp_path) == plain


def test_each_step_has_its_stages_shape_and_batch(dataset: Dataset, tmp_path: Path) -> None:
    trainer = Trainer(nano(STAGES), CPU, dataset, tmp_path)
    shapes: list[tuple[int, ...]] = []
    handle = trainer.model.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    readings = readings_of(trainer)
    handle.remove()
    trainer.close()
    assert shapes == [(8, 16)] * 3 + [(4, 32)] * 3 * 2 + [(2, 64)] * 6 * 4
    assert [reading.tokens for reading in readings] == np.cumsum(TOKENS).tolist()
    assert trainer.tokens == sum(TOKENS)
    assert readings[-1].loss < readings[0].loss - 0.5


def test_the_tokens_are_those_of_a_run_without_stages(dataset: Dataset, tmp_path: Path) -> None:
    """In the same order: whatever a stage's length, the stream is cut, never drawn anew."""
    seen: dict[str, torch.Tensor] = {}
    for name, settings in {"stages": (STAGES,), "plain": ("budget.steps=8",)}.items():
        trainer = Trainer(nano(*settings), CPU, dataset, tmp_path)
        pieces: list[torch.Tensor] = []
        trainer.model.register_forward_pre_hook(
            lambda module, inputs, to=pieces: to.append(inputs[1].reshape(-1).clone())
        )
        readings_of(trainer)
        trainer.close()
        seen[name] = torch.cat(pieces)[: 8 * 512]
    assert torch.equal(seen["stages"], seen["plain"])


@pytest.mark.parametrize("stop", [2, 3, 7])  # inside a stage, between two, in the main one
def test_a_resumed_run_is_bit_identical(dataset: Dataset, tmp_path: Path, stop: int) -> None:
    config = nano(STAGES)
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
    assert after[-1].tokens == sum(TOKENS)


def test_warm_up_runs_every_stage_and_is_undone(dataset: Dataset, tmp_path: Path) -> None:
    plain = losses_of(nano(STAGES), dataset, tmp_path)
    trainer = Trainer(nano(STAGES, "train.warmup_steps=1"), CPU, dataset, tmp_path)
    lengths: set[int] = set()
    handle = trainer.model.register_forward_pre_hook(lambda module, inputs: lengths.add(inputs[0].shape[1]))
    trainer.warm_up()
    handle.remove()
    assert lengths == {16, 32, 64}
    assert trainer.tokens == 0
    assert [reading.loss for reading in readings_of(trainer)] == plain
    trainer.close()


def test_stages_follow_the_clock(dataset: Dataset, tmp_path: Path) -> None:
    config = nano(STAGES, "budget.steps=none", "budget.minutes=0.04")
    trainer = Trainer(config, CPU, dataset, tmp_path)
    tokens = [0] + [reading.tokens for reading in readings_of(trainer)]
    trainer.close()
    batches = np.diff(tokens).tolist()
    assert batches == sorted(batches), "a stage that is over does not come back"
    assert set(batches) == {128, 256, 512}


def rank_losses(config: RunConfig, spec: str, cache: str, out: str) -> list[float]:
    torch.set_num_threads(1)
    place = Runtime(device=torch.device("cpu"), rank=dist.get_rank(), world=dist.get_world_size())
    data = open_dataset(spec, vocab_size=320, cache=Path(cache), say=lambda line: None)
    trainer = Trainer(config, place, data, Path(out))
    readings = readings_of(trainer)
    trainer.close()
    assert [reading.tokens for reading in readings] == np.cumsum(TOKENS).tolist()
    return [reading.loss for reading in readings]


def test_two_ranks_give_the_losses_of_one(dataset: Dataset, text_spec: str, tmp_path: Path) -> None:
    alone = losses_of(nano(STAGES), dataset, tmp_path)
    arguments = (nano(STAGES), text_spec, str(dataset.folder.parent), str(tmp_path))
    first, second = run_distributed_test(rank_losses, 2, args=arguments)
    assert first == second
    assert first == pytest.approx(alone, rel=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize(("lengths", "count"), [(STAGES, 3), ("batch.mixed_lengths=[32, 64]", 2)])
def test_each_length_has_one_graph_captured_while_warming_up(
    lengths: str, count: int, compiled: str, dataset: Dataset, tmp_path: Path
) -> None:
    """In bfloat16: Inductor warns about float32 products, and a warning is an error here."""
    losses = {}
    for graph in ("false", "true"):
        settings = (lengths, "train.warmup_steps=3", f"train.compile={compiled}", f"train.cuda_graph={graph}")
        settings += ("train.precision=bfloat16",)
        trainer = Trainer(nano(*settings), Runtime(device=torch.device("cuda", 0)), dataset, tmp_path)
        trainer.warm_up()
        captures = trainer.passes.captures
        assert captures == (count if graph == "true" else 0)
        losses[graph] = [reading.loss for reading in readings_of(trainer)]
        trainer.close()
        assert trainer.passes.captures == captures
    assert losses["true"] == pytest.approx(losses["false"], rel=5e-3)
