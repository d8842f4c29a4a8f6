"""`parbank study run`, `add`, `show` and `list`: what a user sees before, during and after a study."""

import importlib.util
import json
from pathlib import Path

import pytest

from parbank.study.arms import ARMS
from parbank.study.kernels import KERNELS
from parbank.study.kinds.training import Training
from parbank.study.ship import STUDIES
from parbank.study.study import Job, Study
from tests.cli.calls import Call, next_commands

SLOW = "slow:optim.matrix_lr=0.0001"


@pytest.fixture(autouse=True)
def quick_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that take no time: `slow` is worse, `swa` is better."""

    def measure(self: Training, study: Study, job: Job) -> dict[str, object]:
        noise = (7 * job.seed % 5 + len(job.arm) % 3) / 1e5
        shift = {"slow": 0.5, "swa": -0.1}.get(job.arm, 0.0)
        return {"value": 1.0 + job.seed / 100 + noise + shift, "seconds": 2.0, "wall_seconds": 2.5}

    monkeypatch.setattr(Training, "measure", measure)


def start(call: Call, text_spec: str, folder: Path, *more: object) -> str:
    nano = ["--recipe", "nano", "--data", text_spec, "--budget", "6steps", "--device", "cpu", "--workers", "0"]
    answer = call("study", "run", "seeds", *nano, "--seeds", 3, "--arm", SLOW, "--arms", "swa", "--out", folder, *more)
    assert answer.code == 0, answer.err
    return answer.out


def test_a_study_says_what_it_can_show_then_its_progress_then_its_verdicts(
    call: Call, text_spec: str, tmp_path: Path
) -> None:
    out = start(call, text_spec, tmp_path / "s")
    lines = out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("1 of 9  "))
    before = "\n".join(lines[:first])
    assert "2 arms and the base, 3 seeds, 6 steps each: 9 runs, 0 of them done" in before
    assert "smallest difference it can show: " in before
    assert "80% power, Holm over 2 arms" in before
    assert "time: " in before
    assert "; next slow.0; 0:20 left; so far 2 open" in lines[first] or "; next swa.0; 0:20 left" in lines[first]
    table = out[out.index("| arm ") :]
    assert "| worse " in next(line for line in table.splitlines() if line.startswith("| slow "))
    assert "| better " in next(line for line in table.splitlines() if line.startswith("| swa "))
    assert "Claims, and what was found here:" in table
    again = ["study", "add", str(tmp_path / "s"), "--seeds", "3"]
    assert next_commands(out) == [["report", str(tmp_path / "s")], again]


def test_a_study_is_continued_added_to_shown_and_listed(call: Call, text_spec: str, tmp_path: Path) -> None:
    start(call, text_spec, tmp_path / "s")
    (tmp_path / "s" / "results" / "slow.1.json").unlink()  # as if it had not ended
    assert "8 of 9 runs done" in call("study", "list", tmp_path).out
    assert "Not complete: 1 of 9 runs" in call("study", "show", tmp_path / "s").out
    again = call("study", "run", tmp_path / "s", "--device", "cpu", "--workers", 0)
    assert "9 runs, 8 of them done" in again.out
    assert "9 of 9  slow, seed 1" in again.out
    added = call(
        "study", "add", tmp_path / "s", "--seeds", 1, "--arms", "no-softcap", "--device", "cpu", "--workers", 0
    )
    assert "Added after 9 runs had ended: seed 3 and arm no-softcap." in added.out
    found = json.loads(call("study", "show", tmp_path / "s", "--json").out)
    assert found["arms"]["swa"]["verdict"] == "better"
    assert len(found["runs"]) == 16
    against = call("study", "show", tmp_path / "s", "--against", tmp_path / "s").out
    assert "rank correlation of 3 arms (Spearman): +1.00" in against


def test_options_beside_a_folder_are_refused(call: Call, text_spec: str, tmp_path: Path) -> None:
    start(call, text_spec, tmp_path / "s")
    answer = call("study", "run", tmp_path / "s", "--seeds", 8, "--set", "model.layers=3", "--device", "cpu")
    assert answer.code == 2
    assert "so --seeds, --set would change nothing" in answer.err
    assert f"parbank study add {tmp_path / 's'}" in answer.err
    other = call(
        "study", "run", "seeds", "--recipe", "nano", "--data", text_spec, "--budget", "6steps", "--seeds", 3,
        "--arm", SLOW, "--out", tmp_path / "s", "--score-tokens", 500, "--device", "cpu",
    )  # fmt: skip
    assert "holds the study 'seeds' with other score_tokens" in other.err


@pytest.mark.parametrize(
    "option", [("--holdout", "val"), ("--metric", "streaming"), ("--max-bytes", "1MB"), ("--keep",), ("--noise", "0.1")]
)
def test_no_option_beside_a_folder_is_ignored(
    call: Call, text_spec: str, tmp_path: Path, option: tuple[str, ...]
) -> None:
    start(call, text_spec, tmp_path / "s")
    answer = call("study", "run", tmp_path / "s", *option, "--device", "cpu", "--workers", 0)
    assert answer.code == 2
    assert f"so {option[0]} would change nothing" in answer.err


def test_runs_that_failed_end_in_code_1_and_can_be_tried_again(
    call: Call, text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Training.measure

    def broken(self: Training, study: Study, job: Job) -> dict[str, object]:
        if job == Job("slow", 1):
            raise RuntimeError("the disk is full")
        return measure(self, study, job)

    monkeypatch.setattr(Training, "measure", broken)
    nano = ["--recipe", "nano", "--data", text_spec, "--budget", "6steps", "--device", "cpu", "--workers", "0"]
    command = ["study", "run", "seeds", *nano, "--seeds", 2, "--arm", SLOW, "--out", tmp_path / "s"]
    answer = call(*command)
    assert answer.code == 1
    assert "slow, seed 1: RuntimeError: the disk is full" in answer.out
    at_once = "slow, seed 1: failed, to be tried again at the end: RuntimeError: the disk is full"
    assert answer.out.count(at_once) == 1, "a user need not wait for the second failure to hear of the first"
    assert answer.out.index(at_once) < answer.out.index("slow, seed 1: failed twice")
    assert next_commands(answer.out) == [["study", "run", str(tmp_path / "s"), "--retry"]]
    monkeypatch.setattr(Training, "measure", measure)
    assert call(*command).code == 1, "without being asked, a run is not tried a third time"
    again = call("study", "run", tmp_path / "s", "--retry", "--device", "cpu", "--workers", 0)
    assert again.code == 0
    assert "| slow | 2 " in again.out


def test_a_refused_command_leaves_nothing_behind(call: Call, text_spec: str, tmp_path: Path) -> None:
    common = ["--recipe", "nano", "--data", text_spec, "--device", "cpu", "--out", tmp_path / "s"]
    refused = [
        (["run", "seeds", "--budget", "6s", "--workers", 2, *common], "use --workers 1"),
        (["run", "seeds", "--budget", "6steps", "--submit", "nowhere", *common], "submitit"),
        (["run", "seeds", "--budget", "6steps", "--submit-set", "gpus_per_node=1", *common], "--submit-set says how"),
        (["search", "--space", "optim.matrix_lr=0.01..0.1", "--rungs", "6steps", *common], "Optuna"),
        (["run", "seeds", "--budget", "6steps", "--metric", "sliding", *common], "streaming"),
        (
            ["run", "published-kernels", "--metric", "streaming", "--out", tmp_path / "s"],
            "--metric is how trained runs",
        ),
        (["run", "published-kernels", "--arms", "", "--out", tmp_path / "s"], "has no base to run alone; name arms"),
    ]
    for arguments, said in refused:
        if said == "submitit" and importlib.util.find_spec("submitit"):
            continue
        if said == "Optuna" and importlib.util.find_spec("optuna"):
            continue
        answer = call("study", *arguments)
        assert answer.code == 2, arguments
        assert said in answer.err
        assert not (tmp_path / "s").exists(), arguments


def test_a_study_that_cannot_be_read_does_not_hide_the_others(call: Call, text_spec: str, tmp_path: Path) -> None:
    start(call, text_spec, tmp_path / "good")
    (tmp_path / "bad").mkdir()
    values = json.loads((tmp_path / "good" / "study.json").read_text())
    for wrong in ({"kind": "nope"}, {"kind": "kernels", "own_baselines": True, "arms": []}):
        (tmp_path / "bad" / "study.json").write_text(json.dumps(values | wrong))
        out = call("study", "list", tmp_path).out
        assert "bad holds no study that can be read" in out
        assert "good: 9 of 9 runs done" in out
        assert call("study", "show", tmp_path / "bad").code == 2


def test_a_cap_is_an_option(call: Call, text_spec: str, tmp_path: Path) -> None:
    """Errors of packing advise to raise --max-bytes."""
    start(call, text_spec, tmp_path / "s", "--max-bytes", "1MB")
    assert json.loads((tmp_path / "s" / "study.json").read_text())["base"]["budget"]["max_bytes"] == 1_000_000


def test_a_file_is_run_by_its_name(call: Call, text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(
        f'recipe = "nano"\ndata = "{text_spec}"\nbudget = "6steps"\nseeds = 3\narms = ["swa"]\n'
        '[arm.slow]\nsettings = ["optim.matrix_lr=0.0001"]\nclaim = "slower (my notes)"\n',
        encoding="utf-8",
    )
    answer = call("study", "run", "mine.toml", "--device", "cpu", "--workers", 0)
    assert answer.code == 0, answer.err
    assert "- slow: slower (my notes). Here: +0.5" in answer.out
    assert (tmp_path / "runs" / "study-mine" / "table.md").is_file()


def test_the_list_has_every_study_and_every_arm_with_its_claim(call: Call, tmp_path: Path) -> None:
    lines = call("study", "list", tmp_path).out.splitlines()
    words = {line.split()[0]: line.split(None, 1)[1] for line in lines if " " in line.strip()}
    grid = [name for study in STUDIES.values() for name, _, _ in study.grid]
    for name in (*STUDIES, *ARMS, *KERNELS, *grid):
        assert len(words[name]) > 20, name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "sedes"], "there are seeds, published-training"),
        (["run", "seeds", "--arms", "value-residuals"], "did you mean value-residual?"),
        (["run", "seeds", "--arm", "x:optim.matrix_lrr=1"], "did you mean optim.matrix_lr"),
        (["run", "seeds", "--budget", "5parsecs"], "write 60s, 2min, 2000steps or 5e6tokens"),
        (["run", "missing.toml"], "cannot read the study missing.toml"),
        (["show", "nowhere"], "nowhere holds no study"),
        (["run", "published-quantisation"], "say which by --checkpoint RUN"),
        (["run", "published-kernels", "--arms", "nope"], "an arm of a study of kernels must be one of"),
    ],
)
def test_a_wrong_name_is_an_error_with_a_remedy(call: Call, arguments: list[str], said: str) -> None:
    answer = call("study", *arguments)
    assert answer.code == 2
    assert said in answer.err
