"""Ranks under real torchrun, and as real processes: restarts, lost ranks, and other numbers of ranks. The short forms are in
tests/training/test_agreement.py, tests/test_watch.py and tests/faults/test_lost_ranks.py."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import parbank
from parbank import watch
from parbank.data.dataset import open_dataset
from parbank.training.checkpoint import find_checkpoint, list_checkpoints, load_checkpoint
from tests.faults.ranks import LIMIT_SECONDS, ROOT, Loss, Rank, find_port, join, lose_rank, start_ranks, wait_for

STEPS = 24
KILLS = 6  # benchmarks/faults.py does 50
LATE = "step 20 "  # tests hold a run here that must not end before they have acted
LONGEST = 600.0  # seconds that a sound run may take on a busy machine
MOMENTS = ("training tokens", "step 1 ", "step 20 ", "before packing", "scoring the packed model")


def words(spec: str, out: Path, *more: str) -> list[str]:
    """`parbank train`, as one command that starts and continues a run."""
    settings = ("train.log_every=1", "train.checkpoint_minutes=1e-9")
    return [
        "train", "--recipe", "nano", "--data", spec, "--steps", str(STEPS), "--out", str(out), "--device", "cpu",
        *(word for setting in settings for word in ("--set", setting)), *more,
    ]  # fmt: skip


def agent(*options: str, arguments: list[str], log: Path, hold: Path) -> Rank:
    """A process of torchrun. `hold` is the file of tests/faults/held.py."""
    program = ["-m", "tests.faults.held", str(hold)]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *program, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    out, err = log.with_suffix(".out"), log.with_suffix(".err")
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return Rank(subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr), out, err)


def children(parent: int) -> dict[int, int]:
    """The worker processes of an agent: rank to process id."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "stat").read_text().rpartition(")")[2].split()
                variables = dict(
                    part.split("=", 1) for part in (folder / "environ").read_text().split("\0") if "=" in part
                )
            except (OSError, UnicodeDecodeError):
                continue
            if int(line[1]) == parent and "RANK" in variables:
                found[int(variables["RANK"])] = int(folder.name)
    return found


def tensors(out: Path) -> dict[str, Any]:
    state = load_checkpoint(find_checkpoint(out))
    assert state["step"] == STEPS
    return {"model": state["model"], "optimizer": state["optimizer"]["state"], "averages": state["averages"]}


def assert_same(one: Any, other: Any) -> None:
    """Equal to the last bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def losses(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["loss"] for row in rows]


def train_ranks(spec: str, out: Path, world: int, *more: str) -> Path:
    with start_ranks(out.parent / f"log-{out.name}", [words(spec, out, *more)] * world) as ranks:
        codes = join(ranks, LONGEST)
        assert codes == [0] * world, [rank.complained() for rank in ranks]
    return out


@pytest.fixture(scope="module")
def undisturbed(text_spec: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks."""
    return train_ranks(text_spec, tmp_path_factory.mktemp("undisturbed") / "run", 2)


def test_torchrun_restarts_give_the_same_result(undisturbed: Path, text_spec: str, tmp_path: Path) -> None:
    """A rank is killed before the first checkpoint could be written, then another rank in the middle of the run."""
    out, hold = tmp_path / "run", tmp_path / "hold"
    options = ("--standalone", "--nproc_per_node=2", "--max-restarts=3")
    hold.write_text("training tokens")
    run = agent(*options, arguments=words(text_spec, out, "--resume"), log=tmp_path / "agent", hold=hold)
    try:
        for starts, text, victim in ((1, "training tokens", 1), (2, "step 12 ", 0)):
            wait_for(run, text)
            assert run.said().count("training tokens") == starts
            os.kill(children(run.process.pid)[victim], signal.SIGKILL)
            hold.write_text(LATE)
            deadline = time.monotonic() + LONGEST
            while run.said().count("training tokens") == starts:
                assert run.process.poll() is None, run.complained()
                assert time.monotonic() < deadline, run.said()
                time.sleep(0.05)
        hold.unlink()
        assert join([run], LONGEST) == [0], run.complained()
    finally:
        run.process.kill()
        run.process.wait()
    for victim in (0, 1):
        assert any(f"rank {victim} was lost: its process was killed" in line for line in run.complained())
    assert not any("Traceback" in line for line in run.complained())
    assert "to resume from; the run starts at its beginning" in run.said()
    assert "resuming from" in run.said()
    assert_same(tensors(out), tensors(undisturbed))
    assert (out / "model.pbk").read_bytes() == (undisturbed / "model.pbk").read_bytes()
    assert losses(out) == losses(undisturbed)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["world_size"], summary["steps"]) == (2, STEPS)


