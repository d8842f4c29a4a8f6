"""Text into token shards: prepare, look at, fetch."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from parbank.cli.terminal import print_tree
from parbank.errors import ConfigError


def prepare(
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT...", help="Files, folders or globs; or train=... and val=...")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the shards, the tokenizer and the manifest.")],
    vocab: Annotated[int, typer.Option(help="Tokens in the vocabulary.")] = 1024,
) -> None:
    """Train a tokenizer on text and write token shards. Train on them with --data shards:DIR.

    About 2% of the documents, chosen by a hash of their content, become validation, unless val=PATH says which.
    """
    from parbank.data.dataset import describe
    from parbank.data.prepare import prepare_text

    prepare_text(inputs, out, vocab_size=vocab)
    print_tree(describe(out))


def info(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of token shards.")]) -> None:
    """Check every shard of a folder and say what is in it."""
    from parbank.data.dataset import describe

    print_tree(describe(folder))


def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="fineweb: the published shards with 1024 tokens.")],
    shards: Annotated[int, typer.Option(help="Training shards to fetch, 100 million tokens each.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Where to; the cache if not given, where --data fineweb finds it.")
    ] = None,
    source: Annotated[str | None, typer.Option(help="A hub repository or a local folder laid out like it.")] = None,
) -> None:
    """Fetch a published data set. What is there and whole is not fetched again."""
    from parbank.data.sources.fineweb import REPOSITORY, fetch_fineweb, fineweb_folder
    from parbank.files import default_cache

    if name != "fineweb":
        raise ConfigError(f"there is no published data set {name!r} here; there is: fineweb")
    usual = fineweb_folder(default_cache())
    folder = out or usual
    files = fetch_fineweb(folder, shards=shards, source=source or REPOSITORY)
    for file in files:
        print(f"{file.stat().st_size:>13,} bytes  {file.name}")
    use = "fineweb" if folder == usual else f"shards:{folder}"
    print(f"{len(files)} files in {folder}; train on them with --data {shlex.quote(use)}")


COMMANDS = {"data prepare": prepare, "data info": info, "data fetch": fetch}
