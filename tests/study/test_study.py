"""A study as data: arms, budgets, files, and what is shipped."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from parbank.config import override, to_dict
from parbank.errors import ConfigError
from parbank.files import write_json
from parbank.gpu import GpuProcess
from parbank.recipes import find_recipe, get_recipe
from parbank.study import machine
from parbank.study.arms import ARMS, claim_of
from parbank.study.kinds import KINDS
from parbank.study.machine import summarise
from parbank.study.ship import STUDIES, make_arm, make_study
from parbank.study.study import (
    STORED,
    Arm,
    Job,
    Kind,
    Study,
    read_arm,
    read_budget,
    read_study,
    settings_between,
    write_study,
)
from parbank.training.configure import configure_run


def test_every_shipped_study_can_be_made_and_stored(tmp_path: Path) -> None:
    write_json(tmp_path / "run" / "config.json", to_dict(get_recipe("sprint")))
    for name, shipped in STUDIES.items():
        study = make_study(name, checkpoints=[str(tmp_path / "run")] if shipped.kind in STORED else ())
        KINDS[study.kind].check(study)
        assert [arm.name for arm in study.arms] == [*shipped.arms, *(name for name, _, _ in shipped.grid)]
        for arm in study.arms:
            assert arm.settings or study.kind == "kernels", f"{arm.name} changes nothing"
        write_study(tmp_path / name, study)
        assert read_study(tmp_path / name) == study


def test_an_arm_is_the_settings_that_its_function_changes() -> None:
    base = get_recipe("sprint")
    for name, change in ARMS.items():
        arm = make_arm(name, base)
        assert override(base, *arm.settings) == change(base)
        assert arm.claim == claim_of(name)
        assert len(arm.claim) > 20, f"{name} has no claim"
    assert make_arm("batch-third-larger", base).settings == ("batch.batch_tokens=262144",)
    assert make_arm("batch-third-larger", get_recipe("golf")).settings == ("batch.batch_tokens=1048576",)
    assert "model.heads=9" in make_arm("width-576", base).settings
    assert "model.kv_heads=3" in make_arm("width-576", base).settings
    assert set(make_arm("6x768", base).settings) == {
        "model.layers=6", "model.width=768", "model.heads=12", "model.kv_heads=6", "model.value_layers=[4, 5]",
    }  # fmt: skip
    lion = override(base, *make_arm("lion", base).settings).optim
    assert lion.embedding_lr * lion.adam_weight_decay == pytest.approx(0.035 * 0.04), "decay of AdamW's strength"
    assert settings_between(base, base) == ()
    with pytest.raises(ConfigError, match="the arm head-128 does not fit the recipe nano"):
        make_arm("head-128", get_recipe("nano"))
    with pytest.raises(ConfigError, match=r"an arm must be one of .* did you mean value-residual"):
        make_arm("value-residuals", base)


def test_arms_on_the_command_line_may_have_lists() -> None:
    base = get_recipe("sprint")
    arm = read_arm("staged:batch.stages=[[0.3,512,196608]],optim.warmdown=0.7", base)
    assert arm == Arm(name="staged", settings=("batch.stages=[[0.3,512,196608]]", "optim.warmdown=0.7"))
    for wrong in ("wide", "wide:", ":model.width=576"):
        with pytest.raises(ConfigError, match=r"wide:model.width=576"):
            read_arm(wrong, base)
    with pytest.raises(ConfigError, match=r"model.depth is not a setting"):
        read_arm("deep:model.depth=3", base)


def test_the_base_is_the_config_that_train_takes() -> None:
    """A batch that is given is that of the whole run, and tokens have a tokenizer of their own."""
    assert make_study("seeds", recipe="demo").base.batch.stages
    settings = ["batch.batch_tokens=8192"]
    base = make_study("seeds", recipe="demo", settings=settings).base
    assert base.batch == configure_run(find_recipe("demo"), *settings).batch
    assert not base.batch.stages
    assert make_study("seeds", recipe="demo").base.tokenizer.case_operators
    assert not make_study("seeds", recipe="demo", data="fineweb").base.tokenizer.case_operators


def test_budgets() -> None:
    base = get_recipe("sprint")
    for text, seconds in (("30s", 30), ("2min", 120), ("1.5min", 90), (".5min", 30), ("3_0.s", 30)):
        minutes = override(base, *read_budget(text)).budget.minutes
        assert minutes is not None
        assert 60 * minutes == pytest.approx(seconds)
    assert override(base, *read_budget("2_000steps")).budget.steps == 2000
    assert override(base, *read_budget("5e6tokens")).budget.tokens == 5_000_000
    for wrong in ("30", "s", "30 hours", "-3s", "1.2.3s", "_s", "1.5steps", "1e400steps"):
        with pytest.raises(ConfigError, match="write 60s, 2min, 2000steps"):
            read_budget(wrong)


def test_every_arm_has_the_same_seeds_and_takes_its_turn() -> None:
    study = make_study("published-training", seeds=3, arms=["value-residual", "swa"])
    jobs = study.jobs()
    assert [job.key for job in jobs[:6]] == [
        "base.0", "value-residual.0", "swa.0", "value-residual.1", "swa.1", "base.1",
    ]  # fmt: skip
    assert sorted(jobs) == sorted(Job(arm, seed) for arm in ("base", "value-residual", "swa") for seed in range(3))
    assert study.config(Job("swa", 2)).seed == 2
    assert study.config(Job("swa", 2)).average.use == "swa"


def test_choices_are_made_on_dev_unless_val_is_asked_for(tmp_path: Path) -> None:
    spec = f"text:{tmp_path}"
    assert make_study("seeds", data=spec).base.data.endswith(",holdout=dev")
    assert "holdout" not in make_study("seeds", data=spec, holdout="val").base.data
    assert make_study("seeds").base.data == "stdlib"  # has no part of its own to hold out
    with pytest.raises(ConfigError, match="--holdout is dev or val"):
        make_study("seeds", data=spec, holdout="test")


def test_a_file_is_a_study(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'recipe = "nano"\nbudget = "6steps"\nseeds = 2\nsettings = ["model.layers=3", "model.value_layers=[2]"]\n'
        'arms = ["swa"]\n[arm.slow]\nsettings = ["optim.matrix_lr=0.001"]\nclaim = "slower (my notes)"\n',
        encoding="utf-8",
    )
    study = make_study(str(path))
    assert (study.name, study.seeds, study.base.model.layers) == ("mine", (0, 1), 3)
    assert [arm.name for arm in study.arms] == ["swa", "slow"]
    assert study.arms[1].claim == "slower (my notes)"
    assert study.base.budget.steps == 6
    path.write_text("recipes = 3", encoding="utf-8")
    with pytest.raises(ConfigError, match="recipes is not a setting"):
        make_study(str(path))
    path.write_text('recipe = "nano"\n[arm]\nslow = "optim.matrix_lr=0.001"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"arm.slow must be a table; write \[arm.slow\]"):
        make_study(str(path))
    with pytest.raises(ConfigError, match="there are seeds, published-training"):
        make_study("published")


@pytest.mark.parametrize(("line", "said"), [("seeds = 0", "at least 1 seed, got 0"), ('kind = "nope"', "kind")])
def test_wrong_values_of_a_file_are_refused(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'recipe = "nano"\nbudget = "6steps"\n{line}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        make_study(str(path))


def test_kinds_have_the_names_that_a_study_may_have() -> None:
    assert set(get_args(Kind)) == set(KINDS)


@pytest.mark.parametrize("wrong", ["a b", "", "../x", "base"])
def test_names_are_safe_and_differ(wrong: str) -> None:
    with pytest.raises(ConfigError):
        Study(name="x", base=get_recipe("nano"), arms=(Arm(name=wrong),))


def test_what_the_gpu_did_is_read_with_gaps() -> None:
    lines = "1980, 400.5, 50\n1700, 699.0, 60\n1755, [N/A], 61\n1740, 690.0, 62\n17"
    assert summarise(lines) == {
        "clock_mhz": 1740.0, "power_w": 690.0, "temperature_c": 60.0, "lowest_clock_mhz": 1700.0,
    }  # fmt: skip
    assert summarise("No devices were found\n") == {}


def test_samples_of_a_long_run_fill_no_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    samples = "yes '1500, 300.0, 40' | head -n 9000; echo '600, 300.0, 40'"  # more than the 64 kB of a pipe
    tool.write_text(f'#!/bin/sh\n{samples}\ntouch "$0.end"\nexec sleep 60\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    with machine.ClockWatch(torch.device("cuda")) as watch:
        until = time.monotonic() + 20
        while not (tmp_path / "nvidia-smi.end").exists() and time.monotonic() < until:
            time.sleep(0.02)
    assert (watch.found["clock_mhz"], watch.found["lowest_clock_mhz"]) == (1500, 600)


def test_processes_that_come_during_the_first_run_are_not_taken_for_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container this process has another number in nvidia-smi's list: its own are those that its first use adds."""
    listed = [7]
    monkeypatch.setattr(
        machine, "other_processes", lambda device: [GpuProcess(pid, "python", "1 MiB") for pid in listed]
    )
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device: listed.append(100))
    neighbours = machine.Neighbours(torch.device("cuda"))
    neighbours.settle()
    assert neighbours.others() == ["7 (python)"]
    listed.append(9)
    assert neighbours.others() == ["7 (python)", "9 (python)"]
    listed[:] = [100]
    assert neighbours.others() == []
