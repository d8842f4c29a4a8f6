"""benchmarks/report.py: the share is that of both parts in the command, and old runs have none."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from parbank.report.write import write_run_page
from parbank.training.run import DETAILS, PAGE
from tests.report.folders import make_run
from tests.report.test_run_page import Page

SUMMARY = {
    "setup_seconds": 6.0,
    "train_seconds": 120.0,
    "finish_seconds": 14.0,
    "finish_parts": {"packing": 13.2, DETAILS: 0.6, PAGE: 0.2},
}


@pytest.fixture
def report(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("report")


def test_the_share_is_that_of_both_parts(report: ModuleType) -> None:
    assert report.PARTS == (DETAILS, PAGE)
    rows = {row.case: row for row in report.share_rows("demo", SUMMARY, 160.0)}
    assert rows["train: the page's share"].value == pytest.approx(100 * 0.8 / 160)
    known = {row.case: row for row in report.share_rows("demo", SUMMARY)}
    assert known["train: the page's share"].value == pytest.approx(100 * 0.8 / 140)
    assert known["train: whole command"].note == "without imports"


def test_runs_are_named_by_recipe(report: ModuleType, tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / name, recipe=recipe) for name, recipe in (("7", "sprint"), ("8", "demo"), ("9", "demo"))
    ]
    assert report.name_runs(runs) == ["sprint", "demo, 8", "demo, 9"]
    assert report.name_runs([]) == []
    assert report.read_command_seconds(runs[0]) is None
    (runs[0] / "command_seconds.json").write_text("160.5")
    assert report.read_command_seconds(runs[0]) == 160.5


def test_a_run_of_an_older_parbank_has_no_share(report: ModuleType, tmp_path: Path) -> None:
    summary = report.read_summary(make_run(tmp_path / "old"))
    row = report.share_rows("old", summary)[-1]
    assert row.value is None
    assert "older" in row.note


def test_a_folder_without_training_has_all_that_a_page_shows(
    benchmark: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    text = tmp_path / "val.jsonl"
    lines = [json.dumps({"text": f"The ship {n} was at sea, and the sea was calm. " * 20}) for n in range(30)]
    text.write_text("\n".join(lines), encoding="utf-8")
    made = benchmark("report_folder").make_folder(tmp_path / "run", text, recipe="nano", steps=40)
    assert all(seconds >= 0 for seconds in made.seconds.values())
    page = Page(write_run_page(made.folder))
    assert "Not recorded" not in page.text
    assert len(page.chart("Loss by clock")["training loss"]) == 40
    (sample,) = [name for name in page.chart("Validation by clock") if name.startswith("sample of ")]
    assert len(page.chart("Validation by clock")[sample]) == 24  # every 5 of 120 seconds
    for chart in ("GPU clock", "GPU power", "Score by position of the token"):
        assert page.chart(chart)
    assert "random weights and random rows" in page.text, "the page says that nothing was trained"
    details = json.loads((made.folder / "details.json").read_text(encoding="utf-8"))
    assert len(details["documents"]["bytes"]) == 30
    assert any(tensor.get("cost_nats") for tensor in details["tensors"])


def test_a_report_is_timed_as_a_command(report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(*words: str) -> float:
        Path(words[-1]).write_bytes(b"12345")
        return float(len(called.append(words) or called))

    called: list[tuple[str, ...]] = []
    monkeypatch.setattr(report, "run", fake)
    seconds, size = report.report_rows("demo", "a run", [tmp_path], 3)
    assert (seconds.value, size.value) == (2.0, 5.0)
    assert {words[:3] for words in called} == {("report", str(tmp_path), "-o")}
