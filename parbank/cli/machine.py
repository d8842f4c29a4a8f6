"""Recipes and the state of this machine: `recipes` and `doctor`."""

import json
from typing import Annotated

import typer


def recipes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print this recipe's whole config.")] = None,
) -> None:
    """List the recipes, or print one with every setting and what it does.

    Examples:

      parbank recipes

      parbank recipes golf

    `parbank train --set NAME=VALUE` changes a setting.
    """
    from parbank.config import walk
    from parbank.recipes import RECIPES, get_recipe

    if name is None:
        for key, function in RECIPES.items():
            print(f"{key:8} {(function.__doc__ or '').strip().splitlines()[0]}")
        return
    for path, value, doc in walk(get_recipe(name)):
        shown = json.dumps(value)
        print(f"{path} = {shown}" + (f"    # {doc}" if doc else ""))


def doctor() -> None:
    """Check this machine: what works, what does not, and what to do.

    The exit code is 1 when something is broken.

    Example:

      parbank doctor
    """
    from parbank.cli.doctor import examine

    findings = examine()
    signs = {"ok": "ok  ", "note": "note", "bad": "BAD "}
    for finding in findings:
        print(f"{signs[finding.status]}  {finding.subject:14} {finding.found}")
        if finding.remedy:
            print(f"{'':21}-> {finding.remedy}")
    if any(finding.status == "bad" for finding in findings):
        raise typer.Exit(1)


COMMANDS = {"recipes": recipes, "doctor": doctor}
