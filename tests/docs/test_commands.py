"""Every command in README and docs is one that parbank understands: its name, its options and their values."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from parbank.cli import main as cli
from tests.docs.pages import FENCE, find_pages, name


def find_commands(page: Path) -> Iterator[list[str]]:
    """The arguments of each line that calls parbank, by its name or by `-m parbank`."""
    for block in FENCE.finditer(page.read_text()):
        if block["info"]:
            continue
        for line in block["code"].replace("\\\n", " ").splitlines():
            if re.match(r"(parbank|torchrun) ", line):
                words = shlex.split(line, comments=True)
                yield words[words.index("parbank") + 1 :]


@pytest.mark.parametrize("page", [page for page in find_pages() if any(find_commands(page))], ids=name)
def test_commands_parse(page: Path) -> None:
    for arguments in find_commands(page):
        _parse(arguments)


def _parse(arguments: list[str]) -> None:
    command: Any = typer.main.get_command(cli.app)
    while arguments and arguments[0] in getattr(command, "commands", {}):
        command, arguments = command.commands[arguments[0]], arguments[1:]
    assert not hasattr(command, "commands"), f"no command parbank {shlex.join(arguments)}"
    command.make_context(command.name, list(arguments))


def test_a_wrong_option_is_found() -> None:
    _parse(["train", "--recipe", "demo"])
    for wrong in (["train", "--recipes", "demo"], ["trian"], ["data", "prepare"]):
        with pytest.raises((Exception, SystemExit)):  # typer's own errors, by version
            _parse(wrong)


def test_commands_are_found() -> None:
    found = [command for page in find_pages() for command in find_commands(page)]
    assert len(found) > 20
    assert {command[0] for command in found} >= {
        "train",
        "eval",
        "sample",
        "pack",
        "data",
        "warmup",
        "doctor",
        "inspect",
    }
    assert not [command for command in found if re.search(r"/work|/root", " ".join(command))]
