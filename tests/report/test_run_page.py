"""The page of one run: what it shows, what it escapes, and what it says about old folders."""

import json
import math
import os
import re
import socket
from html.parser import HTMLParser
from pathlib import Path

import pytest

from parbank.errors import ConfigError
from parbank.files import HOLDER
from parbank.report.write import write_run_page
from tests.report.folders import make_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \u202eabc\u2066 & \"quoted\" 'it' \x07"


class Page(HTMLParser):
    """The elements of a page, its attributes and its text. Tags must be closed in order."""

    EMPTY = frozenset(("meta", "link", "wbr"))

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def chart(self, title: str) -> dict[str, list[list[float]]]:
        """The points of a chart by series."""
        found = next(a for a in self.all("svg") if "data-chart" in a and str(a["aria-label"]).startswith(f"{title}. "))
        return {one["name"]: one["points"] for one in json.loads(str(found["data-chart"]))["series"]}

    def time_of(self, part: str) -> float:
        """Milliseconds of a part of the bar of time."""
        label = next(str(a["aria-label"]) for a in self.all("div") if str(a.get("aria-label")).startswith("Seconds of"))
        found = re.search(rf"[:,] {part} ([\d.]+) (ms|s)(,|$)", label)
        assert found is not None, label
        return float(found[1]) * (1000 if found[2] == "s" else 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "a run", "optim.warmdown=0.6")


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page(write_run_page(folder))


def test_the_numbers_are_those_of_the_summary(page: Page, folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    for value in (f"{summary['val_bpb']:.4f}", "15.84 MB", "1,508,123 a second", "NVIDIA H200", "526,910 bytes"):
        assert value in page.text


def test_the_head_counts_code_and_names_the_best_compressor(tmp_path: Path) -> None:
    values = {"artifact_bytes": 12_000_000, "code_bytes": 2_000_000, "max_bytes": 16_000_000}
    others = {"zlib -9": 1.69, "xz -9": 1.46, "zstd -19": 1.50}
    head = Page(write_run_page(make_run(tmp_path / "run", **values, compressors_bpb=others))).text.partition(
        "Training"
    )[0]
    assert "87.5% of 16.00 MB, with 2.00 MB of code" in head
    assert "xz -9: 1.4600" in head
    assert "zlib" not in head
    without = make_run(tmp_path / "without", **(values | {"code_bytes": 0}))
    assert "75.0% of 16.00 MB" in Page(write_run_page(without)).text


def test_curves_have_every_row(page: Page, folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    loss = page.chart("Loss by clock")
    assert len(loss["training loss"]) == len(loss["running mean"]) == len(rows) == 90
    assert loss["running mean"][0] == loss["training loss"][0]
    last = [row["loss"] for row in rows if row["seconds"] >= rows[-1]["seconds"] - 89 * 1.31 / 30]
    assert len(last) == 3
    assert loss["running mean"][-1][1] == pytest.approx(sum(last) / 3, rel=1e-5)
    assert page.chart("Loss by tokens")["training loss"][-1][0] == pytest.approx(rows[-1]["tokens"], rel=1e-5)
    assert len(page.chart("Validation by clock")["sample of 65,536 tokens, during training"]) == 10
    rates = page.chart("Learning rates")
    assert set(rates) == {"matrices and scalars", "embeddings"}, "equal rates are one line, that hides no other"
    assert rates["matrices and scalars"][60][1] == pytest.approx(rows[60]["lr"], rel=1e-5)
    assert rates["embeddings"][0][1] == pytest.approx(0.035 / 0.025 * rows[0]["lr"], rel=1e-5)
    assert page.chart("GPU power")["GPU power"][0][1] == pytest.approx(rows[0]["gpu_power_w"], rel=1e-5)


def test_rates_that_were_carried_to_another_width_are_no_multiples(tmp_path: Path) -> None:
    page = Page(write_run_page(make_run(tmp_path / "run", "optim.tuned_width=256")))
    assert set(page.chart("Learning rates")) == {"matrices"}


@pytest.mark.parametrize(
    ("asked", "whole", "tokens"), [(5000, 198_986, "4,096"), (100, 198_986, "2,048"), (65_536, 30_000, "30,000")]
)
def test_the_sample_is_named_by_the_tokens_that_it_has(tmp_path: Path, asked: int, whole: int, tokens: str) -> None:
    run = make_run(tmp_path / "run", f"train.validate_tokens={asked}", val_tokens=whole)
    assert f"sample of {tokens} tokens, during training" in Page(write_run_page(run)).chart("Validation by clock")


def test_costs_of_tensors_share_their_decimals(tmp_path: Path) -> None:
    tensor = {"count": 4, "packed_bytes": 2.0, "levels": 3}
    costs = {"large": 1e-3, "small": 1e-6, "tiny": 1e-9, "free": 0.0}
    tensors = [tensor | {"name": name, "cost_nats": cost} for name, cost in costs.items()]
    page = Page(write_run_page(make_run(tmp_path / "run", details={"tensors": tensors})))
    rows = dict(re.findall(r"<bdi>(\w+)</bdi></code></th>.*?<td class=\"n\">([^<]*)</td></tr>", page.source))
    per_nat = 198_986 / 526_910 / math.log(2)  # tokens and bytes of the summary
    assert rows["large"] == f"{per_nat:.4f}"
    assert rows["small"] == f"{per_nat / 1000:.4f}"
    assert (rows["tiny"], rows["free"]) == ("&lt;0.0001", "0.0000")


def test_the_columns_of_tensors_are_explained(page: Page) -> None:
    explained = re.findall(r"<dt>([^<]+)</dt><dd>[^<]{20,}</dd>", page.source)
    assert explained == ["bits a weight", "coded", "entropy", "error", "cost"]
    assert "thousandths of a bit per byte" in page.text
    assert "∎ stands for the end of a document" in page.text
    assert not re.findall(r"<th[^>]*></th>", page.source), "no empty heading"


def test_a_page_needs_nothing_from_elsewhere_and_is_light(page: Page) -> None:
    assert len(page.source.encode()) < 300_000
    for _, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith("#") or value == "data:,"
    assert "url(" not in page.source
    assert "@import" not in page.source


def test_every_picture_says_in_words_what_it_shows(page: Page) -> None:
    pictures = [a for a in page.all("svg") if a.get("role") == "img"]
    assert len(pictures) > 10
    assert all(len(str(a["aria-label"])) > 20 for a in pictures)
    assert all(a.get("aria-hidden") == "true" for a in page.all("svg") if a.get("role") != "img")
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page.source)
    assert [text for text in captions if "<small>" not in text] == ["Bits per byte, beside compressors"], (
        "all have units"
    )
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))


