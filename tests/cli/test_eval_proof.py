"""`parbank eval` and `Model.score` refuse an artifact whose tokenizer gives other bytes than the text."""

import argparse
import json
from pathlib import Path

import pytest

import parbank
from parbank.artifact.about import TOKENIZER
from parbank.artifact.container import read_artifact, write_artifact
from parbank.data.prepare import prepare_text
from parbank.errors import DataError
from tests.cli.calls import Call
from tests.data.attacks import letters_to_a


@pytest.fixture(scope="module")
def hostile(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model, with a tokenizer that reads every letter as `a`."""
    artifact = read_artifact(trained / "model.pbk")
    lines = Path(argparse.__file__).read_text(encoding="utf-8").splitlines()
    path = tmp_path_factory.mktemp("hostile") / "cheap.pbk"
    write_artifact(path, artifact.meta, artifact.sections | {TOKENIZER: letters_to_a(lines)})
    return path


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.txt"
    path.write_text("It was a bright cold day in April.\n" * 40, encoding="utf-8")
    return path


def test_an_artifact_whose_tokens_are_not_the_text_gets_no_score(
    call: Call, trained: Path, hostile: Path, page: Path, tmp_path: Path
) -> None:
    honest = call("eval", trained, "--data", f"text:val={page}", "--json")
    assert json.loads(honest.out)["text"] == "proved"
    (tmp_path / "honest.json").write_text(honest.out)
    for more in ((), ("--json",), ("--method", "streaming"), ("--compare", tmp_path / "honest.json")):
        answer = call("eval", hostile, "--data", f"text:val={page}", *more)
        assert (answer.code, answer.out) == (2, "")
        assert "validation document 1 (it begins 'It was a bright cold day" in answer.err
        assert "its tokens are not its text" in answer.err
    for text in (page, page.read_text(), page.read_bytes(), f"text:{page}"):
        with pytest.raises(DataError, match="its tokens are not its text"):
            parbank.load(hostile, "cpu").score(text)


def test_without_the_proof_the_two_would_compare(
    call: Call, trained: Path, hostile: Path, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the proof is what refuses: nothing else in a result tells the two apart."""
    (tmp_path / "honest.json").write_text(call("eval", trained, "--data", f"text:val={page}", "--json").out)
    monkeypatch.setattr("parbank.data.validation.check_tokens", lambda *given: None)
    answer = call("eval", hostile, "--data", f"text:val={page}", "--compare", tmp_path / "honest.json", "--json")
    assert answer.code == 0
    assert json.loads(answer.out)["same_tokenizer"] is False


def test_tokens_without_text_are_said_to_be_not_proved(
    call: Call, trained: Path, hostile: Path, text_spec: str, tmp_path: Path
) -> None:
    prepare_text([text_spec], tmp_path / "shards", vocab_size=320, say=lambda line: None)
    spec = f"shards:{tmp_path / 'shards'}"
    assert json.loads(call("eval", trained, "--data", spec, "--json").out)["text"] == "not proved"
    shown = call("eval", trained, "--data", spec).out.splitlines()
    assert any(line.split() == ["text", "not", "proved"] for line in shown)
    answer = call("eval", hostile, "--data", spec)
    assert (answer.code, answer.out) == (2, "")
    assert "tokens of another tokenizer" in answer.err


@pytest.mark.parametrize("method", [("chunked",), ("ttt", "--chunk", "128", "--epochs", "1"), ("adaptive",)])
def test_an_audit_says_how_far_probabilities_are_from_one(
    call: Call, trained: Path, page: Path, method: tuple[str, ...]
) -> None:
    common = ("eval", trained, "--data", f"text:val={page}", "--device", "cpu", "--method", *method)
    found = json.loads(call(*common, "--audit", "--json").out)
    assert found["audit"]["positions"] >= 16
    assert found["audit"]["worst_deviation"] < 1e-4
    plain = json.loads(call(*common, "--json").out)
    assert plain["val_bpb"] == found["val_bpb"]
    assert "audit" not in plain
    assert "positions sum to 1 within" in call(*common, "--audit").out
