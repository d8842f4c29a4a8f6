"""Several runs on one page, and a study: the numbers equal those of the files, and what cannot be compared is said."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from parbank.config import to_dict
from parbank.eval.paired import FEWEST, compare_documents
from parbank.recipes import get_recipe
from parbank.report.chart import marker
from parbank.report.write import write_pages, write_study_page
from tests.report.folders import make_run
from tests.report.test_run_page import EVIL, Page


def summary_of(folder: Path) -> dict[str, float]:
    return dict(json.loads((folder / "summary.json").read_text()))


def test_the_numbers_equal_those_of_the_summaries(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"run-{n}", f"optim.clip={0.3 + n / 10}", seed=n) for n in range(3)]
    page = Page(write_pages(folders, tmp_path / "page.html"))
    first = summary_of(folders[0])["val_bpb"]
    for folder in folders:
        assert f"{summary_of(folder)['val_bpb']:.4f}" in page.text
    for folder in folders[1:]:
        assert f"{summary_of(folder)['val_bpb'] - first:+.4f}".replace("-", "−") in page.text
    assert {name: len(points) for name, points in page.chart("Loss by tokens").items()} == {
        f"run-{n}": 90 for n in range(3)
    }
    assert "optim.clip" in page.text
    assert "optim.schedule" not in page.text, "equal in all runs"
    assert page.text.count("better on ") >= 2


def test_runs_of_other_texts_and_windows_are_not_compared(tmp_path: Path) -> None:
    base = make_run(tmp_path / "base", val_text_sha256="a")
    other = make_run(tmp_path / "other", val_text_sha256="b")
    short = make_run(tmp_path / "short", "batch.sequence_length=1024", val_text_sha256="a")
    old = make_run(tmp_path / "old", details=None, val_text_sha256="a")
    page = Page(write_pages([base, other, short, old], tmp_path / "page.html"))
    assert "other against base: another validation text than base" in page.text
    assert "short against base: windows of 1024 tokens, base has 2048" in page.text
    assert "old against base: no bits by document" in page.text


def test_a_short_text_is_compared_without_an_interval(tmp_path: Path) -> None:
    folders = []
    for name, bits in (("base", 130.0), ("other", 120.0)):
        documents = {"documents": {"bytes": [100] * 3, "bits": [bits] * 3}}
        folders.append(make_run(tmp_path / name, details=documents))
    page = Page(write_pages(folders, tmp_path / "page.html"))
    assert "better on 3 of 3 documents" in page.text
    assert "No interval. other: 20 documents are needed, the text has 3." in page.text
    assert "Not compared" not in page.text


def test_many_long_runs_make_a_light_page_and_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"run-{n}", seed=n, rows_of=700 if n else 3000) for n in range(9)]
    page = Page(write_pages(folders, tmp_path / "page.html"))
    assert len(page.source.encode()) < 1_000_000
    counts = [len(points) for points in page.chart("Loss by clock").values()]
    assert all(200 < n <= 3000 / 9 + 2 for n in counts), counts
    drawn = [a for a in page.all("polyline") if a.get("class")]
    looks = {(a["class"], a.get("stroke-dasharray")) for a in drawn[:9]}
    assert len(looks) == 9, "colours come again with other dashes"
    known = {f"c{n}" for n in range(6)}
    used = {name for _, a in page.tags for name in str(a.get("class")).split() if re.fullmatch(r"c\d+", name)}
    assert used == known, "a class that the style lacks has no colour"
    one = Page(write_pages(folders[:1], tmp_path / "one.html"))
    assert 500 < len(one.chart("Loss by clock")["training loss"]) <= 602
    assert len(one.source.encode()) < 500_000


def test_every_marker_covers_an_area() -> None:
    """By the shoelace formula; a polygon without an area is not seen."""
    for style in range(36):
        found = re.search(r'points="([^"]+)"', marker(style, 0.0, 0.0, 10.0))
        if found is None:  # a circle or a square
            continue
        corners = [tuple(map(float, pair.split(","))) for pair in found[1].split()]
        area = sum(a[0] * b[1] - b[0] * a[1] for a, b in zip(corners, corners[1:] + corners[:1])) / 2
        assert abs(area) > 80, style


def test_a_part_of_the_time_that_a_run_did_not_measure_is_no_zero(tmp_path: Path) -> None:
    parts = {"packing": 22.0, "details for the page": 0.3, "page": 0.1}
    folders = [make_run(tmp_path / "new", finish_parts=parts), make_run(tmp_path / "old")]
    page = Page(write_pages(folders, tmp_path / "page.html"))
    cost = page.text[page.text.index("compressors and the rest") :]
    assert re.search(r"page.*?400 ms.*?–", cost)
    only = Page(write_pages(folders[1:] * 2, tmp_path / "old.html"))
    assert "compressors and the restin all" in only.text, "no column of the page"


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / parent / "run") for parent in ("a", "b")]
    page = Page(write_pages(folders, tmp_path / "page.html"))
    assert set(page.chart("Loss by clock")) == {"a/run", "b/run"}


def test_names_with_markup_are_text_in_a_comparison(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name) for name in ("<i>one", "\u202etwo")]
    page = Page(write_pages(folders, tmp_path / "page.html"))
    assert "<i>one" in page.text
    assert "\u202e" not in page.source
    assert len(page.all("script")) == 1


def test_the_interval_covers_the_difference_as_often_as_it_says() -> None:
    """Documents of very different lengths, whose difference in bits grows with their length."""
    dice = np.random.default_rng(0)
    true, covered, rounds = 0.01, 0, 400
    for _ in range(rounds):
        sizes = np.exp(dice.normal(7, 1, 80)).astype(int) + 1
        theirs = sizes * dice.normal(1.2, 0.2, 80)
        ours = theirs + sizes * (true + dice.normal(0, 0.05, 80))
        found = compare_documents(sizes.tolist(), ours.tolist(), theirs.tolist())
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= true <= found.high
    assert 0.90 < covered / rounds < 0.98


def test_few_documents_have_no_interval() -> None:
    few = compare_documents([10] * (FEWEST - 1), [12.0] * (FEWEST - 1), [10.0] * (FEWEST - 1))
    assert (few.bpb, few.low) == (pytest.approx(0.2), None)
    with pytest.raises(ValueError, match="give one of each per document"):
        compare_documents([1], [1.0, 2.0], [1.0])


def study_result() -> dict[str, object]:
    runs = {f"{arm}.{seed}": {"value": 1.2 + effect + seed / 1000, "seconds": 9.0, "steps": 5} for arm, effect in
            (("base", 0.0), ("wide", -0.004)) for seed in (0, 1, 2)}  # fmt: skip
    del runs["wide.2"]
    found = {"pairs": 2, "mean": -0.004, "low": -0.005, "high": -0.003, "words": "better"}
    return {
        "study": {
            "name": EVIL,
            "kind": "training",
            "base": to_dict(get_recipe("nano")),
            "arms": [{"name": "wide", "settings": ["model.width=64"], "claim": EVIL}],
            "seeds": [0, 1, 2],
        },
        "noise": {"sd": 0.001, "source": "a guess"},
        "arms": {"wide": found},
        "runs": runs,
        "failures": {"wide.2": EVIL},
        "notes": [EVIL],
    }


def test_a_study_shows_verdicts_pairs_curves_and_failures(tmp_path: Path) -> None:
    for arm in ("base", "wide"):
        for seed in (0, 1):
            folder = tmp_path / "runs" / f"{arm}.{seed}"
            folder.mkdir(parents=True)
            rows = [{"step": n, "seconds": n + seed / 10, "loss": 3 + math.exp(-n)} for n in range(1, 20)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(write_study_page(study_result(), tmp_path, tmp_path / "page.html"))
    for words in (
        "better",
        "−0.0040",
        "−0.0050 to −0.0030",
        "failed twice",
        "20 steps a run, scored before packing",
        "1.19600",
    ):
        assert words in page.text
    assert "</script><script>" in page.text, "the errors are among the notes"
    assert set(page.chart("wide")) == {"base", "wide"}
    assert next(a for a in page.all("g") if "data-pairs" in a)["data-pairs"] == "2"
    dots = [float(str(a["cy"])) - float(str(a["r"])) for a in page.all("circle") if a.get("class") == "pair"]
    whiskers = [float(str(a["y2"])) for a in page.all("line") if str(a.get("class")).startswith("whisker")]
    assert len(dots) == 2
    assert min(dots) > max(whiskers), "whiskers cover no pair"
    assert len(page.all("script")) == 1
    assert not page.all("img")


def test_no_arm_of_a_study_looks_like_its_base(tmp_path: Path) -> None:
    result = study_result()
    names = [f"arm-{n}" for n in range(12)]
    result["study"]["arms"] = [{"name": name, "settings": []} for name in names]  # type: ignore[index]
    result["arms"] = dict.fromkeys(names, result["arms"]["wide"])  # type: ignore[index]
    result["runs"] |= {f"{name}.0": result["runs"]["base.0"] for name in names}  # type: ignore[index, operator]
    rows = [{"step": n, "seconds": n, "loss": 3 + math.exp(-n)} for n in range(1, 20)]
    for name in ("base", *names):
        folder = tmp_path / "runs" / f"{name}.0"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(write_study_page(result, tmp_path, tmp_path / "page.html"))
    lines = [(a["class"], a.get("stroke-dasharray")) for a in page.all("polyline")]
    base, arms = set(lines[::2]), lines[1::2]
    assert len(base) == 1
    assert len(set(arms)) == 12
    assert not {kind for kind, _ in base} & {kind for kind, _ in arms}
    whiskers = {a["class"] for a in page.all("line") if str(a.get("class")).startswith("whisker")}
    assert whiskers == {f"whisker c{n}" for n in range(1, 6)}


def test_a_study_without_runs_has_a_page(tmp_path: Path) -> None:
    result = study_result() | {"runs": {}, "arms": {}, "failures": {}}
    page = Page(write_study_page(result, tmp_path, tmp_path / "page.html"))
    assert "No pair of runs has ended yet" in page.text
    assert page.text.count("to come") == 6


def test_the_reason_against_a_comparison_is_the_true_one(tmp_path: Path) -> None:
    base = make_run(tmp_path / "base", val_text_sha256="a")
    killed = make_run(tmp_path / "killed", val_text_sha256="a")
    (killed / "summary.json").unlink()
    old = make_run(tmp_path / "old")
    page = Page(write_pages([base, killed, old], tmp_path / "page.html"))
    assert "killed against base: killed has no score" in page.text
    assert "old against base: old is older than the record of the text" in page.text
    assert "another validation text" not in page.text


def test_curves_that_cannot_be_compared_say_so(tmp_path: Path) -> None:
    same = [make_run(tmp_path / f"same-{n}", seed=n) for n in range(2)]
    assert "Vocabularies differ" not in Page(write_pages(same, tmp_path / "same.html")).text
    other = make_run(tmp_path / "other", "model.vocab_size=4096", "train.validate_tokens=32768")
    page = Page(write_pages([same[0], other], tmp_path / "page.html"))
    assert page.text.count("Vocabularies differ") == 2, "one for each chart of the loss"
    assert "Samples or windows differ" in page.text