def test_settings_that_differ_from_the_recipe_come_first(page: Page) -> None:
    source = page.source.replace("<wbr>", "")
    rows = re.findall(r"<bdi>([\w.]+)</bdi></code></th><td><bdi>(\S+?)</bdi></td><td><bdi>(\S+?)</bdi></td>", source)
    assert rows == [("optim.warmdown", "0.5", "0.6")]


def test_the_head_names_the_files_of_the_text_without_their_folders(tmp_path: Path) -> None:
    data = "text:train=/home/me/corpus/train.jsonl,val=/home/me/corpus/val.jsonl"
    page = Page(write_run_page(make_run(tmp_path / "run", f"data={json.dumps(data)}")))
    assert "on text:train=train.jsonl,val=val.jsonl," in page.text
    assert page.text.count(data) == 2, "among the settings that differ, and among all"


def test_foreign_text_is_shown_as_text(tmp_path: Path) -> None:
    details = {
        "samples": [{"prompt": EVIL, "text": EVIL}],
        "surprise": {"pieces": [EVIL, "b"], "bits": [3.0, 12.0]},
        "tensors": [{"name": EVIL, "count": 4, "packed_bytes": 2.0, "levels": 0, "error": None, "cost_nats": None}],
        "machine": {EVIL: EVIL},
    }
    data = json.dumps(f"text:{EVIL}")
    folder = make_run(
        tmp_path / "run", f"data={data}", details=details, sample=EVIL, compressors_bpb={EVIL: 1.5}, device=EVIL
    )
    page = Page(write_run_page(folder.rename(tmp_path / "<b>bold")))
    assert len(page.all("script")) == 1
    assert not page.all("img")
    assert not page.all("b")
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>" in page.text
    assert "<b>bold" in page.text
    assert not re.search("[\u202e\u2066\x07]", page.source), "only their codes"
    assert "\\u202e" in page.text


def test_an_old_folder_says_what_is_missing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", details=None, gpu=False)
    kept = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    plain = [{key: value for key, value in row.items() if key != "val_bpb"} for row in kept]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain) + '{"step": 5, "lo')
    page = Page(write_run_page(folder))
    for words in (
        "No validation during training",
        "Bytes by tensor: the run is older",
        "Bits by token",
        "is on a CPU",
    ):
        assert words in page.text
    assert len(page.chart("Loss by clock")["training loss"]) == 90


