"""A whole run: what it leaves, what it refuses before it starts, and how it goes on after being stopped or killed."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parbank.artifact.code import code_bytes
from parbank.artifact.container import read_artifact
from parbank.artifact.pack import describe_tensors
from parbank.config import override, to_dict
from parbank.data.validation import open_validation
from parbank.display import Display
from parbank.errors import CheckpointError, ConfigError, DataError
from parbank.eval.windows import score_chunked
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from parbank.training.checkpoint import find_checkpoint, list_checkpoints, load_checkpoint
from parbank.training.checks import check_size
from parbank.training.config import RunConfig
from parbank.training.folder import load_run_config
from parbank.training.load import load_model
from parbank.training.pack import pack_checkpoint
from parbank.training.run import Result, run
from parbank.training.trainer import Trainer
from tests.distributed import run_distributed_test

PLACE = Runtime(device=torch.device("cpu"))
ROOT = Path(__file__).parents[2]
STEPS = 12
ROW = {
    "step", "tokens", "seconds", "loss", "lr", "grad_norm", "tokens_per_second", "data_wait", "memory", "skipped",
}  # fmt: skip
SUMMARY = {
    "val_bpb", "val_loss", "artifact_bytes", "max_bytes", "steps", "tokens", "train_seconds", "setup_seconds", "params",
    "seed", "world_size", "device", "versions", "val_bpb_before_packing", "compressors_bpb", "sample",
}  # fmt: skip


def nano(spec: str, *settings: str) -> RunConfig:
    fixed = (f"data={json.dumps(spec)}", f"budget.steps={STEPS}", "train.log_every=4")
    return override(get_recipe("nano"), *fixed, *settings)


def quiet() -> Display:
    return Display(file=io.StringIO())


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def finished(text_spec: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("runs") / "a run, with ünicode"
    return out, run(nano(text_spec), PLACE, out, display=quiet())


def test_the_folder_holds_everything(finished: tuple[Path, Result], text_spec: str) -> None:
    out, result = finished
    assert {path.name for path in out.iterdir()} == {
        "config.json", "metrics.jsonl", "tensorboard", "checkpoint", "model.pbk", "details.json", "summary.json",
    }  # fmt: skip
    assert list((out / "tensorboard").glob("events.out.tfevents.*"))
    assert [path.name for path in list_checkpoints(out / "checkpoint")] == [f"step_{STEPS:08d}.pt"]
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config == json.loads(json.dumps(to_dict(nano(text_spec))))
    assert load_run_config(out) == nano(text_spec)
    assert json.loads((out / "summary.json").read_text(encoding="utf-8")) == result.summary


def test_every_row_has_every_number(finished: tuple[Path, Result]) -> None:
    out, _ = finished
    rows = rows_of(out)
    assert [row["step"] for row in rows] == [1, 4, 8, 12]
    for row in rows:
        assert row.keys() == ROW
        assert row["tokens"] == 512 * row["step"]
        assert row["memory"] > 2**20
        assert 0 <= row["data_wait"] < 1
        assert row["grad_norm"] > 0
        assert row["skipped"] == 0
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert rows[0]["lr"] > rows[-1]["lr"] > 0


def test_the_summary_says_what_happened(finished: tuple[Path, Result], text_spec: str) -> None:
    out, result = finished
    summary = result.summary
    assert summary is not None
    assert summary.keys() >= SUMMARY
    assert summary["artifact_bytes"] == (out / "model.pbk").stat().st_size <= summary["max_bytes"] == 200_000
    assert (summary["steps"], summary["tokens"], summary["seed"], summary["world_size"]) == (STEPS, 512 * STEPS, 0, 1)
    assert summary["val_bytes"] == sum(
        p.stat().st_size for p in Path(text_spec.partition("val=")[2].partition(",")[0]).iterdir()
    )
    assert abs(summary["val_bpb"] - summary["val_bpb_before_packing"]) < 0.05
    assert 0 <= summary["data_wait_seconds"] < summary["train_seconds"]
    assert summary["setup_seconds"] == sum(summary["setup_parts"].values()) > 0
    parts = ["checks", "data", "weights", "kernels", "model", "compilation", "warm-up"]
    assert list(summary["setup_parts"]) == parts
    assert summary["finish_seconds"] == sum(summary["finish_parts"].values()) > 0
    assert summary["device"] == "cpu"
    assert {"parbank", "python", "torch"} <= summary["versions"].keys()
    assert str(out.parent) not in json.dumps(read_artifact(out / "model.pbk").meta), "a path of this machine"


def test_the_artifact_scores_again_to_the_last_bit(finished: tuple[Path, Result], text_spec: str) -> None:
    out, result = finished
    assert result.summary is not None
    loaded = load_model(out / "model.pbk", PLACE.device)
    val = open_validation(text_spec, loaded.tokenizer, say=lambda line: None)
    score = score_chunked(loaded.model, val.tokens, loaded.tokenizer, context=loaded.context, runtime=PLACE)
    assert (score.bpb, score.loss) == (result.summary["val_bpb"], result.summary["val_loss"])
    assert val.sha256 == result.summary["val_text_sha256"]
    assert result.summary["text"] == val.text == "proved"
    assert 0 <= result.summary["val_overlap"] < 0.2
    # and the checkpoint, with its average, as the model was before packing
    loaded = load_model(out / "checkpoint", PLACE.device)
    score = score_chunked(loaded.model, val.tokens, loaded.tokenizer, context=loaded.context, runtime=PLACE)
    assert score.bpb == result.summary["val_bpb_before_packing"]
    assert loaded.data == load_model(out, PLACE.device).data == text_spec


def test_packing_again_gives_the_same_file_and_a_tighter_cap_a_smaller_one(
    finished: tuple[Path, Result], tmp_path: Path
) -> None:
    out, _ = finished
    before = (out / "model.pbk").read_bytes()
    target, _ = pack_checkpoint(out, 200_000, tmp_path / "new folder" / "same.pbk")
    assert target.read_bytes() == before
    target, packed = pack_checkpoint(out, 45_000, None)
    assert target == out / "model-45000.pbk"
    assert target.stat().st_size == packed.size <= 45_000
    assert (out / "model.pbk").read_bytes() == before, "the run's own artifact stays what its summary says"
    target.unlink()
    alone = tmp_path / "copied.pt"
    alone.write_bytes(find_checkpoint(out).read_bytes())
    assert pack_checkpoint(alone, 60_000, None)[0] == tmp_path / "model-60000.pbk"
    rows, _ = pack_checkpoint(out, 60_000, tmp_path / "rows.pbk", settings=("quant.method=rows", "quant.matrix_bits=4"))
    bits = {row.role: row.levels for row in describe_tensors(read_artifact(rows))}
    assert bits["matrix"] == 15
    with pytest.raises(ConfigError, match=r"model\.layers=2: packing has settings of quant alone"):
        pack_checkpoint(out, 60_000, None, settings=("model.layers=2",))
    with pytest.raises(ConfigError, match="is packed already"):
        pack_checkpoint(out / "model.pbk", 60_000, None)
    with pytest.raises(ConfigError, match="must be positive, got 0"):
        pack_checkpoint(out, 0, None)


def test_a_used_folder_is_refused_and_left_alone(finished: tuple[Path, Result], text_spec: str) -> None:
    out, _ = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(ConfigError, match="already holds a run; continue it by --resume"):
        run(nano(text_spec), PLACE, out, display=quiet())
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_model_that_cannot_fit_is_refused_before_any_work(
    text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARBANK_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"cannot be promised to fit 5,000 bytes: it may need .*raise --max-bytes"):
        run(nano(text_spec, "budget.max_bytes=5_000"), PLACE, tmp_path / "runs" / "a", display=quiet())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("cap", "note"),
    [(16_000_000, "may come to"), (8_000_000, "may come to"), (4_000_000, "leave 1.1 bits .*model.width")],
)
def test_the_golf_model_is_taken_under_the_caps_the_solver_meets(cap: int, note: str) -> None:
    said = io.StringIO()
    check_size(override(get_recipe("sprint"), f"budget.max_bytes={cap}"), Display(file=said))
    assert re.fullmatch(f"note: .*{note}.*\n", said.getvalue())


def test_the_cap_named_in_a_refusal_is_taken() -> None:
    def check(cap: int) -> None:
        check_size(override(get_recipe("golf"), f"budget.max_bytes={cap}"), quiet())

    with pytest.raises(ConfigError, match="100,000 bytes: it may need") as refusal:
        check(100_000)
    named = int(re.search(r"--max-bytes \(at least ([\d,]+)\)", str(refusal.value))[1].replace(",", ""))
    assert 500_000 < named < 1_000_000
    check(named)


def test_the_smallest_cap_with_the_real_tokenizer_is_kept(text_spec: str, tmp_path: Path) -> None:
    """Between what some tokenizer might need and what this one does, the refusal comes before training and is exact."""
    with pytest.raises(ConfigError, match="7,000 bytes: it may need") as refusal:
        run(nano(text_spec, "budget.max_bytes=7_000"), PLACE, tmp_path / "refused", display=quiet())
    assert not (tmp_path / "refused").exists()
    smallest = int(re.search(r"at least ([\d,]+)\)", str(refusal.value))[1].replace(",", ""))
    for cap in (smallest, 30_000):
        result = run(nano(text_spec, f"budget.max_bytes={cap}"), PLACE, tmp_path / str(cap), display=quiet())
        assert result.summary is not None
        assert result.summary["artifact_bytes"] == (tmp_path / str(cap) / "model.pbk").stat().st_size <= cap
    assert result.summary["artifact_bytes"] > 29_000, "no more is given away than the solver's steps"


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ("data=text:no/such/file", DataError, "no/such/file does not exist"),
        ("data=nonsense", ConfigError, "unknown data 'nonsense'"),
        ("batch.sequence_length=65536", ConfigError, "32768 positions at most"),
        (f"seed={2**64}", ConfigError, "a seed is a whole number"),
    ],
)
def test_what_cannot_run_leaves_no_folder(
    setting: str, error: type[Exception], message: str, text_spec: str, tmp_path: Path
) -> None:
    batch = ("batch.batch_tokens=65536", "batch.micro_batch_tokens=65536")
    with pytest.raises(error, match=message):
        run(nano(text_spec, *batch, setting), PLACE, tmp_path / "runs" / "a", display=quiet())
    assert list(tmp_path.iterdir()) == []


def test_too_little_text_is_refused_by_name(text_spec: str, tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text("roses are red\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"poem\.txt: the text is too short for a vocabulary"):
        run(nano(f"text:{tmp_path / 'poem.txt'}"), PLACE, tmp_path / "out", display=quiet())
    train = text_spec.partition("train=")[2].partition(",")[0]
    with pytest.raises(
        DataError, match=r"poem\.txt.* is too short: its validation part has .*one sequence of 64 needs 65"
    ):
        run(nano(f"text:train={train},val={tmp_path / 'poem.txt'}"), PLACE, tmp_path / "out", display=quiet())
    assert not (tmp_path / "out").exists()


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "notes.txt").write_text("keep", encoding="utf-8")
    with pytest.raises(ConfigError):
        run(nano("nonsense"), PLACE, out, display=quiet())
    assert (out / "notes.txt").read_text(encoding="utf-8") == "keep"


def test_a_place_that_cannot_be_written_is_refused_before_the_data_is_prepared(
    text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARBANK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"cannot write to .*file.*choose another --out"):
            run(nano(text_spec), PLACE, out, display=quiet())
    assert not (tmp_path / "cache").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_refused(text_spec: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied; choose another --out"):
        run(nano(text_spec), PLACE, tmp_path / "out", display=quiet())


def run_until_a_signal_while_saving(config: RunConfig, out: Path) -> Result:
    """One rank. The signal reaches rank 0 alone, after its last step."""
    place = Runtime(device=PLACE.device, rank=dist.get_rank(), world=dist.get_world_size())
    save = Trainer.save

    def save_and_stop(trainer: Trainer) -> Path | None:
        if place.is_main:
            os.kill(os.getpid(), signal.SIGTERM)
        return save(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "save", save_and_stop)
        return run(config, place, out, quiet=True)


def test_a_signal_while_one_rank_saves_stops_all(text_spec: str, tmp_path: Path) -> None:
    config = nano(text_spec, "budget.steps=2", "train.warmup_steps=0")
    results = run_distributed_test(run_until_a_signal_while_saving, 2, args=(config, tmp_path / "out"), timeout=120.0)
    assert results == [Result(None, signal.SIGTERM)] * 2


def test_nothing_to_resume(tmp_path: Path, finished: tuple[Path, Result]) -> None:
    out, _ = finished
    with pytest.raises(CheckpointError, match="holds no run to resume"):
        load_run_config(tmp_path)
    (tmp_path / "config.json").write_text('{"recipe": ', encoding="utf-8")
    with pytest.raises(CheckpointError, match="holds no run to resume"):
        load_run_config(tmp_path)
    (tmp_path / "config.json").write_bytes((out / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"is not empty \(config\.json\)"):
        run(load_run_config(tmp_path), PLACE, tmp_path, resume=True, display=quiet())
    (tmp_path / "summary.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="has ended, and its checkpoints are gone"):
        run(load_run_config(tmp_path), PLACE, tmp_path, resume=True, display=quiet())
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "summary.json"}


def test_a_run_whose_text_has_moved_says_how_to_name_it(finished: tuple[Path, Result]) -> None:
    out, _ = finished
    moved = load_run_config(out, 'data="text:gone.txt"')
    with pytest.raises(DataError, match=r"gone\.txt does not exist; .*lies elsewhere now, say where by --data"):
        run(moved, PLACE, out, resume=True, display=quiet())


class Stopper(Display):
    """Sends this process a signal once a step is reached, as somebody at the keyboard would."""

    def __init__(self, step: int) -> None:
        super().__init__(file=io.StringIO())
        self.step = step

    def update(self, share: float, status: str, *, line: bool = False) -> None:
        super().update(share, status, line=line)
        if status.startswith(f"step {self.step} "):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_stopped_run_goes_on_to_the_same_result(
    finished: tuple[Path, Result], text_spec: str, tmp_path: Path
) -> None:
    whole, uninterrupted = finished
    out = tmp_path / "stopped here"
    stopper = Stopper(step=6)
    result = run(nano(text_spec), PLACE, out, display=stopper)
    assert result == Result(None, signal.SIGTERM)
    assert f"parbank train --resume --out '{out}'" in stopper.file.getvalue()  # type: ignore[attr-defined]
    assert not (out / "summary.json").exists()
    assert not (out / "model.pbk").exists()
    assert load_checkpoint(find_checkpoint(out))["step"] == 6
    result = run(load_run_config(out), PLACE, out, resume=True, display=quiet())
    assert result.summary is not None
    assert uninterrupted.summary is not None
    timing = {
        "train_seconds",
        "setup_seconds",
        "setup_parts",
        "finish_seconds",
        "finish_parts",
        "tokens_per_second",
        "data_wait_seconds",
        "memory_bytes",
        "load",
    }
    for key in result.summary.keys() - timing:
        assert result.summary[key] == uninterrupted.summary[key], key
    assert (out / "model.pbk").read_bytes() == (whole / "model.pbk").read_bytes()
    steps = [row["step"] for row in rows_of(out)]
    assert steps == [1, 4, 6, 7, 8, 12]
    losses = {row["step"]: row["loss"] for row in rows_of(out)}
    assert all(losses[row["step"]] == row["loss"] for row in rows_of(whole))
    # finished is finished: once more does no step and gives the same again; a larger budget goes on
    again = run(load_run_config(out), PLACE, out, resume=True, display=quiet())
    assert again.summary is not None
    assert again.summary["val_bpb"] == result.summary["val_bpb"]
    assert [row["step"] for row in rows_of(out)] == steps
    more = run(load_run_config(out, f"budget.steps={STEPS + 2}"), PLACE, out, resume=True, display=quiet())
    assert more.summary is not None
    assert more.summary["steps"] == STEPS + 2
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))["budget"]["steps"] == STEPS + 2


class LateStopper(Display):
    """Sends the signal when training is over, just before the last checkpoint is written."""

    def say(self, line: str) -> None:
        super().say(line)
        if line.startswith(f"trained {STEPS} steps"):  # another line says that a tokenizer was trained
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_while_the_last_checkpoint_is_written_loses_nothing(text_spec: str, tmp_path: Path) -> None:
    result = run(nano(text_spec), PLACE, tmp_path / "out", display=LateStopper(file=io.StringIO()))
    assert result == Result(None, signal.SIGTERM)
    assert load_checkpoint(find_checkpoint(tmp_path / "out"))["step"] == STEPS


def test_the_minutes_are_kept(text_spec: str, tmp_path: Path) -> None:
    config = nano(text_spec, "budget.steps=none", "budget.minutes=0.03", "train.log_every=1")
    result = run(config, PLACE, tmp_path / "out", display=quiet())
    assert result.summary is not None
    seconds = [row["seconds"] for row in rows_of(tmp_path / "out")]
    longest = max(b - a for a, b in zip([0.0, *seconds], seconds))
    assert 1.8 - 2 * longest <= result.summary["train_seconds"] <= 1.8 * 1.01 + longest


def test_code_counts_where_the_recipe_says_so(text_spec: str, tmp_path: Path) -> None:
    config = nano(text_spec, "budget.steps=1", "budget.count_code=true", "budget.max_bytes=400_000")
    result = run(config, PLACE, tmp_path / "out", display=quiet())
    assert result.summary is not None
    assert result.summary["code_bytes"] == code_bytes() > 10_000
    assert result.summary["artifact_bytes"] + result.summary["code_bytes"] <= 400_000


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )


def wait_for_rows(process: subprocess.Popen[str], out: Path, count: int) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        metrics = out / "metrics.jsonl"
        if metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") >= count:
            return
        if process.poll() is not None:
            break
        time.sleep(0.02)
    process.kill()
    output, errors = process.communicate()
    raise AssertionError(f"the run did not get that far\n{output}\n{errors}")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_real_process_that_is_stopped_or_killed_can_be_resumed(
    number: signal.Signals, text_spec: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    # checkpoints without pause, so that the kill falls into the writing of one as likely as not
    often = ("--set", "train.checkpoint_minutes=1e-9", "--set", "train.log_every=1")
    process = start(
        "-m", "parbank", "train", "--recipe", "nano", "--data", text_spec, "--out", str(out), "--minutes", "5",
        "--device", "cpu", *often,
    )  # fmt: skip
    wait_for_rows(process, out, 4)
    process.send_signal(number)
    output, errors = process.communicate(timeout=300)
    assert errors == ""
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number
        assert "continue with: parbank train --resume --out" in output
        assert "\x1b" not in output
    step = load_checkpoint(find_checkpoint(out))["step"]
    assert step >= 3
    config = load_run_config(out, "budget.minutes=none", f"budget.steps={step + 2}")
    result = run(config, PLACE, out, resume=True, display=quiet())
    assert result.summary is not None
    assert result.summary["steps"] == step + 2
    assert [row["step"] for row in rows_of(out)] == list(range(1, step + 3))


@pytest.mark.slow
def test_torchrun_on_two_processes_gives_the_losses_of_one(
    finished: tuple[Path, Result], text_spec: str, tmp_path: Path
) -> None:
    alone, result = finished
    out = tmp_path / "two"
    process = start(
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "parbank", "train", "--recipe", "nano",
        "--data", text_spec, "--steps", str(STEPS), "--set", "train.log_every=4", "--out", str(out), "--device", "cpu",
    )  # fmt: skip
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, output + errors
    assert output.count("val bpb") == 2, "one line before packing and one in the summary, from the first rank alone"
    assert output.count("ready after") == 1
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["world_size"] == 2
    assert result.summary is not None
    assert summary["val_bpb"] == pytest.approx(result.summary["val_bpb"], rel=1e-3)
    assert (summary["val_bytes"], summary["val_tokens"]) == (result.summary["val_bytes"], result.summary["val_tokens"])
    ours, theirs = rows_of(out), rows_of(alone)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=1e-4)
    assert [row["grad_norm"] for row in ours] == pytest.approx([row["grad_norm"] for row in theirs], rel=1e-3)


def test_a_compressor_that_fails_costs_no_summary(
    text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(text: bytes, say: object) -> dict[str, float]:
        raise MemoryError("no room")

    monkeypatch.setattr("parbank.training.run.compressor_bpb", fail)
    config = override(get_recipe("nano"), f"data={text_spec}", "budget.steps=2")
    result = run(config, PLACE, tmp_path / "run", display=Display(enabled=False))
    assert result.summary is not None
    assert result.summary["compressors_bpb"] == {}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["val_bpb"] > 0
