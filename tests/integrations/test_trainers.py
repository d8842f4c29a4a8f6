"""ParallelMuon in six trainers, each with the real package on 2 ranks (gloo): saved on 2, resumed on 1, 2 and 3.

Every trainer learns the same small regression from the same batches, of 12 rows each, so that ranks, packages and resumed
runs must all end at the same weights.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parbank.optim import ParallelMuon, split_parameters
from tests.distributed import run_distributed_test

ROWS, HALF, STEPS = 12, 3, 6
SPLIT: dict[str, Any] = {"lr": 0.02, "adam_lr": 0.01}


class Net(nn.Module):
    """Names and result as HF Trainer wants them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.head(self.norm(self.second(torch.tanh(self.first(x)))))
        return {"loss": (out - labels).square().mean()}


def _batch(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """A rank's rows of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, 4, generator=generator)
    return x.chunk(world)[rank], y.chunk(world)[rank]


def _weights(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, param in model.named_parameters():
        whole = param.full_tensor() if hasattr(param, "full_tensor") else param
        found[name.removeprefix("module.").removeprefix("_orig_mod.")] = whole.detach().clone()
    return found


def _ranks() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _loop(model: Any, optimizer: ParallelMuon, first: int, last: int) -> None:
    rank, world = _ranks()
    for step in range(first, last):
        optimizer.zero_grad()
        model(*_batch(step, rank, world))["loss"].backward()
        optimizer.step()


# --- the trainers: (folder, first step, last step) -> weights; saves if first is 0, resumes otherwise ------


def plain_loop(folder: Path, first: int, last: int) -> dict[str, Tensor]:
    """A loop under torch.compile, without a wrapper: the optimizer averages gradients."""
    model = Net()
    compiled = torch.compile(model, backend="eager")
    optimizer = ParallelMuon(split_parameters(compiled, **SPLIT), max_norm=1.0)
    if first:
        saved = torch.load(folder / "plain.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    _loop(compiled, optimizer, first, last)
    state = optimizer.state_dict()  # on every rank
    if _ranks()[0] == 0 and not first:
        torch.save({"model": model.state_dict(), "optimizer": state}, folder / "plain.pt")
    return _weights(model)


def plain_ddp(folder: Path, first: int, last: int) -> dict[str, Tensor]:
    """DDP, with everything saved by rank 0 alone."""
    from torch.nn.parallel import DistributedDataParallel

    model = Net()
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = ParallelMuon(split_parameters(wrapped, **SPLIT), max_norm=1.0, reduce_gradients=False)
    if first:
        saved = torch.load(folder / "ddp.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    _loop(wrapped, optimizer, first, last)
    if _ranks()[0] == 0 and not first:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "ddp.pt")
    return _weights(model)


def fsdp(folder: Path, first: int, last: int) -> dict[str, Tensor]:
    """FSDP2, with torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net()
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = ParallelMuon(split_parameters(model, **SPLIT), max_norm=1.0)
    if first:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "fsdp")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    _loop(model, optimizer, first, last)
    if not first:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "fsdp")
    return _weights(model)


def accelerate(folder: Path, first: int, last: int) -> dict[str, Tensor]:
    """Accelerate: `save_state` and `load_state`."""
    from accelerate import Accelerator

    _act_as_torchrun()
    accelerator = Accelerator(cpu=True)
    model = Net()
    optimizer = ParallelMuon(split_parameters(model, **SPLIT), max_norm=1.0, reduce_gradients=False)
    wrapped, prepared = accelerator.prepare(model, optimizer)
    if first:
        accelerator.load_state(str(folder / "accelerate"))
    rank, world = _ranks()
    for step in range(first, last):
        prepared.zero_grad()
        accelerator.backward(wrapped(*_batch(step, rank, world))["loss"])
        prepared.step()
    if not first:
        accelerator.save_state(str(folder / "accelerate"))
    return _weights(model)


