"""A screen: its design is balanced, and it finds the effects that its runs were made with."""

import itertools
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from parbank.study.kinds import KINDS
from parbank.study.ship import make_study
from parbank.study.study import Job

ROOT = Path(__file__).parents[2]
FACTORS = ROOT / "benchmarks" / "studies" / "screen50-factors.toml"


@pytest.fixture
def screen(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("screen")


def test_every_two_factors_occur_together_equally_often(screen: ModuleType) -> None:
    rows = screen.design([f"factor-{number}" for number in range(11)])
    levels = np.array([[int(level) for level in row.values()] for row in rows])
    assert levels.shape == (12, 11)
    assert not levels[0].any(), "the base has no change"
    assert (levels.sum(axis=0) == 6).all()
    for a, b in itertools.combinations(range(11), 2):
        assert (levels[:, a] & levels[:, b]).sum() == 3


@pytest.mark.parametrize("stored", ["folder", "result"])
def test_effects_are_those_that_the_runs_were_made_with(screen: ModuleType, tmp_path: Path, stored: str) -> None:
    given = screen.Screen.read(FACTORS)
    true = {name: 0.001 * (number - 4) for number, name in enumerate(given.high)}
    runs = {}
    for number, levels in enumerate(screen.design(list(given.high))):
        arm = f"run-{number:02}" if number else "base"
        value = 1.15 + sum((levels[name] - 0.5) * effect for name, effect in true.items())
        runs[f"{arm}.0"] = {"arm": arm, "value": value}
    source = tmp_path / "result.json"
    if stored == "result":
        source.write_text(json.dumps({"runs": runs}))
    else:
        source = tmp_path
        (tmp_path / "results").mkdir()
        for key, run in runs.items():
            (tmp_path / "results" / f"{key}.json").write_text(json.dumps(run))
    found = screen.effects(given, source)
    assert found.pop("mean") == pytest.approx(1.15)
    assert found == pytest.approx(true)


def test_too_few_runs_are_refused(screen: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"runs": {"base.0": {"arm": "base", "value": 1.0}}}))
    with pytest.raises(SystemExit, match="1 runs have ended; 11 effects and a mean need 12"):
        screen.effects(screen.Screen.read(FACTORS), tmp_path / "result.json")
    with pytest.raises(SystemExit, match="has no run"):
        screen.effects(screen.Screen.read(FACTORS), tmp_path)


def test_the_committed_study_is_that_of_its_factors(screen: ModuleType) -> None:
    written = FACTORS.with_name("screen50.toml").read_text()
    assert written == screen.study_of(screen.Screen.read(FACTORS), "benchmarks/studies/screen50-factors.toml")


def test_every_run_of_the_committed_study_is_a_config_with_its_levels(screen: ModuleType) -> None:
    given = screen.Screen.read(FACTORS)
    study = make_study(str(FACTORS.with_name("screen50.toml")), data="stdlib")
    assert KINDS[study.kind].unit == "bits/byte"
    assert study.metric == "streaming"
    for number, levels in enumerate(screen.design(list(given.high))):
        config = study.config(Job(f"run-{number:02}" if number else "base", 0))
        assert config.tokenizer.case_operators == levels["case-operators"]
        assert config.batch.sequence_length == (4096 if levels["longer-last"] else 2048)
        assert config.batch.all_lengths()[0] == (512 if levels["shorter-first"] else 1024)
        assert config.model.layers == (7 if levels["fewer-wider-mlps"] else 8)
        assert config.optim.matrix_lr == (0.032 if levels["matrix-lr"] else 0.02)


def test_the_command_shows_effects_and_writes_no_factors_file(
    screen: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (result,) = (ROOT / "benchmarks" / "results" / "study_screen50").glob("*/result.json")
    monkeypatch.setattr(sys, "argv", ["screen.py", "show", str(FACTORS), str(result)])
    screen.main()
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("mean 1.1479 bits/byte, 2,033,564 tokens/s; two deviations of an effect: 0.0012")
    assert shown[4].startswith("| case-operators: ")
    assert shown[4].endswith("| -0.0156 | -0.0154 | -0.1% |")
    own = tmp_path / "factors.toml"
    own.write_text(FACTORS.read_text())
    monkeypatch.setattr(sys, "argv", ["screen.py", "write", str(own)])
    with pytest.raises(SystemExit):
        screen.main()
    assert "name the file to write" in capsys.readouterr().err
    assert own.read_text() == FACTORS.read_text()


def test_singles_and_what_failed_alone(tmp_path: Path) -> None:
    """Each change alone is an arm; what has no run among them is left out of the screen, at its low setting."""
    factors = tmp_path / "a-factors.toml"
    factors.write_text(
        'recipe = "nano"\nbudget = "20steps"\nseeds = 1\nsettings = ["model.layers=2"]\n'
        '[factor.a]\nlow = ["optim.clip=0.3"]\nhigh = ["optim.clip=1.0"]\n'
        '[factor.b]\nlow = ["optim.warmdown=0.5"]\nhigh = ["optim.warmdown=0.7"]\n'
        '[[joint]]\nfactors = ["a", "b"]\nsettings = ["optim.clip=0.5"]\n'
    )
    command = [sys.executable, str(ROOT / "benchmarks/screen.py")]
    subprocess.run([*command, "singles", factors, tmp_path / "singles.toml"], check=True)
    singles = tomllib.loads((tmp_path / "singles.toml").read_text())
    assert singles["arm"]["b"]["settings"] == ["optim.clip=0.3", "optim.warmdown=0.7"]
    tried = tmp_path / "tried" / "results"
    tried.mkdir(parents=True)
    for arm in ("base", "b"):
        (tried / f"{arm}.json").write_text(json.dumps({"arm": arm, "value": 1.0}))
    subprocess.run([*command, "write", factors, tmp_path / "a.toml", "--tried", tried.parent], check=True)
    written = tomllib.loads((tmp_path / "a.toml").read_text())
    assert written["settings"] == ["model.layers=2", "optim.clip=0.3", "optim.warmdown=0.5"]
    found = [arm["settings"] for arm in written["arm"].values()]
    assert found.count(["optim.warmdown=0.7"]) == 6
    assert found.count(["optim.warmdown=0.5"]) == 5
