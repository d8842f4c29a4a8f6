"""Token shards: make them of text, check them, fetch published ones."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from parbank.cli.terminal import (
    FieldOption,
    GlobOption,
    SkipBadOption,
    print_next,
    print_tree,
)
from parbank.data.sources import read_options
from parbank.errors import ConfigError


def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT...", help="Files, folders or globs; or train=PATH and val=PATH; or a data spec."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the shards, the tokenizer and the manifest.")],
    vocab: Annotated[int, typer.Option(help="Tokens in the vocabulary.")] = 1024,
    case_operators: Annotated[
        bool, typer.Option("--case-operators", help="Write capitals as operators before small letters.")
    ] = False,
    glob: GlobOption = None,
    field: FieldOption = None,
    skip_bad: SkipBadOption = False,
) -> None:
    """Train a tokenizer on text and write token shards. Train on them with --data shards:DIR.

    About 2% of the documents, chosen by a hash of their content, become validation, unless val=PATH says which.

    Examples:

      parbank data prepare my_folder --out shards

      parbank data prepare my_folder notes.txt --glob '*.md' --skip-bad --out shards --vocab 4096

      parbank data prepare train=books val=held_out.txt --out shards

      parbank data prepare parquet:rows.parquet --field content --out shards
    """
    from parbank.data.dataset import describe
    from parbank.data.prepare import prepare_text
    from parbank.data.tokenizer import TokenizerConfig

    options = read_options(glob, field, skip_bad)
    tokenizer = TokenizerConfig(case_operators=case_operators)
    prepare_text(inputs, out, options=options, vocab_size=vocab, tokenizer=tokenizer)
    print_tree(describe(out))
    _print_training(f"shards:{out}", vocab, tokenizer.changes)


def _print_training(spec: str, vocab: int, tokenizer: dict[str, Any] | None = None) -> None:
    """Prints the command that trains on the shards, with their tokenizer."""
    from parbank.recipes import get_recipe

    fits = get_recipe("demo").model.vocab_size == vocab
    changes = [] if fits else [f"model.vocab_size={vocab}"]
    changes += [f"tokenizer.{name}={json.dumps(value)}" for name, value in (tokenizer or {}).items()]
    print_next(("parbank", "train", "--data", spec, *(word for change in changes for word in ("--set", change))))


def info(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of token shards.")]) -> None:
    """Check every shard of a folder and describe it.

    Every token is counted, and the shards are compared with the manifest that was written with them.

    Example:

      parbank data info shards
    """
    from parbank.data.dataset import describe

    print_tree(describe(folder))


def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="fineweb: the published shards with 1024 tokens.")],
    shards: Annotated[int, typer.Option(help="Training shards to fetch, 100 million tokens each.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Where to; the cache if not given, where --data fineweb finds it.")
    ] = None,
    source: Annotated[str | None, typer.Option(help="A hub repository or a local folder laid out like it.")] = None,
    revision: Annotated[
        str, typer.Option(help="A commit of the repository; by default that of the files in the folder, or the newest.")
    ] = "",
) -> None:
    """Fetch a published data set.

    Complete files are not fetched again; an interrupted download continues. fetched.json in the folder keeps the revision
    and the sha256 of every file: a later fetch gets the same files, or an error.

    Examples:

      parbank data fetch fineweb --shards 10

      parbank data fetch fineweb --source /mnt/mirror --out shards
    """
    from parbank.data.sources.fineweb import REPOSITORY, fetch_fineweb, fineweb_folder
    from parbank.data.tokenizer import Tokenizer
    from parbank.files import default_cache

    if name != "fineweb":
        raise ConfigError(f"there is no published data set {name!r} here; there is: fineweb")
    usual = fineweb_folder(default_cache())
    folder = out or usual
    files = fetch_fineweb(folder, shards=shards, source=source or REPOSITORY, revision=revision)
    for file in files:
        print(f"{file.stat().st_size:>13,} bytes  {file.name}")
    use = "fineweb" if folder == usual else f"shards:{folder}"
    print(f"{len(files)} files in {folder}")
    _print_training(use, Tokenizer.load(files[0]).vocab_size)


COMMANDS = {"data prepare": prepare, "data info": info, "data fetch": fetch}