def huggingface(folder: Path, first: int, last: int) -> dict[str, Tensor]:
    """HF Trainer: DDP, and checkpoints that rank 0 writes alone."""
    from transformers import Trainer, TrainingArguments

    _act_as_torchrun()
    world = _ranks()[1]
    rows = [
        {"x": x, "labels": y} for step in range(STEPS) for x, y in zip(*_batch(step, 0, 1))
    ]  # in order: step by step, and within a step rank by rank
    args = TrainingArguments(
        output_dir=str(folder / "hf"), use_cpu=True, per_device_train_batch_size=ROWS // world, max_steps=last,
        save_steps=HALF, save_strategy="steps", logging_strategy="no", report_to=[], lr_scheduler_type="constant",
        max_grad_norm=0.0, disable_tqdm=True, seed=0, dataloader_num_workers=0, remove_unused_columns=False,
    )  # fmt: skip

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any, **options: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows)  # type: ignore[arg-type]

    model = Net()
    optimizer = ParallelMuon(split_parameters(model, **SPLIT), max_norm=1.0, reduce_gradients=False)
    trainer = InOrder(model=model, args=args, train_dataset=rows, optimizers=(optimizer, None))  # type: ignore[arg-type]
    trainer.train(resume_from_checkpoint=str(folder / "hf" / f"checkpoint-{first}") if first else None)
    return _weights(model)


def lightning(folder: Path, first: int, last: int) -> dict[str, Tensor]:
    """Lightning: its DDP strategy and its checkpoints."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import LightningEnvironment

    rank, world = _ranks()

    class Here(LightningEnvironment):
        """The ranks that the test has started."""

        creates_processes_externally = True
        main_address, main_port = "localhost", 0

        def world_size(self) -> int:
            return world

        def global_rank(self) -> int:
            return rank

        def local_rank(self) -> int:
            return rank

        def set_world_size(self, size: int) -> None: ...

        def set_global_rank(self, rank: int) -> None: ...

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return self.net(*_batch(self.global_step, rank, world))["loss"]  # a resumed loader begins anew

        def configure_optimizers(self) -> ParallelMuon:
            return ParallelMuon(split_parameters(self.net, **SPLIT), max_norm=1.0, reduce_gradients=False)

    module = Module()
    strategy = pl.strategies.DDPStrategy(process_group_backend="gloo") if world > 1 else "auto"
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, plugins=[Here()] if world > 1 else [], max_steps=last,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, barebones=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(range(2 * STEPS), batch_size=1)  # type: ignore[arg-type]
    path = folder / "lightning.ckpt"
    trainer.fit(module, loader, ckpt_path=str(path) if first else None, weights_only=False if first else None)
    if not first:
        trainer.save_checkpoint(path)
    return _weights(module.net)


def _act_as_torchrun() -> None:
    rank, world = _ranks()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 29400}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="localhost")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if world == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name)


# --- the tests --------------------------------------------------------------------------------------------------------

TRAINERS: dict[str, tuple[Callable[..., dict[str, Tensor]], str]] = {
    "a loop under `torch.compile`, without a wrapper": (plain_loop, "`ParallelMuon(groups)`"),
    "a loop with DDP, rank 0 saving alone": (plain_ddp, "`ParallelMuon(groups, reduce_gradients=False)`"),
    "FSDP2 with `torch.distributed.checkpoint`": (fsdp, "`ParallelMuon(groups)`"),
    "Accelerate": (accelerate, "`accelerator.prepare(model, ParallelMuon(groups, reduce_gradients=False))`"),
    "HF Trainer": (huggingface, "`Trainer(..., optimizers=(ParallelMuon(groups, reduce_gradients=False), None))`"),
    "Lightning": (lightning, "`ParallelMuon(groups, reduce_gradients=False)` from `configure_optimizers`"),
}
"""By name: the function, and what a user writes, for docs/reference/compatibility.md."""


def _call(trainer: Callable[..., dict[str, Tensor]], folder: Path, first: int, last: int) -> dict[str, Tensor]:
    return trainer(folder, first, last)


def _expect() -> dict[str, Tensor]:
    """One process, without interruption."""
    model = Net()
    _loop(model, ParallelMuon(split_parameters(model, **SPLIT), max_norm=1.0), 0, STEPS)
    return _weights(model)


@pytest.mark.parametrize("name", TRAINERS)
def test_saved_on_two_ranks_and_resumed_on_one_two_and_three(name: str, tmp_path: Path) -> None:
    trainer = TRAINERS[name][0]
    run_distributed_test(_call, 2, args=(trainer, tmp_path, 0, HALF))
    expected = _expect()
    for world in (1, 2, 3):
        for found in run_distributed_test(_call, world, args=(trainer, tmp_path, HALF, STEPS)):
            for key, weight in expected.items():
                torch.testing.assert_close(found[key], weight, rtol=1e-4, atol=1e-5, msg=f"{world} ranks: {key}")
