"""`parbank eval` by every method, as a stranger meets it."""

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest

from tests.cli.calls import Call

METHODS = {
    "chunked": (),
    "sliding": ("--stride", 16),
    "streaming": ("--segment", 300),
    "ttt": ("--chunk", 512, "--epochs", 1, "--ttt-scores", "sliding", "--stride", 32, "--blocks", "2,3"),
    "adaptive": ("--chunk", 16, "--rank", 2, "--set", "orders=[2,4]"),
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A short text of its own, in two documents."""
    folder = tmp_path_factory.mktemp("page")
    for name, line in (("a.txt", "def [bold]add(a, b):\n    return a + b\n"), ("b.txt", "class Thing:\n    pass\n")):
        (folder / name).write_text("".join(f"# {i}\n{line}" for i in range(60)), encoding="utf-8")
    return f"text:val={folder}"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_scores_and_says_what_it_did(call: Call, trained: Path, page: str, method: str) -> None:
    common = ("eval", trained, "--data", page, "--method", method, *METHODS[method], "--device", "cpu")
    result = json.loads(call(*common, "--json").out)
    chunked = json.loads(call("eval", trained, "--data", page, "--json").out)
    assert result["method"] == method
    assert result["context"] == 64
    assert result["stride"] == {"sliding": 16, "ttt": 32}.get(method)
    assert (result["adapt"] is not None) == (method in ("ttt", "adaptive"))
    for name in ("tokens", "bytes", "text_sha256", "tokenizer_sha256"):
        assert result[name] == chunked[name]
    assert result["tokens_per_second"] == pytest.approx(result["tokens"] / result["seconds"])
    if method == "adaptive":  # the text repeats itself sixty times
        assert result["val_bpb"] < 0.5 * chunked["val_bpb"]
    else:
        assert abs(result["val_bpb"] - chunked["val_bpb"]) < 0.5
    assert (result["val_bpb"] == chunked["val_bpb"]) == (method == "chunked")
    again = json.loads(call(*common, "--json").out)
    assert again["val_bpb"] == result["val_bpb"]
    assert f"{result['val_bpb']:.6f}" in call(*common).out


def test_results_are_compared_or_refused(call: Call, trained: Path, page: str, tmp_path: Path) -> None:
    path = tmp_path / "sliding.json"
    sliding = ("eval", trained, "--data", page, "--method", "sliding", "--stride", 16)
    path.write_text(call(*sliding, "--json").out)
    same = call(*sliding, "--compare", path)
    assert same.code == 0
    assert "difference_bpb     +0.000000" in same.out
    assert json.loads(call("eval", path, "--compare", path, "--json").out)["difference_bpb"] == 0
    for arguments, message in (
        (("eval", trained, "--data", page), "the method is chunked here and sliding"),
        ((*sliding[:-1], 32), "the stride is 32 here and 16"),
        ((*sliding, "--context", 32), "the context is 32 here and 64"),
        (("eval", trained, "--method", "sliding", "--stride", 16), "the text is"),
    ):
        answer = call(*arguments, "--compare", path)
        assert answer.code == 2
        assert message in answer.err
        assert "scoring" not in answer.err, "refused before the work"
    assert "another one by --compare" in call("eval", path).err


def test_a_json_that_is_no_result_is_not_called_one(call: Call, trained: Path, tmp_path: Path) -> None:
    for name in (trained / "summary.json", tmp_path / "gone.json", tmp_path):
        answer = call("eval", name)
        assert answer.code == 2
        assert "is a result" not in answer.err
        assert str(name) in answer.err
    assert "neither an artifact (.pbk) nor a whole checkpoint" in call("eval", trained / "summary.json").err
    assert "is not a result" in call("eval", trained / "summary.json", "--compare", trained / "summary.json").err


def test_the_same_bytes_in_other_documents_do_not_compare(call: Call, trained: Path, tmp_path: Path) -> None:
    found = []
    parts = sorted(
        ["a b c\n", "d e f\n"], key=lambda part: hashlib.sha256(part.encode()).digest()
    )  # their order in a text
    for name, documents in (("one", ["".join(parts)]), ("two", parts)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        found.append(json.loads(call("eval", trained, "--data", f"text:val={tmp_path}/{name}.jsonl", "--json").out))
        (tmp_path / f"{name}.json").write_text(json.dumps(found[-1]))
    assert [result["documents"] for result in found] == [1, 2]
    assert found[0]["text_sha256"] == found[1]["text_sha256"]
    assert found[0]["val_bpb"] != found[1]["val_bpb"]
    answer = call("eval", trained, "--data", f"text:val={tmp_path}/one.jsonl", "--compare", tmp_path / "two.json")
    assert answer.code == 2
    assert "the number of documents is 1 here and 2" in answer.err
    assert "scoring" not in answer.err, "refused before the work"


def test_a_score_that_came_to_less_than_was_asked_for_says_so(call: Call, trained: Path, page: str) -> None:
    def notes(*arguments: object) -> list[str]:
        answer = call("eval", trained, "--data", page, *arguments, "--json")
        assert json.loads(answer.out)["val_bpb"] > 0
        return [line for line in answer.err.splitlines() if line.startswith("note:")]

    (one_chunk,) = notes("--method", "ttt")
    assert "nothing was learnt: the text is one chunk of" in one_chunk
    assert "lower --chunk" in one_chunk
    (side_by_side,) = notes("--method", "sliding", "--stride", 64)
    assert "64 tokens that move by 64 lie side by side: these are chunked scores; lower --stride" in side_by_side
    assert notes("--method", "sliding", "--stride", 63) == notes() == notes("--method", "ttt", "--chunk", 512) == []


def test_the_breakdown_is_tables_and_a_picture(call: Call, trained: Path, page: str, tmp_path: Path) -> None:
    picture = tmp_path / "here.png"
    common = ("eval", trained, "--data", page, "--method", "sliding", "--breakdown", "--picture", picture)
    answer = call(*common)
    assert answer.code == 0, answer.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    for words in ("tokens of context", "place in document", "document", "# 0 def [bold]add"):
        assert words in answer.out
    found = json.loads(call(*common, "--json").out)
    for parts in found["breakdown"].values():
        assert sum(part["bytes"] for part in parts) == found["bytes"]
    assert len(found["breakdown"]["by_document"]) == 2


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(
    call: Call,
    trained: Path,
    page: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "mine.png").write_bytes(b"a photograph")
    common = ("eval", trained, "--data", page)
    for name, message in (
        ("x.txt", "ends in .png, .pdf, .svg, .jpg, got"),
        ("x", "ends in .png"),
        ("folder.png", "folder.png is a folder; give a file in it"),
        ("gone/x.png", "there is no folder"),
        ("file/x.png", "there is no folder"),
        ("mine.png", "does not say that parbank drew it"),
    ):
        answer = call(*common, "--breakdown", "--picture", tmp_path / name)
        assert (answer.code, answer.out) == (2, "")
        assert message in answer.err
        assert "scoring" not in answer.err
    assert (tmp_path / "mine.png").read_bytes() == b"a photograph"
    answer = call(*common, "--picture", tmp_path / "x.png")
    assert answer.code == 2
    assert "--picture names the picture of --breakdown; give both" in answer.err


def test_a_picture_that_fails_does_not_take_the_score_with_it(
    call: Call, trained: Path, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_no_space(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", find_no_space)
    picture = trained.parent / "full.png"
    answer = call("eval", trained, "--data", page, "--breakdown", "--picture", picture)
    assert answer.code == 2
    assert "No space left on device" in answer.err
    assert not picture.exists()
    assert "val_bpb" in answer.out
    assert "place in document" in answer.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "sliding", "--stride", 0), "would not move on; raise --stride"),
        (("--method", "sliding", "--stride", -5), "would not move on; raise --stride"),
        (("--method", "ttt", "--ttt-scores", "sliding", "--stride", 65), "lower --stride, or raise --context"),
        (("--context", 32_769), "32768 positions; lower --context, or use streaming"),
        (("--method", "sliding", "--context", 32_769), "32768 positions; lower --context, or use streaming"),
        (("--method", "ttt", "--context", 32_769, "--chunk", 32_769), "lower --context or --chunk"),
        (("--method", "ttt", "--segment", 0), "--segment must be at least 1, got 0"),
        (("--method", "sliding", "--stride", 16, "--set", "stride=32"), "--set stride and --stride set the same"),
        (("--context", 64, "--set", "context=32"), "--set context and --context set the same thing; give one"),
        (("--method", "ttt", "--ttt-scores", "sliding", "--set", "scores=chunked"), "--set scores and --ttt-scores"),
    ],
)
def test_settings_are_refused_before_the_text_is_read(
    call: Call,
    trained: Path,
    arguments: tuple[object, ...],
    message: str,
) -> None:
    answer = call("eval", trained, "--data", "text:val=no/such", *arguments)
    assert answer.code == 2
    assert message in answer.err


@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
def test_numbers_without_end_are_refused_before_the_text_is_read(call: Call, trained: Path, value: str) -> None:
    answer = call("eval", trained, "--data", "text:val=no/such", "--method", "ttt", "--lr", value)
    assert f"--lr must be 0 or more and finite, got {value}" in answer.err
    assert f"0 or more, got {value}" in call("sample", "x.pbk", "--temperature", value).err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "sliding", "--stride", 65), "stride must lie in 1..64"),
        (("--method", "sliding", "--stride", 0), "stride must lie in 1..64"),
        (("--stride", 8), "--stride is not a setting of chunked; that is for sliding and ttt"),
        (("--context", 0), "at least 1 token, got 0"),
        (("--lr", 0.1), "--lr is not a setting of chunked; that is for ttt and adaptive"),
        (("--method", "none"), "--method must be one of chunked, sliding, streaming, ttt, adaptive, got 'none'"),
        (("--method", "ttt", "--set", "momentum"), "cannot read the setting 'momentum'; write it as NAME=VALUE"),
        (("--method", "ttt", "--set", "momentum=2"), "--momentum must lie in [0, 1), got 2.0"),
        (("--method", "ttt", "--epochs", 0), "--epochs must be at least 1"),
        (("--method", "ttt", "--blocks", "x"), "such as 8,9,10, got 'x'"),
        (("--method", "ttt", "--blocks", "9"), "--blocks must lie in 0..3"),
        (("--method", "ttt", "--lr", 1e30, "--chunk", 64), "lower --lr"),
        (("--compare", "gone.json"), "gone.json"),
    ],
)
def test_what_cannot_be_done_is_said(
    call: Call,
    trained: Path,
    page: str,
    arguments: tuple[object, ...],
    message: str,
) -> None:
    answer = call("eval", trained, "--data", page, *arguments)
    assert answer.code == 2
    assert message in answer.err


def test_methods_are_listed_with_their_settings(call: Call) -> None:
    answer = call("eval", "--methods")
    assert answer.code == 0
    for words in (
        "chunked: windows side by side",
        "  stride  ",
        "distance between windows",
        "  adapter  ",
        "  momentum  ",
    ):
        assert words in answer.out


def test_any_setting_can_be_set(call: Call, trained: Path, page: str) -> None:
    common = ("eval", trained, "--data", page, "--method", "ttt", "--chunk", 256, "--json")
    found = json.loads(call(*common, "--set", "momentum=0.5", "--set", "blocks=[1, 2]", "--set", "scores=sliding").out)
    assert (found["adapt"]["momentum"], found["adapt"]["blocks"], found["adapt"]["scores"]) == (0.5, [1, 2], "sliding")
    assert json.loads(call(*common).out)["adapt"]["momentum"] == 0.9


def test_eval_gives_the_summary_s_score_exactly(call: Call, trained: Path, text_spec: str) -> None:
    summary = json.loads((trained / "summary.json").read_text(encoding="utf-8"))
    answer = call("eval", trained / "model.pbk", "--data", text_spec, "--json", "--device", "cpu")
    assert answer.code == 0
    assert answer.out.count("\n") == 1
    result = json.loads(answer.out)
    assert result["val_bpb"] == summary["val_bpb"]
    assert result["val_loss"] == summary["val_loss"]
    assert result["bytes"] == summary["val_bytes"]
    assert result["text_sha256"] == summary["val_text_sha256"]
    assert "scoring" in answer.err
    # the run folder knows its text; the checkpoint is scored as it was before packing
    assert json.loads(call("eval", trained, "--json").out)["val_bpb"] == summary["val_bpb"]
    checkpoint = json.loads(call("eval", trained / "checkpoint", "--json").out)
    assert checkpoint["val_bpb"] == summary["val_bpb_before_packing"]
    plain = call("eval", trained).out
    assert f"{summary['val_bpb']:.6f}" in plain
    alone = call("eval", trained / "model.pbk")
    assert alone.code == 2
    assert "say by --data what to score" in alone.err


def test_any_text_can_be_scored(call: Call, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "poem, short.txt").write_bytes("røses\r\n".encode())
    answer = call("eval", trained, "--data", f"text:val={tmp_path}/poem? short.txt", "--json")
    assert json.loads(answer.out)["bytes"] == 8
