"""The table of levers: no named lever is missing, each has an arm or a reason, and the page is that of its data."""

import json
import re
import tomllib
from collections.abc import Callable
from types import ModuleType

import pytest

from parbank.config import override, to_dict
from parbank.recipes import get_recipe

NAMED = (
    "bigram table", "value embeddings", "attention output gate", "smear", "heads of 128", "exclusive attention", "QK gain",
    "dense connections", "parallel lanes", "row-normalised", "NorMuon", "cautious decay", "scheduled decay", "dropout",
    "learning-rate floor", "growing sequence", "growing batch", "windowed attention", "within a document",
    "case operators", "distillation", "tail averaging",
)  # fmt: skip


@pytest.fixture
def levers(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("levers")


def test_every_named_lever_has_a_row(levers: ModuleType) -> None:
    names = [lever.name for lever in levers.read_levers()]
    assert not [named for named in NAMED if not any(named in name for name in names)]


def test_every_lever_has_an_arm_or_a_reason_and_every_measurement_a_lever(levers: ModuleType) -> None:
    known, measured = levers.find_arms(), levers.find_measured()
    tried = {one.arm for one in measured}
    table = levers.read_levers()
    for lever in table:
        assert lever.verdict, lever.name
        tool = lever.arms or (lever.benchmark and (levers.HERE / f"{lever.benchmark}.py").is_file())
        assert tool or lever.verdict.startswith("not built: "), f"{lever.name}: name its arms, or say why none is"
        assert set(lever.arms) <= known | tried, f"{lever.name}: no study has the arm"
        measures = levers.measured_of(lever, measured)
        assert measures or lever.log or "not" in lever.verdict, f"{lever.name}: a verdict without evidence"
    assert tried <= {arm for lever in table for arm in lever.arms}, "an arm was tried, and has no row"


def test_the_page_is_that_of_its_data(levers: ModuleType) -> None:
    page = levers.make_page(levers.read_levers(), levers.find_measured())
    assert levers.PAGE.read_text(encoding="utf-8") == page, "run python benchmarks/levers.py"
    assert "`normuon` -0.018 ([25 s, H200]" in page
    assert "`QK-clip at 5` +0.011 ([convergence_variants, CPU]" in page


def test_every_difference_is_of_a_result(levers: ModuleType) -> None:
    """A number that is typed into a verdict, or that links to the log, has no result."""
    for row in levers.make_page(levers.read_levers(), levers.find_measured()).splitlines():
        for number, rest in re.findall(r"([+-]\d+\.\d+)(.{0,70})", row):
            assert "(../../benchmarks/results/" in rest or f"claims {number}" in row, row


def test_the_study_of_25_seconds_is_the_one_that_the_log_names(levers: ModuleType) -> None:
    """The command of its result names another file, which is not in the tree."""
    file = tomllib.loads((levers.HERE / "studies/race25.toml").read_text(encoding="utf-8"))
    (path,) = (levers.HERE / "results/study_race").glob("*/result.json")
    study = json.loads(path.read_text(encoding="utf-8"))["study"]
    assert {arm["name"]: arm["settings"] for arm in study["arms"]} == {
        name: arm["settings"] for name, arm in file["arm"].items()
    }
    base = json.loads(json.dumps(to_dict(override(get_recipe(file["recipe"]), *file["settings"]))))
    for part in ("model", "batch", "optim", "average"):
        now = {name: base[part][name] for name in study["base"][part]}
        assert study["base"][part] == now, part
    assert 60 * study["base"]["budget"]["minutes"] == pytest.approx(25)
