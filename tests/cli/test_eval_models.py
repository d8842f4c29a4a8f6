"""`parbank eval` of several models, beside other compressors, with the times, and proved by a file."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from parbank.eval.methods.chunked import Chunked
from tests.cli.calls import Call, train_arguments
from tests.faults.ranks import join, start_ranks


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A short text in three documents."""
    folder = tmp_path_factory.mktemp("three")
    for number, line in enumerate(("x = [1, 2]\n", "def f(a):\n    return a\n", "for i in range(3):\n    pass\n")):
        (folder / f"{number}.txt").write_text("".join(f"# {i}\n{line}" for i in range(9)), encoding="utf-8")
    return f"text:val={folder}"


@pytest.fixture
def other(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run's artifact."""
    return Path(shutil.copy(trained / "model.pbk", tmp_path / "other.pbk"))


def test_a_score_has_other_compressors_beside_it_and_says_where_the_seconds_went(
    call: Call, trained: Path, page: str
) -> None:
    answer = call("eval", trained, "--data", page)
    assert "the same text" in answer.out
    assert "this model" in answer.out
    result = json.loads(call("eval", trained, "--data", page, "--json").out)
    assert {"xz -9", "zlib -9"} <= result["beside"].keys()
    assert all(bpb > 0 for bpb in result["beside"].values())
    assert {"start", "import", "model", "text", "scoring"} <= result["times"].keys()
    assert all(seconds >= 0 for seconds in result["times"].values())
    assert result["seconds"] <= sum(result["times"].values())


def test_the_unpacked_model_is_beside_a_score_where_the_run_knows_it(call: Call, trained: Path, page: str) -> None:
    summary = json.loads((trained / "summary.json").read_text(encoding="utf-8"))
    before = summary["val_bpb_before_packing"]
    for path in (trained, trained / "model.pbk"):
        result = json.loads(call("eval", path, "--data", summary_data(trained), "--json").out)
        assert result["beside"]["this model, unpacked"] == before
    rows = [line.split("│")[1:3] for line in call("eval", trained).out.splitlines() if "unpacked" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [["this model, unpacked", f"{before:.4f}"]]
    for other in (("--data", page), ("--method", "streaming"), ("--context", 32)):
        assert "this model, unpacked" not in json.loads(call("eval", trained, *other, "--json").out)["beside"]
        assert "add --unpacked" in call("eval", trained, *other).out


def summary_data(trained: Path) -> str:
    return str(json.loads((trained / "config.json").read_text(encoding="utf-8"))["data"])


def test_another_artifact_is_not_given_the_summary_s_score(call: Call, trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    for change in ({"artifact_bytes": 1}, {"val_bpb": summary["val_bpb"] + 0.01}, {"val_text_sha256": "0"}):
        (run / "summary.json").write_text(json.dumps(summary | change), encoding="utf-8")
        assert "this model, unpacked" not in json.loads(call("eval", run, "--json").out)["beside"]


def test_an_adaptive_score_shows_the_plain_one_and_its_worst_document(call: Call, trained: Path, page: str) -> None:
    common = ("eval", trained, "--data", page, "--device", "cpu")
    found = json.loads(
        call(*common, "--method", "adaptive", "--breakdown", "--picture", trained / "b.png", "--json").out
    )
    plain = json.loads(
        call(*common, "--method", "streaming", "--breakdown", "--picture", trained / "b.png", "--json").out
    )
    assert found["plain"]["method"] == "streaming"
    assert found["plain"]["val_bpb"] == pytest.approx(plain["val_bpb"], abs=1e-9)
    assert found["plain"]["gain_bpb"] == pytest.approx(plain["val_bpb"] - found["val_bpb"], abs=1e-6)
    documents = zip(found["breakdown"]["by_document"], plain["breakdown"]["by_document"])
    worst = max(mine["bpb"] - theirs["bpb"] for mine, theirs in documents)
    assert found["plain"]["worst_document_bpb"] == pytest.approx(worst, abs=1e-6)
    assert "plain" not in plain
    assert "by streaming; adapting gains" in call(*common, "--method", "adaptive").out


def test_a_path_that_is_no_model_is_refused_before_the_first_is_scored(
    call: Call, trained: Path, page: str, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("text", encoding="utf-8")
    for path, message in (
        (tmp_path / "missing.pbk", "missing.pbk does not exist; give an artifact"),
        (tmp_path / "text.txt", "is neither an artifact"),
        (tmp_path, "no checkpoint"),
    ):
        answer = call("eval", trained, path, "--data", page)
        assert (answer.code, answer.out) == (2, "")
        assert message in answer.err
        assert "scoring" not in answer.err


def test_an_error_at_a_later_model_does_not_lose_earlier_scores(
    call: Call, trained: Path, page: str, tmp_path: Path
) -> None:
    sound, damaged = (trained / "model.pbk").read_bytes(), tmp_path / "damaged.pbk"
    damaged.write_bytes(sound[:-9] + b"damaged!!")
    bpb = json.loads(call("eval", trained, "--data", page, "--json").out)["val_bpb"]
    answer = call("eval", trained, damaged, "--data", page)
    assert (answer.code, answer.out) == (2, "")
    assert f"before this, {trained} scored {bpb:.6f} bits per byte" in answer.err
    assert "before this" not in call("eval", damaged, trained, "--data", page).err


def test_models_of_different_contexts_are_told_apart(
    call: Call, trained: Path, other: Path, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def describe(self: Chunked) -> dict[str, Any]:
        contexts.append(64 if len(contexts) % 2 else 32)
        return {"method": "chunked", "context": contexts[-1], "stride": None, "adapt": None}

    contexts: list[int] = []
    same = call("eval", trained, other, "--data", page)
    assert "windows of different lengths" not in same.out
    assert "corrected" not in same.out, "one comparison needs no correction"
    monkeypatch.setattr(Chunked, "describe", describe)
    answer = call("eval", trained, other, "--data", page)
    assert f"different lengths (tokens: {trained} 32, {other} 64); --context N" in answer.out.replace("\n", " ")


def test_several_models_are_compared_by_document(call: Call, trained: Path, other: Path, page: str) -> None:
    answer = call("eval", trained, other, "--data", page)
    assert answer.code == 0, answer.err
    assert "+0.0000" in answer.out
    assert "by 3 documents: a paired t test" in answer.out
    assert "…" not in answer.out, "names that begin alike are told apart by their ends"
    found = json.loads(call("eval", trained, other, "--data", page, "--json").out)
    assert [model["model"] for model in found["models"]] == [str(trained), str(other)]
    alone = json.loads(call("eval", other, "--data", page, "--json").out)
    assert found["models"][1]["val_bpb"] == alone["val_bpb"]
    (difference,) = found["differences"]
    assert (difference["against"], difference["documents"]) == (str(trained), 3)
    assert difference["bpb"] == 0
    assert difference["verdict"] == "too few documents"


def test_ranks_score_models_of_different_texts_on_the_text_of_the_first(
    call: Call, trained: Path, tmp_path: Path
) -> None:
    """Without --data, each rank would otherwise score the second model on its own text."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(6):
        words = " ".join(str(word * word) for word in range(100 * number, 100 * number + 400))
        (text / f"{number}.txt").write_text(f"Squares, part {number}: {words}.\n", encoding="utf-8")
    run = tmp_path / "squares"
    assert call(*train_arguments(f"text:{text}", run, steps=1)).code == 0
    models = [str(trained / "checkpoint"), str(run / "checkpoint")]
    alone = json.loads(call("eval", *models, "--json").out)["models"]
    with start_ranks(tmp_path / "ranks", [["eval", *models, "--device", "cpu", "--json"]] * 2) as ranks:
        assert join(ranks, 120.0) == [0, 0], [rank.complained() for rank in ranks]
        together = json.loads(ranks[0].said())["models"]
    assert [model["val_bpb"] for model in together] == [model["val_bpb"] for model in alone]
    assert {model["data"] for model in together} == {summary_data(trained)}


def test_the_table_of_several_models_names_the_method_and_the_plain_score(
    call: Call, trained: Path, other: Path, page: str
) -> None:
    (tested,) = page.split("=")[1:]
    single = f"text:val={Path(tested) / '0.txt'}"
    answer = call("eval", trained, other, "--data", single, "--method", "adaptive", "--rank", "0")
    assert answer.code == 0, answer.err
    titles = " ".join(answer.out.split())
    assert "adaptive" in titles
    assert "streaming" in titles
    assert "by 1 document:" in answer.out
    assert "streaming" not in call("eval", trained, other, "--data", single).out


def test_the_unpacked_model_is_one_of_them(call: Call, trained: Path, other: Path, page: str) -> None:
    found = json.loads(call("eval", trained, "--data", page, "--unpacked", "--json").out)
    packed, unpacked = found["models"]
    assert unpacked["model"] == f"{trained}, unpacked"
    assert found["differences"][0]["bpb"] == pytest.approx(unpacked["val_bpb"] - packed["val_bpb"], abs=1e-9)
    answer = call("eval", other, "--data", page, "--unpacked")
    assert answer.code == 2
    assert "no checkpoint lies beside" in answer.err


def test_a_proof_has_both_figures(call: Call, trained: Path, page: str) -> None:
    common = ("eval", trained, "--data", page, "--method", "streaming", "--device", "cpu", "--prove", "--segments", 8)
    result = json.loads(call(*common, "--json").out)
    proof = result["proof"]
    assert proof["identical"] is True
    assert proof["segments"] == 8
    assert proof["file_bpb"] == 8 * proof["file_bytes"] / result["bytes"]
    assert proof["score_bpb"] >= result["val_bpb"], "a segment starts without context"
    assert 0 <= 8 * proof["coded_bytes"] - proof["score_bpb"] * result["bytes"] < 64 + 0.002 * 8 * proof["coded_bytes"]


def test_what_does_not_go_together_is_refused_before_the_work(
    call: Call, trained: Path, other: Path, page: str, tmp_path: Path
) -> None:
    (tmp_path / "r.json").write_text(call("eval", trained, "--data", page, "--json").out)
    for arguments, message in (
        ((trained, "--prove"), "add --method streaming"),
        ((trained, "--segments", 4), "--segments says how --prove divides"),
        ((trained, "--method", "streaming", "--prove", "--segments", 0), "--segments is a number from 1 to"),
        ((trained, other, "--breakdown"), "--breakdown takes one model, and 2 were given"),
        ((trained, other, "--compare", tmp_path / "r.json"), "--compare takes one model"),
        ((trained, trained), "a model is given twice"),
    ):
        answer = call("eval", *arguments, "--data", page)
        assert answer.code == 2
        assert message in answer.err
        assert "scoring" not in answer.err


def test_compress_and_decompress_as_commands(call: Call, trained: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "über.txt", tmp_path / "out.pbz"
    source.write_text("def f(a):\n    return a\n" * 20, encoding="utf-8")
    answer = call("compress", source, "--model", trained, "-o", out, "--device", "cpu", "--segments", 8)
    assert answer.code == 0, answer.err
    assert f"{out.stat().st_size:,} bytes" in answer.out
    back = call("decompress", out, "--model", trained, "-o", tmp_path / "back")
    assert back.code == 0, back.err
    assert (tmp_path / "back" / source.name).read_bytes() == source.read_bytes()
    again = call("decompress", out, "--model", trained, "-o", tmp_path / "back")
    assert again.code == 2
    assert "nothing is overwritten" in again.err
    assert "give a folder to write into" in call("decompress", out, "--model", trained, "-o", source).err


def test_an_empty_file_has_no_bits_per_byte(call: Call, trained: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "empty", tmp_path / "out.pbz"
    source.touch()
    answer = call("compress", source, "--model", trained, "-o", out, "--device", "cpu")
    assert answer.code == 0, answer.err
    assert "bits per byte" not in answer.out
    twice = call("compress", source, source, "--model", trained, "-o", tmp_path / "twice.pbz")
    assert "is given twice; give each file once" in twice.err


def test_standard_input_and_output_are_refused(call: Call, trained: Path, tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("a", encoding="utf-8")
    for arguments in (
        ("compress", "-", "-o", tmp_path / "a.pbz"),
        ("compress", source, "-o", "-"),
        ("decompress", "-", "-o", tmp_path),
        ("decompress", source, "-o", "-"),
    ):
        answer = call(*arguments, "--model", trained)
        assert answer.code == 2
        assert "only files are read and written; name a file" in answer.err