def test_two_agents_restart_together(undisturbed: Path, text_spec: str, tmp_path: Path) -> None:
    """torchrun --nnodes 2, both agents on this machine; a rank of the second is killed."""
    out, hold = tmp_path / "run", tmp_path / "hold"
    options = ("--nnodes=2", "--nproc_per_node=1", "--max-restarts=3", "--rdzv_backend=c10d", "--rdzv_id=parbank")
    options += (f"--rdzv_endpoint=127.0.0.1:{find_port()}", "--local_addr=127.0.0.1")
    hold.write_text(LATE)
    arguments = words(text_spec, out, "--resume")
    agents = [agent(*options, arguments=arguments, log=tmp_path / f"agent{n}", hold=hold) for n in range(2)]
    try:
        deadline = time.monotonic() + LONGEST
        while not any("step 8 " in run.said() for run in agents):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        second = next(run for run in agents if "step 8 " not in run.said())
        ((rank, worker),) = children(second.process.pid).items()
        assert rank == 1
        os.kill(worker, signal.SIGKILL)
        hold.unlink()
        assert join(agents, LONGEST) == [0, 0], [run.complained() for run in agents]
    finally:
        for run in agents:
            run.process.kill()
            run.process.wait()
    assert any("resuming from" in run.said() for run in agents)
    assert_same(tensors(out), tensors(undisturbed))
    assert (out / "model.pbk").read_bytes() == (undisturbed / "model.pbk").read_bytes()


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_a_checkpoint_continues_on_another_number_of_ranks(
    before: int, after: int, text_spec: str, tmp_path: Path
) -> None:
    out, hold = tmp_path / "run", tmp_path / "hold"
    hold.write_text("step 8 ")
    with start_ranks(tmp_path / "log", [words(text_spec, out)] * before, hold=hold) as ranks:
        wait_for(ranks[0], "step 8 ")
        for rank in ranks:
            rank.process.send_signal(signal.SIGTERM)
        hold.unlink()
        assert join(ranks, LONGEST) == [128 + signal.SIGTERM] * before
    train_ranks(text_spec, out, after, "--resume")
    whole = train_ranks(text_spec, tmp_path / "whole", after)
    assert losses(out) == pytest.approx(losses(whole), rel=1e-4)
    mine, theirs = tensors(out), tensors(whole)
    assert mine["optimizer"].keys() == theirs["optimizer"].keys()
    for key, state in mine["optimizer"].items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                assert value.shape == theirs["optimizer"][key][name].shape
    for name, weight in mine["model"].items():
        torch.testing.assert_close(weight, theirs["model"][name], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_killed_rank_ends_the_others(seed: int, text_spec: str, tmp_path: Path) -> None:
    chance = random.Random(seed)
    world = chance.choice((2, 2, 4))
    moment = MOMENTS[seed % len(MOMENTS)]
    loss = lose_rank(
        text_spec, tmp_path, world=world, victim=chance.randrange(world), after=moment, delay=chance.random() / 4
    )
    assert loss.complaint() == ""


def test_a_stopped_rank_ends_the_other(text_spec: str, tmp_path: Path) -> None:
    def stop(victim: int) -> Loss:
        folder = tmp_path / str(victim)
        return lose_rank(text_spec, folder, victim=victim, after="step 1 ", steps=100_000, number=signal.SIGSTOP)

    assert watch.SILENT_BEATS * watch.BEAT_SECONDS + watch.GRACE_SECONDS < LIMIT_SECONDS
    with ThreadPoolExecutor(2) as both:  # two runs at once: each takes 50 s of waiting
        for loss in both.map(stop, (0, 1)):
            assert loss.complaint() == ""
            assert "has not answered for 40 s" in loss.errors[1 - loss.victim][0]


def test_all_ranks_stopped_and_continued_go_on(text_spec: str, tmp_path: Path) -> None:
    """As a batch system does that lends their machine to another job."""
    arguments, hold = words(text_spec, tmp_path / "run"), tmp_path / "hold"
    hold.write_text(LATE)
    with start_ranks(tmp_path / "log", [arguments] * 2, hold=hold) as ranks:
        wait_for(ranks[0], "step 2 ")
        for rank in ranks:
            rank.process.send_signal(signal.SIGSTOP)
        hold.unlink()
        time.sleep(50.0)
        for rank in ranks:
            assert rank.process.poll() is None
            rank.process.send_signal(signal.SIGCONT)
        assert join(ranks, LONGEST) == [0, 0]


def test_a_shard_cut_short_under_two_ranks_leaves_a_checkpoint(text_spec: str, tmp_path: Path) -> None:
    shards, out = tmp_path / "shards", tmp_path / "run"
    shutil.copytree(open_dataset(text_spec, vocab_size=320, say=lambda line: None).folder, shards)
    file = shards / "text_train_000000.bin"
    whole = file.read_bytes()
    train = ["train", "--recipe", "nano", "--data", f"shards:{shards}", "--out", str(out), "--device", "cpu"]
    with start_ranks(tmp_path / "log", [[*train, "--steps", "100000"]] * 2) as ranks:
        wait_for(ranks[0], "step 1 ")
        os.truncate(file, len(whole) // 2)
        assert join(ranks, LONGEST) == [2, 2]
        first, second = (rank.complained() for rank in ranks)
    (saved,) = list_checkpoints(out / "checkpoint")
    assert len(first) == len(second) == 1
    assert "text_train_000000.bin was cut short while it was read" in first[0]
    assert f"is saved as {saved}" in first[0]
    assert "text_train_000000.bin was cut short while it was read" in second[0]
    file.write_bytes(whole)
    step = int(saved.stem.removeprefix("step_"))
    resume = ["train", "--resume", "--out", str(out), "--steps", str(step + 2), "--device", "cpu"]
    with start_ranks(tmp_path / "log", [resume] * 2) as ranks:
        assert join(ranks, LONGEST) == [0, 0], [rank.complained() for rank in ranks]
    assert json.loads((out / "summary.json").read_text())["steps"] == step + 2


def test_real_processes_that_differ_say_so_once_each(text_spec: str, tmp_path: Path) -> None:
    arguments = words(text_spec, tmp_path / "run")
    with start_ranks(tmp_path / "log", [arguments, [*arguments, "--seed", "7"]]) as ranks:
        assert join(ranks, LONGEST) == [2, 2]
        first, second = (rank.complained() for rank in ranks)
    assert len(first) == len(second) == 1
    assert first[0].startswith("error: rank 1 differs from rank 0: seed 7 instead of 0; start all ranks")
    assert second[0] == first[0].replace("error:", "error on rank 1:")
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_models_or_texts_have_no_score(text_spec: str, tmp_path: Path) -> None:
    """Stale copies on two machines: the sum of their shares would be the score of neither."""
    for seed in (0, 1):
        out = tmp_path / str(seed)
        parbank.train(recipe="nano", data=text_spec, steps=1, seed=seed, out=out, device="cpu", quiet=True)
    for name, size in (("a.txt", 40), ("b.txt", 50)):
        (tmp_path / name).write_text("The sea was calm. " * size)

    def score(*pairs: tuple[str, str]) -> tuple[list[int], list[str], str]:
        asked = [["eval", str(tmp_path / run), "--data", f"text:val={tmp_path / text}"] for run, text in pairs]
        with start_ranks(tmp_path / "log", [[*one, "--device", "cpu", "--json"] for one in asked]) as ranks:
            return join(ranks, LONGEST), ranks[0].complained(), ranks[0].out.read_text()

    codes, _, printed = score(("0", "a.txt"), ("0", "a.txt"))
    assert codes == [0, 0]
    assert json.loads(printed)["val_bpb"] > 0
    for other, fact in ((("1", "a.txt"), "weights"), (("0", "b.txt"), "text_sha256")):
        codes, said, printed = score(("0", "a.txt"), other)
        assert (codes, printed) == ([2, 2], "")
        assert said[-1].startswith(f"error: rank 1 differs from rank 0: {fact} ")
