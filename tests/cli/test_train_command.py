"""`parbank train` as a stranger meets it."""

import json
import re
from pathlib import Path

import pytest

from parbank.config import to_dict
from parbank.recipes import get_recipe
from tests.cli.calls import Call, next_commands, train_arguments


def test_training_says_how_it_goes_and_what_came_out(
    call: Call, text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [a for a in train_arguments(text_spec, tmp_path) if a not in ("--out", str(tmp_path))]
    answer = call(*arguments, "--set", "train.log_every=1", "--seed", "5")
    assert answer.code == 0, answer.err
    assert "\x1b" not in answer.out
    (run,) = (tmp_path / "runs").iterdir()  # the default place
    assert re.fullmatch(r"nano-\d{8}-\d{6}-[0-9a-f]{8}", run.name)
    assert len(re.findall(r"^step \d+  loss \d\.\d{4}  [\d,]+ tokens/s  \d+:\d\d left$", answer.out, re.MULTILINE)) == 4
    for line in (
        r"^steps +4 in",
        r"^speed .* tokens/s",
        r"^artifact .* of the cap 200,000",
        r"^val bpb ",
        r"--- sample",
    ):
        assert re.search(line, answer.out, re.MULTILINE), line
    assert "zlib -9" in answer.out
    assert json.loads((run / "config.json").read_text(encoding="utf-8"))["seed"] == 5
    # the folder is used up, and going on with it is offered
    again = call(*arguments, "--out", run)
    assert again.code == 2
    assert "--resume" in again.err
    more = call("train", "--resume", "--out", run, "--steps", "6", "--device", "cpu")
    assert more.code == 0, more.err
    assert json.loads((run / "summary.json").read_text(encoding="utf-8"))["steps"] == 6


def test_config_json_is_what_the_arguments_say(trained: Path, text_spec: str) -> None:
    found = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    expected = json.loads(json.dumps(to_dict(get_recipe("nano"))))
    expected["data"] = text_spec
    expected["budget"]["steps"] = 4
    assert found == expected


def test_a_run_knows_its_text_from_any_folder(
    call: Call, text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(text_spec.partition("train=")[2].partition(",")[0]).parent
    monkeypatch.chdir(folder)
    assert call(*train_arguments("text:train=train,val=val", tmp_path / "run", steps=2)).code == 0
    for name in ("train", "val"):  # another text by the same names
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("something else, which must not be scored instead\n" * 400)
    monkeypatch.chdir(tmp_path)
    here = call("eval", "run", "--json", "--device", "cpu")
    own = call("eval", "run", "--data", text_spec, "--json", "--device", "cpu")
    assert json.loads(here.out)["text_sha256"] == json.loads(own.out)["text_sha256"]


def test_it_ends_with_commands_that_work(call: Call, text_spec: str, tmp_path: Path) -> None:
    out = tmp_path / "my rün, it's"
    score, sample = next_commands(call(*train_arguments(text_spec, out, steps=2)).out)
    assert score[:2] == ["eval", str(out)]
    assert sample[:2] == ["sample", str(out)]
    assert call(*score, "--device", "cpu").code == 0
    assert call(*(word for word in sample if word != "--interactive"), "--tokens", 2, "--device", "cpu").code == 0


def test_a_cap_with_a_unit_and_options_of_the_data_are_remembered(call: Call, tmp_path: Path) -> None:
    docs = tmp_path / "döcs"
    docs.mkdir()
    for i in range(50):
        text = "".join(f"Line {j} of document {i} says that {j} times {i} is {i * j}.\n" for j in range(40))
        (docs / f"{i}.md").write_text(text, encoding="utf-8")
        for j in range(8):  # enough that some are held out for validation
            (docs / f"{i}-{j}.rst").write_text(f"Page {j} of chapter {i}.", encoding="utf-8")
    (docs / "latin.md").write_bytes(b"caf\xe9")
    arguments = train_arguments(f"text:{docs}", tmp_path / "run", steps=2)
    bad = call(*arguments, "--glob", "*.md")
    assert bad.code == 2
    assert "latin.md, byte 3: not UTF-8" in bad.err
    assert "--skip-bad" in bad.err
    answer = call(*arguments, "--glob", "*.md", "--skip-bad", "--max-bytes", "200KiB")
    assert answer.code == 0, answer.err
    assert f"skipped bad files and lines: 1; the first: {docs}/latin.md" in answer.out
    config = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert config["budget"]["max_bytes"] == 204_800
    assert config["data"] == f"text:train={docs},glob=*.md,skip-bad=yes"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["skipped_bad"] == 1
    result = json.loads(call("eval", tmp_path / "run", "--json", "--device", "cpu").out)
    assert result["text_sha256"] == summary["val_text_sha256"]
    assert call("train", "--resume", "--out", tmp_path / "run", "--steps", 3, "--device", "cpu").code == 0
    # the same words, given to eval by hand
    by_hand = ("--data", f"text:{docs}", "--glob", "*.md", "--skip-bad")
    assert json.loads(call("eval", tmp_path / "run", *by_hand, "--json").out)["text_sha256"] == result["text_sha256"]
    # a run folder from before there were globs: its folder gave .md and not .rst, and still does
    (docs / "latin.md").unlink()
    config["data"] = f"text:train={docs}"
    (tmp_path / "run" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert json.loads(call("eval", tmp_path / "run", "--json").out)["text_sha256"] == result["text_sha256"]
    everything = json.loads(call("eval", tmp_path / "run", "--data", f"text:{docs}", "--json").out)
    assert everything["text_sha256"] != result["text_sha256"]