def make_unended(folder: Path, *settings: str, rows: int = 90, gpu: bool = True) -> Path:
    """A run in the middle, as `train` leaves it."""
    make_run(folder, *settings, gpu=gpu)
    (folder / "summary.json").unlink()
    start = {"device": "NVIDIA H200" if gpu else "cpu", "params": 27_002_000, "world_size": 1, "versions": {"torch": "2.11.0"},
             "started_at": "2026-11-16T10:00:00+00:00", "commit": "8493a9e61", "machine": {"processor": "Xeon"}}  # fmt: skip
    (folder / "details.json").write_text(json.dumps(start))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:rows]))
    return folder


def test_charts_above_each_other_have_one_axis(tmp_path: Path) -> None:
    """The last validation comes before the last row."""
    page = Page(write_run_page(make_unended(tmp_path / "run", rows=50)))
    frames = {}
    for chart in ("Loss by clock", "Validation by clock", "Loss by tokens", "Validation by tokens"):
        found = next(a for a in page.all("svg") if str(a.get("aria-label")).startswith(f"{chart}. "))
        frames[chart] = json.loads(str(found["data-chart"]))["x"]["frame"][:2]
    assert frames["Loss by clock"] == frames["Validation by clock"] == [0, pytest.approx(50 * 1.31)]
    assert frames["Loss by tokens"] == frames["Validation by tokens"]


def test_a_stopped_run_has_a_page_that_says_how_to_go_on(tmp_path: Path) -> None:
    folder = make_unended(tmp_path / "a run", "budget.minutes=2")
    page = Page(write_run_page(folder))
    assert "The run was stopped at step 900" in page.text
    assert f"parbank train --resume --out '{folder}'" in page.text
    assert "Loss by clock" in page.text
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"{last['tokens_per_second']:,.0f} a second" in page.text
    for known in ("NVIDIA H200", "27M", "8493a9e61", "Xeon", "2.11.0", "2026-11-16 10:00 UTC"):
        assert known in page.text
    assert "Not recorded" not in page.text


def test_the_page_of_a_run_that_trains_says_nothing_untrue(tmp_path: Path) -> None:
    folder = make_unended(tmp_path / "run", "train.validate_every=5s", rows=8, gpu=False)
    (folder / HOLDER).write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    page = Page(write_run_page(folder))
    assert "The run trains now." in page.text
    assert "every 5s: none yet" in page.text
    assert "Last validation" not in page.text
    assert "the run is on a CPU" in page.text
    for untrue in ("--resume", "was off", "is off", "nvidia-smi gave none", "summary.json"):
        assert untrue not in page.text
    (folder / HOLDER).unlink()
    assert "every 5s: none took place" in Page(write_run_page(folder)).text


def test_a_run_that_diverged_does_not_read_like_one_that_a_person_stopped(tmp_path: Path) -> None:
    folder = make_unended(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("val_bpb", None)
    bad = [row | {"loss": None, "skipped": 10} for row in rows]
    for kept, said in ((80, "10 of 90 rows have no finite loss."), (0, "no row of metrics.jsonl has a finite loss.")):
        mixed = rows[:kept] + bad[kept:]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
        page = Page(write_run_page(folder))
        assert "Its last row has no finite loss; 10 steps were skipped." in page.text
        assert said in page.text
    assert "Its last row" not in Page(write_run_page(make_unended(tmp_path / "stopped"))).text


def test_few_rows_have_no_running_mean(tmp_path: Path) -> None:
    few, more = (Page(write_run_page(make_run(tmp_path / str(n), rows_of=n))) for n in (29, 30))
    assert {name: len(points) for name, points in few.chart("Loss by clock").items()} == {"training loss": 29}
    assert set(more.chart("Loss by clock")) == {"training loss", "running mean"}


def test_the_score_comes_first_and_validation_before_loss(page: Page) -> None:
    captions = re.findall(r"<figcaption>([^<]*)", page.source)
    assert captions[0] == "Bits per byte, beside compressors"
    assert captions.index("Validation by clock ") < captions.index("Loss by clock ")


def test_a_long_clock_is_shown_in_minutes_or_hours(tmp_path: Path) -> None:
    """90 rows of 1.31 s each; the summary says how long the run was."""
    for name, seconds, unit in (
        ("short", 120.0, "seconds"),
        ("long", 5000.0, "minutes"),
        ("longest", 40_000.0, "hours"),
    ):
        folder = make_run(tmp_path / name, train_seconds=seconds)
        page = Page(write_run_page(folder))
        found = next(a for a in page.all("svg") if str(a.get("aria-label")).startswith("Loss by clock. "))
        data = json.loads(str(found["data-chart"]))
        per = {"seconds": 1, "minutes": 60, "hours": 3600}[unit]
        assert data["x"]["label"] == f"{unit} of training"
        assert data["x"]["frame"][1] == pytest.approx(seconds / per)
        assert data["series"][0]["points"][-1][0] == pytest.approx(90 * 1.31 / per, rel=1e-5)


def test_a_long_noisy_line_is_drawn_behind_its_mean(tmp_path: Path) -> None:
    """A line of a thousand rows that goes up and down would be a filled rectangle."""
    long, short = (Page(write_run_page(make_run(tmp_path / str(n), rows_of=n))) for n in (1000, 90))
    assert set(long.chart("GPU power")) == {"GPU power", "running mean"}
    assert set(short.chart("GPU power")) == {"GPU power"}


def test_words_fit_numbers_and_unknown_ones_are_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "budget.minutes=none", "budget.steps=1", rows_of=1, steps=1)
    summary = json.loads((folder / "summary.json").read_text())
    del summary["data_wait_seconds"]
    (folder / "summary.json").write_text(json.dumps(summary))
    text = Page(write_run_page(folder)).text
    assert "1 step" in text
    assert "1 steps" not in text
    assert "Waiting for data took" not in text


