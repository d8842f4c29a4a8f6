"""`parbank plan`, and `train` without a recipe: the plan is what is trained."""

import json
from pathlib import Path

import pytest

import parbank
from parbank.errors import ConfigError
from parbank.plan import plan as planning
from parbank.plan.machine import Machine
from tests.cli.calls import Call
from tests.plan.machines import CPU

SLOW = Machine(
    **{**vars(CPU), "rates": tuple(30 * rate for rate in CPU.rates)}
)  # so that plans are small, as tests must be
SMALL = ["--max-bytes", "300kB", "--minutes", "0.02", "--device", "cpu"]


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "look_at", lambda place, say: SLOW)


def test_plan_prints_a_plan_and_the_command_that_trains_it(call: Call, text_spec: str) -> None:
    answer = call("plan", "--data", text_spec, *SMALL, "--set", "model.layers=2")
    assert answer.code == 0, answer.err
    assert "2 layers of" in answer.out
    assert "bits per byte, packed" in answer.out
    assert "parbank train --data" in answer.out
    assert "--set model.layers=2" in answer.out


def test_the_command_that_trains_keeps_threads_and_device(call: Call, text_spec: str) -> None:
    answer = call("plan", "--data", text_spec, *SMALL, "--threads", "1")
    assert "--threads 1 --device cpu" in answer.out.splitlines()[-1]


def test_plan_as_json_is_a_config(call: Call, text_spec: str) -> None:
    answer = call("plan", "--data", text_spec, *SMALL, "--json", "--set", "optim.matrix_lr=0.01")
    found = json.loads(answer.out)
    assert found["config"]["optim"]["matrix_lr"] == 0.01
    assert found["config"]["budget"] | {"minutes": 0.02, "max_bytes": 300_000} == found["config"]["budget"]


def test_train_without_a_recipe_trains_the_plan(call: Call, text_spec: str, tmp_path: Path) -> None:
    planned = json.loads(call("plan", "--data", text_spec, *SMALL, "--json").out)["config"]
    run = parbank.train(
        data=text_spec, minutes=0.02, max_bytes=300_000, out=tmp_path / "run", device="cpu", quiet=True,
        settings={"quant.calibration_tokens": 0},
    )  # fmt: skip
    config = json.loads((run.folder / "config.json").read_text())
    assert config["recipe"] == "auto"
    for part in ("layers", "width", "vocab_size", "heads"):
        assert config["model"][part] == planned["model"][part]
    assert config["batch"] == planned["batch"]
    assert run.summary["artifact_bytes"] <= 300_000


def test_wrong_settings_are_named_before_any_work(call: Call, text_spec: str) -> None:
    for setting, said in (("model.widht=64", "model.width"), ("optim.matrix_lr=x", "optim.matrix_lr must be a number")):
        answer = call("plan", "--data", text_spec, *SMALL, "--set", setting)
        assert answer.code == 2
        assert said in answer.err
    with pytest.raises(ConfigError, match="a plan needs a clock"):
        parbank.train(recipe="auto", data=text_spec, steps=3, device="cpu", quiet=True)


def test_a_plan_counts_on_compiled_passes_where_the_run_compiles_them(
    call: Call, text_spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rate(minutes: float, compiler: str | None, *settings: str) -> float:
        monkeypatch.setattr(planning, "find_compiler", lambda: compiler)
        shape = ("model.layers=2", "model.width=64", "model.vocab_size=320", "batch.batch_tokens=512", *settings)
        words = [word for setting in shape for word in ("--set", setting)]
        answer = call("plan", "--data", text_spec, "--max-bytes", "300kB", "--minutes", minutes, "--json", *words)
        return float(json.loads(answer.out)["expected"]["tokens_per_second"])

    plain = rate(3, None)
    assert rate(3, "g++") > 1.2 * plain
    assert rate(2, "g++", "train.compile=none") > 1.2 * plain
    for same in (rate(1, "g++"), rate(3, "g++", "train.compile=false")):
        assert same == pytest.approx(plain)
