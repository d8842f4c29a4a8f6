"""A study from the first run to the table: on one process, on two, killed, stopped, and with runs that fail."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo
from filelock import FileLock, Timeout

from parbank.config import override
from parbank.errors import CheckpointError, ConfigError
from parbank.runtime import Runtime
from parbank.study.engine import add_to_study, forget_failures, introduce, open_study, run_study
from parbank.study.kinds.training import Training
from parbank.study.queue import Claim, Queue
from parbank.study.report import make_report
from parbank.study.ship import make_study
from parbank.study.study import BASE, Arm, Job, Study, read_study
from parbank.study.worker import DeviceLost, work
from tests.faults.frozen import freeze
from tests.study.conftest import values_of


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory, text_spec: str) -> Path:
    """A study that nobody disturbed."""
    from tests.study.conftest import study as make

    folder = tmp_path_factory.mktemp("study") / "complete"
    run_study(make.__wrapped__(text_spec), folder, device="cpu", workers=0, quiet=True)
    return folder


def test_a_study_ends_with_verdicts_on_pairs(complete: Path) -> None:
    report = make_report(complete)
    assert report.is_complete
    assert not report.failures
    slow, same = report.comparisons["slow"], report.comparisons["same"]
    assert slow.verdict == "worse"
    assert slow.pairs == 3
    # the arm that changes nothing gives the same run to the bit: same seed, same order of the data
    assert (same.mean, same.sd, same.verdict) == (0.0, 0.0, "no difference")
    seeds = {report.results[Job(BASE, seed)]["value"] for seed in range(3)}
    assert len(seeds) == 3
    text = (complete / "table.md").read_text(encoding="utf-8")
    assert text == report.text()
    assert "| slow | 3 " in text
    assert "corrected by Holm over 2 arms" in text
    assert "Beyond its training clock a run took" in text
    stored = json.loads((complete / "result.json").read_text())
    assert stored["arms"]["slow"]["verdict"] == "worse"
    assert "Infinity" not in json.dumps(stored)
    assert (complete / "runs" / "slow.1" / "metrics.jsonl").exists()


def test_a_complete_study_runs_nothing_again(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Training, "measure", lambda *arguments: pytest.fail("a job was run twice"))
    before = values_of(complete)
    run_study(None, complete, device="cpu", workers=0, quiet=True)
    run_study(read_study(complete), complete, device="cpu", workers=0, quiet=True)
    assert values_of(complete) == before


def start_worker(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "parbank", "study", "work", str(folder), "--device", "cpu", "--quiet"]
    return subprocess.Popen(command)


def freeze_at_work(worker: subprocess.Popen[bytes], folder: Path, study: Study) -> None:
    """Stops a worker while it holds a job, and not the lock of the queue."""
    end = time.monotonic() + 300
    while True:
        assert time.monotonic() < end, "no worker has claimed a job"
        assert worker.poll() is None, "the worker has ended"
        time.sleep(0.005)
        if any((folder / "claims").glob("*.json")):
            freeze(worker.pid)
            if _is_free(folder / ".lock") and "running" in Queue(folder).states(study.jobs()).values():
                return
            os.kill(worker.pid, signal.SIGCONT)


def _is_free(lock: Path) -> bool:
    try:
        with FileLock(lock).acquire(timeout=0):
            return True
    except Timeout:
        return False


def test_two_workers_one_killed_end_with_the_same_table(complete: Path, study: Study, tmp_path: Path) -> None:
    """The killed worker's job comes back, nothing runs twice, and the scores are those of an undisturbed study."""
    folder = tmp_path / "killed"
    open_study(folder, study)
    victim = start_worker(folder)
    freeze_at_work(victim, folder, study)  # or it might end all jobs before this process has had one
    ended: list[int | None] = []

    def kill_after_one_job() -> None:
        """While both hold a job."""
        ended.append(victim.poll())
        if len(ended) == 1:
            victim.kill()
            victim.wait()

    here = work(folder, device="cpu", ended=kill_after_one_job)
    assert ended[0] is None, "the victim was alive when it was killed"
    assert victim.returncode == -signal.SIGKILL
    assert 1 < here <= len(study.jobs())
    assert values_of(folder) == values_of(complete)
    assert make_report(folder).comparisons == make_report(complete).comparisons
    assert not list((folder / "claims").iterdir())
    assert not list((folder / "failures").iterdir())


