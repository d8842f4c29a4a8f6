"""On a GPU: the loop waits for nothing but log steps, and ranks under nccl give the losses of one."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from parbank.config import override
from parbank.data.dataset import open_dataset
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from parbank.training.telemetry import Reading
from parbank.training.trainer import Trainer
from tests.faults.ranks import find_port

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
STEPS = 12


@pytest.mark.parametrize("graph", [False, True])
def test_the_loop_waits_for_nothing_between_log_steps(
    graph: bool, text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = override(
        get_recipe("nano"), "budget.steps=30", "train.log_every=1000", "train.warmup_steps=4", "train.compile=false",
        f"train.cuda_graph={str(graph).lower()}",
    )  # fmt: skip
    dataset = open_dataset(text_spec, vocab_size=320, say=lambda line: None)
    trainer = Trainer(config, Runtime(device=torch.device("cuda", 0)), dataset, tmp_path)
    trainer.warm_up()
    waits: list[int] = []
    real = torch.cuda.Event.synchronize

    def count(event: torch.cuda.Event) -> None:
        if threading.current_thread() is threading.main_thread():  # the prefetcher's own thread may wait
            waits.append(trainer.step)
        real(event)

    monkeypatch.setattr(torch.cuda.Event, "synchronize", count)
    readings: list[Reading] = []

    def note(reading: Reading) -> None:
        readings.append(reading)
        if reading.step == 29:  # with the last one the loop is over, and its weights are looked at
            torch.cuda.set_sync_debug_mode("default")

    torch.cuda.set_sync_debug_mode("error")  # whatever else waits is an error
    try:
        trainer.train(note)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        trainer.close()
    assert [reading.step for reading in readings] == list(range(30))
    assert readings[-1].loss < readings[0].loss
    # the second step may wait for the first, and the end of training for the rest
    assert all(step in {2, 30} for step in waits), waits


@pytest.mark.parametrize("compiled", [False, True])
def test_graphs_change_nothing(compiled: bool, text_spec: str, tmp_path: Path) -> None:
    """In bfloat16: Inductor warns about float32 products, and a warning is an error here."""
    dataset = open_dataset(text_spec, vocab_size=320, say=lambda line: None)
    losses: dict[bool, list[float]] = {}
    for graph in (False, True):
        config = override(
            get_recipe("nano"), "budget.steps=12", "train.warmup_steps=3", f"train.compile={str(compiled).lower()}",
            f"train.cuda_graph={str(graph).lower()}", "train.precision=bfloat16",
        )  # fmt: skip
        trainer = Trainer(config, Runtime(device=torch.device("cuda", 0)), dataset, tmp_path / str(graph))
        trainer.warm_up()
        readings: list[Reading] = []
        trainer.train(readings.append)
        trainer.close()
        assert trainer.passes.captures == int(graph), "once, while warming up"
        losses[graph] = [reading.loss for reading in readings]
    # Before the first update the numbers are the same; then sums by atomic addition (embedding gradients) go their own way.
    assert losses[True][0] == losses[False][0]
    assert losses[True] == pytest.approx(losses[False], rel=5e-3)


def train_ranks(world: int, text_spec: str, out: Path) -> list[dict[str, float]]:
    """`parbank train` on `world` processes over nccl, as torchrun would start them; returns the rows of metrics.

    Where there are fewer GPUs than ranks they share one. nccl refuses two ranks of one machine on one GPU, so each then
    says that it is a machine of its own, and they talk through sockets: slow, and every collective is real.
    """
    port = find_port()
    shared = torch.cuda.device_count() < world
    processes = []
    for rank in range(world):
        places = {"RANK": rank, "LOCAL_RANK": 0 if shared else rank, "WORLD_SIZE": world, "MASTER_PORT": port}
        environment = os.environ | {key: str(value) for key, value in places.items()}
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        if shared and world > 1:
            environment |= {"NCCL_HOSTID": f"machine-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        command = [
            sys.executable, "-m", "parbank", "train", "--recipe", "nano", "--data", text_spec, "--steps", str(STEPS),
            "--set", "train.log_every=4", "--set", "train.compile=false", "--out", str(out), "--device", "cuda",
        ]  # fmt: skip
        processes.append(
            subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    try:
        for process in processes:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["world_size"] == world
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_two_ranks_under_nccl_give_the_losses_of_one(text_spec: str, tmp_path: Path) -> None:
    alone = train_ranks(1, text_spec, tmp_path / "one")
    both = train_ranks(2, text_spec, tmp_path / "two")
    assert [row["step"] for row in both] == [row["step"] for row in alone]
    # products of other batch shapes round differently
    assert [row["loss"] for row in both] == pytest.approx([row["loss"] for row in alone], rel=3e-3)
    assert [row["grad_norm"] for row in both] == pytest.approx([row["grad_norm"] for row in alone], rel=5e-2)
