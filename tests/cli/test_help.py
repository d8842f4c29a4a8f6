"""Help that teaches: every command, every option, and examples that work."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.text import Text

from parbank import __version__
from parbank.cli import main as cli
from parbank.cli.terminal import describe_registered
from tests.cli.calls import Answer, Call

ROOT = Path(__file__).parents[2]


def test_every_command_and_every_option_explains_itself(call: Call) -> None:
    found = dict((" ".join(path), command) for path, command in commands())
    assert found.keys() == {
        "", "train", "warmup", "plan", "eval", "sample", "compress", "decompress", "serve", "watch",
        "report", "runs", "pack", "inspect", "export", "import", "recipes", "doctor",
        "data", "data prepare", "data info", "data fetch",
        "study", "study run", "study add", "study show", "study list", "study search", "study work",
    }  # fmt: skip
    for name, command in found.items():
        answer = call(*name.split(), "--help")
        assert answer.code == 0
        assert answer.err == ""
        assert "Usage: parbank" in answer.out
        assert "\x1b" not in answer.out
        assert (command.help or "").strip(), name
        for parameter in command.params:
            told = getattr(parameter, "help", None)
            assert told, f"{name} {parameter.name} has no help"
            assert Text.from_markup(told).plain == told.replace("\\[", "["), (
                "a bracket is taken for markup, and vanishes"
            )


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


def commands() -> Iterator[tuple[list[str], Any]]:
    def below(path: list[str], command: Any) -> Iterator[tuple[list[str], Any]]:
        yield path, command
        for name, child in getattr(command, "commands", {}).items():
            yield from below([*path, name], child)

    return below([], typer.main.get_command(cli.app))


def test_every_example_is_a_command_that_parses(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that were renamed, or are spelled wrongly in the help, end here."""
    found = {" ".join(path): command for path, command in commands()}
    monkeypatch.setenv("COLUMNS", "200")
    seen = set()
    for name, command in found.items():
        for line in (command.help or "").splitlines():
            words = (
                shlex.split(line.split(" > ")[0], comments=False)
                if "parbank " in line and "Examples" not in line
                else []
            )
            if not words or words[0] not in ("parbank", "torchrun"):
                continue
            arguments = words[words.index("parbank") + 1 :]
            asked = " ".join(arguments[:2]) if arguments[0] in ("data", "study") else arguments[0]
            found[asked].make_context(asked, arguments[len(asked.split()) :])
            seen.add(asked if asked == name else "")
            assert f"\n   {line.strip()}" in call(*name.split(), "--help").out, (
                "an example is indented, on a line of its own"
            )
    groups = {"", "data", "study"}
    assert seen - groups == found.keys() - groups, "every command shows an example of itself"


def test_help_lists_the_methods_and_adapters_that_are_registered(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are read from the source, so that help need not import them: they must be those of the tables."""
    from parbank.eval.adaptation import ADAPTERS
    from parbank.eval.methods import METHODS

    monkeypatch.setenv("COLUMNS", "4000")
    for folder, table in (("eval/methods", METHODS), ("eval/adaptation", ADAPTERS)):
        told = describe_registered(folder)
        assert told == "\n\n".join(f"{name}: {table[name].help}." for name in sorted(table))
        shown = " ".join(call("eval", "--help").out.split())
        assert all(line in shown for line in told.split("\n\n"))