def test_a_worker_stays_for_a_job_that_comes_back_as_it_looks(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim of a dead worker may expire just after this one looked for a job."""
    fake(monkeypatch)
    claim, looks = Queue.claim, []

    def miss_once(queue: Queue, jobs: list[Job]) -> Claim | None:
        looks.append(jobs)
        return None if len(looks) == 1 else claim(queue, jobs)

    monkeypatch.setattr(Queue, "claim", miss_once)
    open_study(tmp_path / "s", study)
    assert work(tmp_path / "s", device="cpu") == len(study.jobs())


def test_ctrl_c_gives_the_job_back_and_the_same_command_goes_on(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(monkeypatch)
    measure, ran = Training.measure, []

    def interrupted(self: Training, study: Study, job: Job) -> dict[str, object]:
        ran.append(job)
        if len(ran) == 5:
            raise KeyboardInterrupt
        return measure(self, study, job)

    monkeypatch.setattr(Training, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path / "s", workers=0, device="cpu")
    out = capsys.readouterr().out
    assert "stopped; continue with the same command" in out
    assert "4 of 9  " in out
    assert "so far " in out
    strictly = json.loads((tmp_path / "s" / "result.json").read_text(), parse_constant=pytest.fail)
    assert strictly["arms"]["slow"]["low"] is None
    table = (tmp_path / "s" / "table.md").read_text()
    assert "Not complete: 5 of 9 runs are still to come." in table
    run_study(study, tmp_path / "s", device="cpu", workers=0, quiet=True)
    assert ran[4] == ran[5]
    assert len(ran) == 10
    assert make_report(tmp_path / "s").is_complete


def test_every_run_is_compiled(study: Study, tmp_path: Path, compiled_graphs: list[torch.fx.GraphModule]) -> None:
    """PyTorch gives up after so many models in one process. Then later arms would train more slowly than the first."""
    arms = tuple(Arm(name=f"cap-{cap}", settings=(f"model.softcap={cap}",)) for cap in (20, 25, 40))
    base = override(study.base, "train.compile=true", "budget.steps=1")
    study = replace(study, base=base, arms=arms, seeds=(0,))
    with torch._dynamo.config.patch(recompile_limit=2):
        report = run_study(study, tmp_path / "s", device="cpu", workers=0, quiet=True)
    assert len(report.results) == len(compiled_graphs) == 4


def test_a_study_may_score_by_streaming(study: Study, tmp_path: Path) -> None:
    streaming = replace(study, metric="streaming", arms=(), seeds=(0,))
    found = run_study(streaming, tmp_path / "a", device="cpu", workers=0, quiet=True)
    plain = run_study(replace(streaming, metric="chunked"), tmp_path / "b", device="cpu", workers=0, quiet=True)
    (one,), (other,) = found.results.values(), plain.results.values()
    assert one["bpb_chunked"] == other["value"] == other["bpb_before_packing"]
    assert one["value"] == one["bpb_before_packing"] != one["bpb_chunked"], "every token has a whole window before it"
    assert "bpb_chunked" not in other
    assert ", before packing, streaming; " in found.text()
    assert "streaming" not in plain.text()
    with pytest.raises(ConfigError, match="with other metric"):
        open_study(tmp_path / "a", replace(streaming, metric="chunked"))


def test_a_run_that_fails_is_tried_again_and_then_reported(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: dict[Job, int] = {}

    def measure(self: Training, study: Study, job: Job) -> dict[str, object]:
        tries[job] = tries.get(job, 0) + 1
        if job == Job("slow", 1) or (job == Job(BASE, 0) and tries[job] == 1):
            raise RuntimeError("the disk is full")
        return {"value": 1.0 + job.seed / 100 + (job.arm == "slow")}

    monkeypatch.setattr(Training, "measure", measure)
    report = run_study(study, tmp_path / "s", device="cpu", workers=0, quiet=True)
    assert tries[Job(BASE, 0)] == tries[Job("slow", 1)] == 2
    assert report.is_complete
    assert report.comparisons["slow"].pairs == 2
    assert "Failed twice and left out: slow, seed 1: RuntimeError: the disk is full" in report.text()


@pytest.mark.parametrize(("broken", "words"), [("slow", "failed in every run"), (BASE, "the base failed in every run")])
def test_an_arm_without_any_run_does_not_ask_for_more_seeds(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, words: str
) -> None:
    def measure(self: Training, study: Study, job: Job) -> dict[str, object]:
        if job.arm == broken:
            raise RuntimeError("the disk is full")
        return {"value": 1.0 + job.seed / 100}

    monkeypatch.setattr(Training, "measure", measure)
    report = run_study(study, tmp_path / "s", device="cpu", workers=0, quiet=True)
    row = next(line for line in report.text().splitlines() if line.startswith("| slow"))
    assert words in row
    assert "nan" not in row
    assert report.to_dict()["arms"]["slow"]["words"] == words
    if broken != BASE:
        assert report.verdict("same") == "equal in every pair"


def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that take no time."""

    def measure(self: Training, study: Study, job: Job) -> dict[str, object]:
        noise = (7 * job.seed % 5 + len(job.arm)) / 1e4
        return {"value": 1.0 + job.seed / 100 + noise + (job.arm == "slow"), "seconds": 2.0, "wall_seconds": 2.5}

    monkeypatch.setattr(Training, "measure", measure)


def test_what_is_added_after_looking_is_said(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    folder = tmp_path / "s"
    before = run_study(study, folder, device="cpu", workers=0, quiet=True)
    assert "after" not in before.text()
    add_to_study(folder, before.study.with_more(seeds=2, results=len(before.results)))
    after = run_study(None, folder, device="cpu", workers=0, quiet=True)
    assert after.study.seeds == (0, 1, 2, 3, 4)
    assert before.study.stated == pytest.approx(0.38, abs=0.01)  # by the usual noise of nano: there were no runs yet
    assert after.comparisons["same"].target == after.study.stated != before.study.stated
    assert after.comparisons["slow"].pairs == 5
    assert "Added after 9 runs had ended: seeds 3, 4." in after.text()
    run_study(study, folder, device="cpu", workers=0, quiet=True)  # the first command still continues it
    with pytest.raises(ConfigError, match="nothing to add"):
        after.study.with_more(results=0)


def test_another_study_in_the_folder_is_refused(
    study: Study, text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch)
    run_study(study, tmp_path / "s", device="cpu", workers=0, quiet=True)
    other = make_study("seeds", recipe="nano", data=text_spec, budget="7steps", seeds=3)
    with pytest.raises(ConfigError, match=r"holds the study 'seeds' with other base.*study add"):
        open_study(tmp_path / "s", other)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="not empty"):
        open_study(tmp_path / "full", study)
    with pytest.raises(CheckpointError, match="holds no study"):
        run_study(None, tmp_path / "nowhere", workers=0, quiet=True)


def test_what_it_can_show_and_how_long_it_takes_is_said_before(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_study(tmp_path / "s", study)
    first, smallest, seconds = introduce(study, tmp_path / "s", 1)
    assert "2 arms and the base, 3 seeds, 6 steps each: 9 runs, 0 of them done" in first
    assert "80% power, Holm over 2 arms" in smallest
    assert "standard deviation 0.083 (no earlier runs here; two independent nano runs of 20 steps" in smallest
    assert "known after the first" in seconds
    fake(monkeypatch)
    run_study(study, tmp_path / "s", device="cpu", workers=0, quiet=True)
    _, smallest, seconds = introduce(study, tmp_path / "like", 2)  # a new study beside it counts on its noise and time
    assert "(3 pairs of runs in s)" in smallest, "the arm that changes nothing says nothing of the noise"
    assert seconds == "time: about 0:12 for 9 runs (2.5 s each in s)"
    timed = introduce(timed_study(study), tmp_path / "timed", 1)[-1]
    assert timed.startswith("time: about 1:54 for 9 runs (6.66 s of training and some 6 s beyond it each)")


def timed_study(study: Study) -> Study:
    from parbank.config import override

    return replace(study, base=override(study.base, "budget.steps=none", "budget.minutes=0.111"))


def test_workers_that_would_slow_each_other_down_are_refused(study: Study, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the budget is a time; use --workers 1, or a budget in steps"):
        run_study(timed_study(study), tmp_path / "s", workers=2, device="cpu", quiet=True)
    kernels = make_study("published-kernels", recipe="nano")
    with pytest.raises(ConfigError, match=r"kernels are timed; use --workers 1$"):
        run_study(kernels, tmp_path / "s", workers=2, device="cpu", quiet=True)
    assert not (tmp_path / "s").exists(), "the corrected command must find nothing there"


def test_sigterm_stops_a_study_as_ctrl_c_does(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(self: Training, study: Study, job: Job) -> dict[str, object]:
        if job.seed:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"value": 1.0}

    monkeypatch.setattr(Training, "measure", measure)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path / "s", workers=0, device="cpu", quiet=True)
    assert signal.getsignal(signal.SIGTERM) == before
    states = list(make_report(tmp_path / "s").states.values())
    assert (states.count("done"), states.count("waiting")) == (3, 6)
    assert (tmp_path / "s" / "table.md").exists()


def test_a_gpu_that_is_lost_fails_one_job_and_ends_the_process(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an illegal access every call fails in this process: the next job would fail for the fault of the first."""

    def measure(self: Training, study: Study, job: Job) -> dict[str, object]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def synchronize(self: Runtime) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    open_study(tmp_path / "s", study)
    monkeypatch.setattr(Training, "measure", measure)
    work(tmp_path / "s", device="cpu")  # the device is sound: every job is tried
    assert len(make_report(tmp_path / "s").failures) == 9
    assert forget_failures(tmp_path / "s") == 9
    monkeypatch.setattr(Runtime, "synchronize", synchronize)
    with pytest.raises(DeviceLost, match="cannot be used by this process after the error: CUDA error: an illegal"):
        work(tmp_path / "s", device="cpu")
    queue, jobs = Queue(tmp_path / "s"), study.jobs()
    assert [len(queue.failures(job)) for job in jobs] == [1, *[0] * 8]
    assert set(queue.states(jobs).values()) == {"waiting"}


def test_a_score_that_is_no_number_is_a_failure(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the table, a difference that is not finite would have no verdict."""
    monkeypatch.setattr(
        Training, "measure", lambda self, study, job: {"value": math.nan if job.arm == "slow" else 1.0 + job.seed}
    )
    report = run_study(study, tmp_path / "s", workers=0, device="cpu", quiet=True)
    assert report.verdict("slow") == "failed in every run"
    note = "Failed twice and left out: slow, seeds 0, 1, 2: TrainingError: the result is nan: the run has diverged"
    assert report.notes().count(note) == 1, "one note for failures that are alike"


def test_errors_that_differ_in_the_run_s_folder_alone_are_one_note(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(self: Training, study: Study, job: Job) -> dict[str, float]:
        if job.arm == "slow":
            raise RuntimeError(f"diverged; the weights are in runs/{job.key}/checkpoint")
        return {"value": 1.0 + job.seed}

    monkeypatch.setattr(Training, "measure", measure)
    report = run_study(study, tmp_path / "s", workers=0, device="cpu", quiet=True)
    found = [note for note in report.notes() if note.startswith("Failed twice")]
    assert found == [
        "Failed twice and left out: slow, seeds 0, 1, 2: RuntimeError: diverged; the weights are in runs/slow.0/checkpoint"
    ]


def test_another_noise_or_checkpoint_setting_is_refused_and_not_ignored(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch)
    run_study(study, tmp_path / "s", workers=0, device="cpu", quiet=True)
    for change in ({"noise": 0.1}, {"difference": 0.01}, {"keep": True}):
        with pytest.raises(ConfigError, match=f"with other {next(iter(change))}"):
            open_study(tmp_path / "s", replace(study, **change))


@pytest.mark.parametrize(("given", "word"), [(None, "too few seeds: "), (0.5, "no difference of more than 0.")])
def test_a_weak_study_does_not_call_a_large_difference_none(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: float | None, word: str
) -> None:
    """Before, the stated difference of 0.38 of 3 seeds made an interval of +-0.2 'no difference'."""
    noise = {"slow": [0.03, -0.05, 0.08], "same": [0.0, 0.0, 0.0], BASE: [0.0, 0.0, 0.0]}
    monkeypatch.setattr(Training, "measure", lambda self, study, job: {"value": 3.0 + noise[job.arm][job.seed]})
    report = run_study(replace(study, difference=given), tmp_path / "s", workers=0, device="cpu", quiet=True)
    assert report.study.stated == pytest.approx(0.38, abs=0.01)
    assert report.verdict("slow").startswith(word)
    assert report.verdict("same") == "equal in every pair"
    if given is None:
        assert report.comparisons["slow"].target == pytest.approx(0.03), "a hundredth of the base's 3 bits per byte"


def test_skipped_steps_are_shown(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two arms that skipped every step are equal in every pair."""

    def measure(self: Training, study: Study, job: Job) -> dict[str, object]:
        return {"value": 1.0 + job.seed, "steps": 6, "skipped_steps": 3 * (job.arm == "same" and job.seed > 0)}

    monkeypatch.setattr(Training, "measure", measure)
    report = run_study(study, tmp_path / "s", workers=0, device="cpu", quiet=True)
    assert "Steps skipped because a gradient was not finite: same 6 of 18." in report.notes()


def test_an_arm_that_changes_nothing_does_not_hide_the_noise(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of no noise would promise to show half of what the seeds can show."""
    noise = {"base": (0.0, 0.0, 0.0), "slow": (0.1, -0.1, 0.0), "same": (0.0, 0.0, 0.0)}
    monkeypatch.setattr(
        Training, "measure", lambda self, study, job: {"value": 1.0 + job.seed + noise[job.arm][job.seed]}
    )
    report = run_study(study, tmp_path / "s", workers=0, device="cpu", quiet=True)
    assert report.noise.sd == pytest.approx(0.1)
    assert report.noise.source == "3 pairs of runs in s"


def test_a_study_that_has_not_begun_asks_for_no_more_seeds(study: Study, tmp_path: Path) -> None:
    open_study(tmp_path / "s", study)
    report = make_report(tmp_path / "s")
    assert report.verdict("slow") == "no pair of runs yet"
    assert "would show" not in report.text()


def test_an_arm_cannot_be_called_base(study: Study) -> None:
    with pytest.raises(ConfigError, match="'base' is the name of what the arms are compared with"):
        replace(study, arms=(Arm(name="base", settings=("model.width=64",)),))


def test_what_was_added_is_counted_in_words(study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    folder = tmp_path / "s"
    run_study(study, folder, workers=0, device="cpu", quiet=True)
    add_to_study(folder, study.with_more(seeds=1, arms=[Arm(name="more")], results=9))
    assert any("after 9 runs had ended: seed 3 and arm more. " in note for note in make_report(folder).notes())
