"""A model with case operators, from text to artifact: scored, sampled, compressed, exported, and refused where it must be."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch

import parbank
from parbank.artifact.about import TOKENIZER
from parbank.artifact.container import read_artifact, write_artifact
from parbank.cli import main as cli
from parbank.data.tokenizer import MARK
from parbank.display import END
from parbank.eval.compressor import pieces
from parbank.eval.details import describe
from parbank.eval.sampling import write_text
from parbank.eval.score import Scored
from parbank.serve.player import Pieces, Player, show_token
from parbank.training.config import RunConfig, read_config
from tests.cli.calls import Call, next_commands, train_arguments

TEXT = "The HTTPServer of NASA said:\n\tNO, Thank You é\u00c9 \ue000 \u2581 iPhone"


@pytest.fixture(scope="module")
def run(text_spec: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("case") / "run"
    arguments = [*train_arguments(text_spec, out), "--set", "tokenizer.case_operators=true"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["parbank", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert not ended.value.code
    return out


@pytest.fixture(scope="module")
def model(run: Path) -> parbank.Model:
    return parbank.load(run / "model.pbk", device="cpu")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.txt"
    path.write_text(TEXT * 9, encoding="utf-8")
    return path


def test_the_artifact_and_the_checkpoint_carry_the_operators(run: Path, model: parbank.Model) -> None:
    assert model.tokenizer.case_operators
    assert read_artifact(run / "model.pbk").sections[TOKENIZER].startswith(MARK)
    checkpoint = parbank.load(run, device="cpu")
    assert checkpoint.tokenizer.fingerprint == model.tokenizer.fingerprint
    assert json.loads((run / "config.json").read_text())["tokenizer"] == {"case_operators": True}
    assert json.loads((run / "summary.json").read_text())["text"] == "proved"


def test_every_method_counts_the_bytes_of_the_text(call: Call, run: Path, trained: Path, page: Path) -> None:
    for more in ((), ("--method", "streaming"), ("--method", "sliding")):
        ours, plain = (
            json.loads(call("eval", path, "--data", f"text:val={page}", "--json", *more).out) for path in (run, trained)
        )
        assert ours["text"] == plain["text"] == "proved"
        assert ours["bytes"] == plain["bytes"] == page.stat().st_size
        assert ours["text_sha256"] == plain["text_sha256"]
        assert ours["val_bpb"] != plain["val_bpb"]


def test_the_score_is_that_of_its_tokens(model: parbank.Model) -> None:
    score = model.score(TEXT)
    ids = [model.tokenizer.bos_id, *model.tokenizer.encode(TEXT).tolist()]
    assert len(ids) - 1 <= model.context
    chances = torch.log_softmax(model.logits(ids[:-1]).double(), -1)
    nats = -chances[torch.arange(len(ids) - 1), ids[1:]].sum().item()
    assert score.bytes == len(TEXT.encode())
    assert score.bpb == pytest.approx(nats / np.log(2) / len(TEXT.encode()), rel=1e-4)


def test_a_score_is_proved_by_compressing(call: Call, run: Path, page: Path, tmp_path: Path) -> None:
    streaming = ("--method", "streaming", "--prove", "--segments", 8)
    proved = json.loads(call("eval", run, "--data", f"text:val={page}", "--device", "cpu", *streaming, "--json").out)
    assert proved["proof"]["identical"] is True
    packed, back = tmp_path / "page.pbz", tmp_path / "back"
    assert call("compress", page, "--model", run / "model.pbk", "--out", packed, "--device", "cpu").code == 0
    assert call("decompress", packed, "--model", run / "model.pbk", "--out", back, "--device", "cpu").code == 0
    assert [path.read_bytes() for path in back.iterdir()] == [page.read_bytes()]


@pytest.mark.parametrize("piece", [5, 6, 7, 8])
def test_pieces_of_a_compressed_file_may_end_inside_a_word_of_capitals(
    model: parbank.Model, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece begins where the last one ended, without a BOS: its first letters must not become capitals."""
    text = b"abcdeFGhi jKLMNopq ABCDEF\xff\xfeGh \xffij KL\xffmn"
    found = [pieces.to_tokens(text[n : n + piece], model.tokenizer) for n in range(0, len(text), piece)]
    assert model.tokenizer.decode_bytes(np.concatenate(found)) == text


