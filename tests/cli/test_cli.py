"""The command line as a stranger meets it: help that teaches, errors that say what to do, output that can be piped."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from parbank import __version__
from parbank.cli import main as cli
from parbank.cli.terminal import printable
from parbank.config import to_dict, walk
from parbank.data.dataset import open_dataset
from parbank.data.shards import write_shard
from parbank.data.sources.fineweb import SHARDS_AT, TOKENIZER_AT
from parbank.errors import ConfigError, DataError
from parbank.recipes import RECIPES, get_recipe
from tests.cli.calls import Answer, Call, train_arguments

ROOT = Path(__file__).parents[2]


def commands() -> Iterator[tuple[list[str], Any]]:
    def below(path: list[str], command: Any) -> Iterator[tuple[list[str], Any]]:
        yield path, command
        for name, child in getattr(command, "commands", {}).items():
            yield from below([*path, name], child)

    return below([], typer.main.get_command(cli.app))


def test_every_command_and_every_option_explains_itself(call: Call) -> None:
    found = dict((" ".join(path), command) for path, command in commands())
    assert found.keys() == {
        "", "train", "warmup", "eval", "sample", "pack", "inspect", "export", "import", "recipes", "doctor",
        "data", "data prepare", "data info", "data fetch",
    }  # fmt: skip
    for name, command in found.items():
        answer = call(*name.split(), "--help")
        assert answer.code == 0
        assert answer.err == ""
        assert "Usage: parbank" in answer.out
        assert "\x1b" not in answer.out
        assert (command.help or "").strip(), name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name} {parameter.name} has no help"


def test_help_does_not_wait_for_pytorch() -> None:
    """A process of its own: another test may have imported torch here. Without torch and numpy, help takes 0.2 s."""
    code = (
        "import sys\nfrom parbank.cli import main\nsys.argv = ['parbank', 'train', '--help']\n"
        "try: main.main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'sentencepiece', 'pyarrow'} & sys.modules.keys()\nsys.exit(', '.join(heavy))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.stderr.strip() == "", "these are imported for help"
    assert "Usage: parbank train" in ended.stdout


def test_the_options_are_those_that_were_promised() -> None:
    promised = {
        "train": "--recipe --data --minutes --steps --tokens --max-bytes --out --seed --device --set --resume",
        "eval": "--data --json",
        "sample": "--prompt --tokens --temperature --top-k --top-p --stop --samples --seed --interactive",
        "pack": "--max-bytes --out --set",
        "export": "--format --out --dtype",
        "import": "--out --tokenizer --max-bytes",
        "data prepare": "--out --vocab",
        "data fetch": "--shards",
    }
    found = {" ".join(path): {option for p in command.params for option in p.opts} for path, command in commands()}
    for name, options in promised.items():
        assert set(options.split()) <= found[name], name


def test_no_arguments_show_the_help(call: Call) -> None:
    for arguments in ([], ["data"]):
        answer = call(*arguments)
        assert "Usage: parbank" in answer.out + answer.err
        assert answer.code in (0, 2)  # click's versions differ
    assert "parbank train --recipe demo" in call().out + call().err
    assert call("--version") == Answer(0, f"parbank {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "named", "remedy"),
    [
        ("train --recipe nan", "'nan'", "did you mean nano"),
        ("train --recpie nano", "--recpie", "--recipe"),
        ("train --recipe nano --set model.layrs=3", "model.layrs", "did you mean model.layers"),
        ("train --recipe nano --set model.layers", "'model.layers'", "model.layers=6"),
        ("train --recipe nano --set model.layers=x", "'x'", "a whole number"),
        ("train --recipe nano --set model=3", "model", "model.layers"),
        ("train --recipe nano --data nonsense", "'nonsense'", "use stdlib; text:PATH"),
        ("train --recipe nano --data text:missing.txt", "missing.txt", "give files"),
        (
            "train --recipe nano --data text:empty.txt",
            "empty.txt is empty",
            "delete it, leave it out, or skip it by --skip-bad",
        ),
        ("train --recipe nano --data text:latin.txt", "latin.txt, byte 3", "iconv"),
        ("train --recipe nano --data text:short.txt", "short.txt", "give more text"),
        ("train --recipe nano --data text:a,b.txt", "/a does not exist", "globs"),
        ("train --recipe nano --data shards:missing", "missing is no folder", "_train_"),
        ("train --recipe nano --data shards:", "shards:", "shards:DIR"),
        ("train --recipe nano --out file --data text:short.txt", "file", "choose another --out"),
        ("train --recipe nano --minutes 1 --steps 2", "--minutes, --steps", "give one of"),
        ("train --recipe nano --minutes 0", "budget.minutes", "positive"),
        ("train --recipe nano --minutes nan", "nan", "a number"),
        ("train --recipe nano --minutes soon", "--minutes", "number"),
        ("train --recipe nano --max-bytes 2000", "2,000 bytes", "raise --max-bytes (at least"),
        ("train --recipe nano --seed -1", "-1", "not be negative"),
        ("train --recipe nano --seed 99999999999999999999", "99999999999999999999", "from 0 to"),
        ("train --recipe nano --device tpu", "'tpu'", "auto, cpu, cuda"),
        ("train --resume", "--resume", "--out"),
        ("train --resume --out missing", "missing holds no run", "folder of an earlier run"),
        ("train --resume --out missing --recipe nano", "--resume", "no --recipe"),
        ("eval", "ARTIFACT_OR_CHECKPOINT", "--help"),
        ("eval missing", "missing does not exist", "run folder"),
        ("eval missing.pbk", "missing.pbk does not exist", "RUN_FOLDER/model.pbk"),
        ("eval short.txt", "short.txt is neither", ".pbk"),
        ("eval .", "no checkpoint at .", "run folder"),
        ("sample missing.pbk", "missing.pbk does not exist", "RUN_FOLDER/model.pbk"),
        ("pack missing --max-bytes 9", "missing", "run folder"),
        ("pack missing", "--max-bytes", "--help"),
        ("inspect missing.pbk", "missing.pbk does not exist", "RUN_FOLDER/model.pbk"),
        ("inspect .", ". is a folder", "model.pbk"),
        ("inspect short.txt", "short.txt is not a parbank artifact", "give a .pbk file"),
        ("data prepare --out x", "INPUT", "--help"),
        ("data prepare missing --out x", "missing does not exist", "give files"),
        ("data prepare short.txt --out file", "file is a file", "choose a folder"),
        ("data prepare short.txt --out . --vocab 300", "holds other files", "choose a new or empty folder"),
        ("data prepare short.txt --out x --vocab 5", "vocabulary of 5", "choose 288 to 65536"),
        ("data info missing", "missing is no folder", "_train_"),
        ("data fetch c4", "'c4'", "fineweb"),
        ("data fetch fineweb --source ./missing", "./missing is no folder", "its name on the hub"),
        ("data fetch fineweb --shards 0", "0 shards", "1 or more"),
        ("recipes missing", "'missing'", "demo, golf, nano, sprint"),
        ("nonsense", "nonsense", "--help"),
    ],
)
def test_mistakes_end_in_one_message_that_says_what_and_what_to_do(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, named: str, remedy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "short.txt").write_text("too short\n", encoding="utf-8")
    (tmp_path / "a,b.txt").write_text("commas separate paths\n", encoding="utf-8")
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    answer = call(*arguments.split())
    assert answer.code == 2
    said = " ".join(re.sub("[│╭╮╰╯─]", "", answer.err).split())  # a usage error comes in a frame
    assert named in said
    assert remedy in said
    assert sorted(tmp_path.iterdir()) == before, "a refused command leaves nothing behind"


def test_debug_keeps_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["--debug", "recipes", "x"], ["recipes", "x", "--debug"]):
        monkeypatch.setattr(sys, "argv", ["parbank", *arguments])
        with pytest.raises(ConfigError, match="there is no recipe 'x'"):
            cli.main()


def test_ctrl_c_outside_training_ends_quietly(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("parbank.data.prepare.prepare_text", interrupt)
    assert call("data", "prepare", "x", "--out", tmp_path / "x").code == 130


class OutOfMemoryError(RuntimeError):
    """Named as PyTorch's."""


