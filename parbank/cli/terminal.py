"""What commands share: options they have in common, and how they print."""

import re
from typing import Annotated, Any

import typer

from parbank.data.sources import describe_sources

DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DATA_HELP = f"{describe_sources()}. Commas separate paths: reach a path that has one by a glob, with ? for the comma."


def print_pairs(pairs: dict[str, Any]) -> None:
    width = max(map(len, pairs))
    for key, value in pairs.items():
        print(f"{key:{width}}  {value}")


def print_tree(values: dict[str, Any]) -> None:
    """Nested values one a line: train.tokens  1234."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update({f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value})
    shown = {int: "{:,}", float: "{:.3f}"}
    print_pairs({k: shown.get(type(v), "{}").format(v) for k, v in flat.items()})


def printable(text: str) -> str:
    """Control characters as the signs Unicode has for them: a model's text must not move the cursor or ring the bell."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: _picture(ord(found[0])), text)


def _picture(code: int) -> str:
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"