def test_samples_and_pages_show_the_case(model: parbank.Model) -> None:
    tokenizer = model.tokenizer
    tokens = tokenizer.encode(TEXT).tolist()
    for place in range(len(tokens)):
        before = tokenizer.decode_bytes(tokens[:place]).decode(errors="ignore")
        written = "".join(write_text(tokenizer, tokens[:place], tokens[place:]))
        assert TEXT.endswith(written.lstrip("\ufffd")), "inside a character the rest of it is lost"
        assert len(before) + len(written.lstrip("\ufffd")) >= len(TEXT) - 1
    assert "".join(write_text(tokenizer, (), tokens, ["NASA"])) == "The HTTPServer of "
    shown = Pieces(tokenizer)
    assert "".join(shown.add(token) for token in tokens) + shown.finish() == TEXT
    whole = np.array([tokenizer.bos_id, *tokens, tokenizer.bos_id, *tokenizer.encode("Be")], np.uint16)
    nats = np.full(len(whole) - 1, np.log(2), np.float32)
    surprise = describe(Scored(whole, nats), tokenizer, 8)["surprise"]
    assert "".join(surprise["pieces"]) == TEXT + END + "Be"
    assert sum(surprise["bits"]) == pytest.approx(len(nats), abs=0.01), "an operator's bits go to its letter"
    names = {show_token(tokenizer, token) for token in range(tokenizer.vocab_size)}
    assert {"<capital>", "<capitals>"} < names


def test_sampling_continues_a_prompt(call: Call, run: Path, model: parbank.Model) -> None:
    answer = call("sample", run, "--prompt", "The HT", "--tokens", 30, "--device", "cpu")
    assert answer.code == 0
    assert answer.out.startswith("The HT")
    assert "\ue000" not in answer.out
    assert "\ue001" not in answer.out
    player = Player("m", model)
    lines = list(player.write("The HT", tokens=20, temperature=0.8, top_p=1.0, seed=3))
    written = model.sample("The HT", tokens=20, temperature=0.8, seed=3)
    assert "".join(line["text"] for line in lines) == written
    measured = list(player.measure(TEXT))
    assert "".join(piece[0] for line in measured for piece in line.get("pieces", [])) == TEXT
    assert measured[-1]["score"]["bytes"] == len(TEXT.encode())


def test_export_and_import_keep_the_tokenizer(call: Call, run: Path, model: parbank.Model, tmp_path: Path) -> None:
    exported, again = tmp_path / "m.safetensors", tmp_path / "again.pbk"
    assert call("export", run / "model.pbk", "--out", exported).code == 0
    file = exported.with_suffix(".model").read_bytes()
    assert file == model.tokenizer.model_bytes
    sentencepiece.SentencePieceProcessor(model_proto=file.removeprefix(MARK))
    assert call("import", exported, "--out", again).code == 0
    assert parbank.load(again, device="cpu").score(TEXT) == model.score(TEXT)


def test_the_plain_model_in_the_same_file_is_scored_as_what_it_is(
    call: Call, run: Path, page: Path, tmp_path: Path
) -> None:
    """Without its mark the tokenizer is a plain one with odd symbols. Its tokens cost more, and are the text still."""
    artifact = read_artifact(run / "model.pbk")
    path = tmp_path / "unmarked.pbk"
    plain = artifact.sections[TOKENIZER].removeprefix(MARK)
    write_artifact(path, artifact.meta, artifact.sections | {TOKENIZER: plain})
    ours, other = (json.loads(call("eval", file, "--data", f"text:val={page}", "--json").out) for file in (run, path))
    assert other["text"] == "proved"
    assert other["bytes"] == ours["bytes"]
    assert other["val_bpb"] > ours["val_bpb"]


def test_runs_of_before_have_no_operators(trained: Path) -> None:
    values = json.loads((trained / "config.json").read_text())
    del values["tokenizer"]
    assert not read_config(values).tokenizer.case_operators
    assert isinstance(read_config(values), RunConfig)
    assert not read_artifact(trained / "model.pbk").sections[TOKENIZER].startswith(MARK)


def test_preparing_by_the_command(call: Call, text_spec: str, tmp_path: Path) -> None:
    answer = call("data", "prepare", text_spec, "--out", tmp_path / "shards", "--vocab", 320, "--case-operators")
    assert answer.code == 0
    command = next_commands(answer.out)[0]
    assert command[-2:] == ["--set", "tokenizer.case_operators=true"]
    assert call(*command, "--recipe", "nano", "--steps", 1, "--out", tmp_path / "run", "--device", "cpu").code == 0