def test_joiners_stay_in_words_and_emoji(tmp_path: Path) -> None:
    text = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \U0001f469\u200d\U0001f467 \u200b"
    page = Page(write_run_page(make_run(tmp_path / "run", details={"samples": [{"text": text}]})))
    assert text[:-1] in page.text
    assert "\\u200b" in page.text


def test_a_run_without_rows_has_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text("")
    assert "metrics.jsonl has no rows" in Page(write_run_page(folder)).text
    (folder / "summary.json").unlink()
    assert "a second" not in Page(write_run_page(folder)).text


def test_odd_values_do_no_harm(tmp_path: Path) -> None:
    """Numbers that are texts, lists that are numbers, and empty tables, as an edited folder may have."""
    odd = {"tensors": [3, {"packed_bytes": "many"}], "by_context": [{"first": "a"}], "samples": ["x"], "machine": [],
           "surprise": {"pieces": ["a"], "bits": 2.0}, "documents": 3}  # fmt: skip
    folder = make_run(tmp_path / "run", details=odd, val_bpb=None, setup_parts=None, threads=None, tokens="all")
    Page(write_run_page(folder))
    beyond = make_run(tmp_path / "beyond", val_tokens=10**400)  # an integer that no float holds
    with open(beyond / "metrics.jsonl", "a", encoding="utf-8") as rows:
        rows.write(json.dumps({"step": 901, "seconds": 10**400, "loss": 2.0}) + "\n")
    Page(write_run_page(beyond))


@pytest.mark.parametrize(
    ("name", "values"),
    [("seconds", (5.0, 1e299, 3.0)), ("seconds", (1e299, -1.0, 2.0)), ("loss", (1e299, 1e299, 2.0)), ("lr", (10**400, 1.0, 1.0)),
     ("memory", (10**400, 0, -1)), ("step", (10**400, 2, 3)), ("tokens", (2, 1, 0)), ("loss", (math.nan, math.inf, 0.0))],
)  # fmt: skip
def test_odd_rows_do_no_harm(tmp_path: Path, name: str, values: tuple[float, ...]) -> None:
    """Numbers beyond all bounds, and rows whose clock does not go forward."""
    folder = make_run(
        tmp_path / "run", rows_of=36, details={"by_context": [{"first": -2, "last": 1, "bytes": 1, "bits": 1}]}
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row, value in zip(rows[-3:], values):
        row[name] = value
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(Page(write_run_page(folder)).chart("Loss by clock")["training loss"]) > 30
    (folder / "summary.json").unlink()
    Page(write_run_page(folder))


def test_no_run_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        write_run_page(tmp_path)


def test_a_run_that_trains_shows_its_last_validation_and_how_far_it_is(tmp_path: Path) -> None:
    """There is no score to show yet."""
    folder = make_unended(tmp_path / "run", "budget.minutes=none", "budget.steps=4000", rows=50)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    head = Page(write_run_page(folder)).text.partition("Curves")[0]
    assert f"Last validation, bits per byte{rows[44]['val_bpb']:.4f}of a sample, at step 450" in head
    assert "500 of 4,000 steps" in head
    ended = Page(write_run_page(make_run(tmp_path / "ended", "budget.minutes=none", "budget.steps=4000"))).text
    assert "Last validation" not in ended
    assert "of 4,000 steps" not in ended