def test_what_is_said_by_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli._explain(ConfigError("wrong")) == "error: wrong"
    assert cli._explain(ValueError("a bug")) is None
    full = cli._explain(OSError(28, "No space left on device", "/full"))
    assert full is not None
    assert "No space left on device: '/full'" in full
    assert "free space" in full
    assert "micro_batch_tokens" in (cli._explain(OutOfMemoryError("CUDA out of memory")) or "")
    monkeypatch.setenv("RANK", "3")
    assert cli._explain(ConfigError("wrong")) == "", "eight ranks say it once"
    assert cli._explain(DataError("gone")) == "error on rank 3: gone"
    assert cli._explain(ValueError("a bug")) is None


def test_recipes_are_listed_and_printed_whole(call: Call) -> None:
    answer = call("recipes")
    assert [line.split()[0] for line in answer.out.splitlines()] == list(RECIPES)
    for name in RECIPES:
        lines = call("recipes", name).out.splitlines()
        leaves = list(walk(get_recipe(name)))
        assert len(lines) == len(leaves)
        for line, (path, value, doc) in zip(lines, leaves):
            assert line == f"{path} = {json.dumps(value)}    # {doc}"
            assert doc, path


def test_doctor_reports_and_its_code_says_whether_something_is_broken(call: Call) -> None:
    answer = call("doctor")
    assert answer.code == ("BAD" in answer.out)
    for subject in ("Python", "PyTorch", "GPU", "Triton", "C compiler", "Memory", "Disk", "Cache", "Extras"):
        assert re.search(rf"^(ok  |note|BAD )  {subject} ", answer.out, re.MULTILINE), subject
    broken = dict(os.environ)
    try:
        os.environ["PARBANK_CACHE"] = "/dev/null/x"
        answer = call("doctor")
    finally:
        os.environ["PARBANK_CACHE"] = broken["PARBANK_CACHE"]
    assert answer.code == 1
    assert "BAD   Cache" in answer.out
    assert "-> set PARBANK_CACHE" in answer.out


