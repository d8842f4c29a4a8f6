"""`parbank data`, and the options that say which text is meant."""

import json
from pathlib import Path

import numpy as np
import pytest

from parbank.data.dataset import open_dataset
from parbank.data.shards import write_shard
from parbank.data.sources.fineweb import SHARDS_AT, TOKENIZER_AT
from tests.cli.calls import Call, next_commands, train_arguments


def test_prepare_then_train_on_the_shards(call: Call, text_spec: str, tmp_path: Path) -> None:
    out = tmp_path / "my shards"
    train, val = (Path(text_spec.partition(f"{split}=")[2].partition(",")[0]) for split in ("train", "val"))
    inputs = ("data", "prepare", f"train={train}", f"val={val}", "--out", out, "--vocab", 320)
    answer = call(*inputs)
    assert answer.code == 0, answer.err
    size = sum(path.stat().st_size for path in val.iterdir())
    assert f"val.bytes              {size:,}" in answer.out
    assert "tokenising" in answer.err, "progress goes to standard error"
    again = call(*inputs)
    assert (again.out, again.err) == (answer.out, ""), "what is prepared is not prepared again"
    assert answer.out.startswith(call("data", "info", out).out)
    assert answer.out.splitlines()[-1] == f"next  parbank train --data 'shards:{out}' --set model.vocab_size=320"
    assert call(*train_arguments(f"shards:{out}", tmp_path / "run", steps=1)).code == 0
    wrong = call(*train_arguments(f"shards:{out}", tmp_path / "wrong"), "--set", "model.vocab_size=400")
    assert wrong.code == 2
    assert "320 tokens" in wrong.err
    assert not (tmp_path / "wrong").exists()
    shard = next(out.glob("*_val_*.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    damaged = call("data", "info", out)
    assert damaged.code == 2
    assert f"{shard} is cut short" in damaged.err


def test_fetch_puts_fineweb_where_training_finds_it(
    call: Call, text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARBANK_CACHE", str(tmp_path / "cache"))
    data = open_dataset(text_spec, vocab_size=320, cache=tmp_path / "other", say=lambda line: None)
    hub = tmp_path / "hub"
    for place in (TOKENIZER_AT, f"{SHARDS_AT}/x"):
        (hub / place).parent.mkdir(parents=True)
    (hub / TOKENIZER_AT).write_bytes(data.tokenizer.model_bytes)
    tokens = data.train.read(0, 20_000)
    for name, part in (("train_000000", tokens[:9000]), ("train_000001", tokens[9000:]), ("val_000000", tokens[:5000])):
        write_shard(hub / SHARDS_AT / f"fineweb_{name}.bin", np.array(part))
    answer = call("data", "fetch", "fineweb", "--source", hub, "--shards", 2)
    assert answer.code == 0
    folder = tmp_path / "cache" / "fineweb"
    assert answer.out.splitlines()[-2] == f"4 files in {folder}"
    assert answer.out.splitlines()[-1] == "next  parbank train --data fineweb --set model.vocab_size=320"
    for path in folder.iterdir():
        listed = f"{path.stat().st_size:>13,} bytes  {path.name}" in answer.out
        assert listed == (path.name != "fetched.json"), "the record of the fetch is parbank's own"
    run = call(*train_arguments("fineweb", tmp_path / "run", steps=1))
    assert run.code == 0, run.err
    assert "20,000 training tokens" in run.out
    assert json.loads(call("eval", tmp_path / "run" / "model.pbk", "--json").out)["data"] == "fineweb"
    elsewhere = call("data", "fetch", "fineweb", "--source", hub, "--out", tmp_path / "else where")
    assert f" --data 'shards:{tmp_path / 'else where'}' " in elsewhere.out.splitlines()[-1]


def test_prepare_takes_the_options_and_a_folder_that_is_named_as_a_kind(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / "text"
    rows.mkdir()
    for i in range(40):
        text = "".join(f"Line {j} of document {i} says that {j} times {i} is {i * j}.\n" for j in range(20))
        (rows / f"{i}.jsonl").write_text(json.dumps({"body": text}) + "\nnot json\n")
    (rows / "other.txt").write_text("left out by the glob")
    options = ("--glob", "*.jsonl", "--field", "body", "--skip-bad", "--vocab", 300)
    answer = call("data", "prepare", "text", "--out", "shards", *options)
    assert answer.code == 0, answer.err
    assert "skipped bad files and lines: 40" in answer.err
    assert f"text:train={rows},glob=*.jsonl,field=body,skip-bad=yes" in answer.out
    assert next_commands(answer.out) == [["train", "--data", "shards:shards", "--set", "model.vocab_size=300"]]
    again = call("data", "prepare", "text:text", "--out", "shards", *options)
    assert again.out == answer.out
    for arguments, message in (
        (["stdlib", "--glob", "*.py"], "--glob is not for --data stdlib"),
        (["shards:shards"], "shards:shards is tokens already"),
        (["fineweb"], "fineweb is tokens already"),
        (["text:text", "more"], "text:text is a whole data spec"),
        (["val=text"], "no training text: only val= was given"),
    ):
        refused = call("data", "prepare", *arguments, "--out", "other")
        assert refused.code == 2
        assert message in refused.err
        assert not (tmp_path / "other").exists()