def test_training_says_how_it_goes_and_what_came_out(
    call: Call, text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [a for a in train_arguments(text_spec, tmp_path) if a not in ("--out", str(tmp_path))]
    answer = call(*arguments, "--set", "train.log_every=1", "--seed", "5")
    assert answer.code == 0, answer.err
    assert "\x1b" not in answer.out
    (run,) = (tmp_path / "runs").iterdir()  # the default place
    assert re.fullmatch(r"nano-\d{8}-\d{6}", run.name)
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


def test_sample_writes_the_prompt_and_goes_on(call: Call, trained: Path) -> None:
    prompt = "naïve ∞ 👩‍🚀 "
    options = ("--tokens", "8", "--prompt", prompt, "--seed", "3")
    first, again, other = (call("sample", trained, *options[:-1], seed) for seed in (3, 3, 4))
    assert first.code == 0
    assert first.out.startswith(prompt)
    assert first.out == again.out
    assert first.out != other.out
    assert re.search(r"\[\d+ tokens, \d+ tokens/s\]", first.err)
    cold = {call("sample", trained, "--tokens", 8, "--temperature", 0, "--seed", s).out for s in (1, 2)}
    assert len(cold) == 1
    assert call("sample", trained, "--tokens", 8, "--top-k", 1).out in cold
    assert call("sample", trained, "--prompt", "", "--tokens", 1).code == 0
    assert call("sample", trained / "checkpoint", "--tokens", 1).code == 0
    for option, value, message in (
        ("--tokens", 0, "at least 1"),
        ("--temperature", -1, "0 or more"),
        ("--top-k", -2, "0 (keep all) or positive"),
        ("--seed", 10**30, "from 0 to"),
        ("--prompt", "half \udc80", "surrogate"),
    ):
        answer = call("sample", trained, option, value)
        assert answer.code == 2
        assert message in answer.err


def test_a_sample_reaches_a_terminal_without_its_control_codes() -> None:
    assert printable("a\tb\nc") == "a\tb\nc"
    assert printable("\x1b[2J\x07\r\x7f\x9b é∞") == "␛[2J␇␍␡\ufffd é∞"


def test_a_narrow_output_encoding_is_no_crash(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "argv", ["parbank", "sample", str(trained), "--prompt", "é∞", "--tokens", "2"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    sys.stdout.flush()
    assert not ended.value.code
    assert raw.getvalue().startswith(b"??")


def test_pack_under_another_cap_and_inspect(call: Call, trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "a folder" / "small.pbk"
    answer = call("pack", trained, "--max-bytes", 45_000, "--out", target)
    assert answer.code == 0
    assert str(target) in answer.out
    assert target.stat().st_size <= 45_000 < (trained / "model.pbk").stat().st_size
    impossible = call("pack", trained, "--max-bytes", 1000, "--out", tmp_path / "no.pbk")
    assert impossible.code == 2
    assert "does not fit" in impossible.err
    assert not (tmp_path / "no.pbk").exists()
    shown = call("inspect", target)
    assert shown.code == 0
    assert f"{target.stat().st_size:,}" in shown.out
    for part in (
        "tokenizer",
        "token_embedding.weight",
        "blocks.3.mlp.down.weight",
        '"layers": 4',
        "embedding",
        "matrix",
    ):
        assert part in shown.out, part
    assert "\x1b" not in shown.out
    for part in ("format  version 2", "coded", "entropy", "total"):
        assert part in shown.out, part
    assert call("inspect", trained).code == 2


def test_export_a_run_and_import_it_again(call: Call, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    answer = call("export", trained, "--out", out)
    assert answer.code == 0
    assert str(out) in answer.out
    assert (tmp_path / "model.model").exists()
    answer = call("import", out, "--out", tmp_path / "back.pbk")
    assert answer.code == 0
    from parbank.artifact.container import read_artifact
    from parbank.artifact.pack import unpack_tensors

    found, weights = (unpack_tensors(read_artifact(p)) for p in (tmp_path / "back.pbk", trained / "model.pbk"))
    assert found.keys() == weights.keys()
    assert all(found[name].equal(weights[name]) for name in weights)
    wrong = call("export", trained, "--format", "gguf")
    assert wrong.code == 2
    assert "there is safetensors" in wrong.err
    (checkpoint,) = sorted((trained / "checkpoint").glob("*.pt"))[-1:]
    assert call("export", checkpoint, "--out", tmp_path / "raw.safetensors", "--dtype", "bfloat16").code == 0


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
    (hub / TOKENIZER_AT).write_bytes(data.tokenizer.to_bytes())
    tokens = data.train.read(0, 20_000)
    for name, part in (("train_000000", tokens[:9000]), ("train_000001", tokens[9000:]), ("val_000000", tokens[:5000])):
        write_shard(hub / SHARDS_AT / f"fineweb_{name}.bin", np.array(part))
    answer = call("data", "fetch", "fineweb", "--source", hub, "--shards", 2)
    assert answer.code == 0
    folder = tmp_path / "cache" / "fineweb"
    assert answer.out.splitlines()[-2] == f"4 files in {folder}"
    assert answer.out.splitlines()[-1] == "next  parbank train --data fineweb --set model.vocab_size=320"
    for path in folder.iterdir():
        assert f"{path.stat().st_size:>13,} bytes  {path.name}" in answer.out
    run = call(*train_arguments("fineweb", tmp_path / "run", steps=1))
    assert run.code == 0, run.err
    assert "20,000 training tokens" in run.out
    assert json.loads(call("eval", tmp_path / "run" / "model.pbk", "--json").out)["data"] == "fineweb"
    elsewhere = call("data", "fetch", "fineweb", "--source", hub, "--out", tmp_path / "else where")
    assert f" --data 'shards:{tmp_path / 'else where'}' " in elsewhere.out.splitlines()[-1]


def test_config_json_is_what_the_arguments_say(trained: Path, text_spec: str) -> None:
    found = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    expected = json.loads(json.dumps(to_dict(get_recipe("nano"))))
    expected["data"] = text_spec
    expected["budget"]["steps"] = 4
    assert found == expected


def test_a_closed_pipe_is_no_crash() -> None:
    command = f"'{sys.executable}' -m parbank recipes golf | head -n 1"
    ended = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, cwd=ROOT, timeout=60, env=os.environ
    )
    assert ended.stdout == 'recipe = "golf"    # The recipe this started from.\n'
    assert ended.stderr == ""


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
