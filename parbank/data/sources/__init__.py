"""The sources of text, one file per kind. A data spec is `KIND:REST`, such as text:my_folder.

A new kind is a new file with a SOURCE, and a line in SOURCES. Help, errors, training, scoring and `doctor` read this
table.
"""

import difflib
import os
from collections.abc import Iterable

from parbank.data.sources import fineweb, parquet, shards, stdlib, text
from parbank.data.sources.source import ParsedSpec, Source
from parbank.errors import ConfigError

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        stdlib.SOURCE,
        text.SOURCE,
        parquet.SOURCE,
        shards.SOURCE,
        fineweb.SOURCE,
    )
}


def find_source(spec: str) -> Source:
    source = SOURCES.get(spec.partition(":")[0])
    if source is None:
        forms = "; ".join(source.form for source in SOURCES.values())
        raise ConfigError(f"unknown data {spec!r}; use {forms}{_suggest(spec)}")
    return source


def _suggest(spec: str) -> str:
    kind, colon, rest = spec.partition(":")
    near = difflib.get_close_matches(kind, SOURCES, n=1)
    if os.path.exists(os.path.expanduser(spec)):
        return f"; did you mean text:{spec}?"
    return f"; did you mean {near[0]}{colon}{rest}?" if near else ""


def parse_spec(spec: str) -> ParsedSpec:
    """The request of a spec. Reads nothing from disk."""
    return find_source(spec).parse(spec.partition(":")[2])


def is_spec(text: str) -> bool:
    """Whether a string is a data spec: a kind and a colon, or a kind that needs no more."""
    kind, colon, _ = text.partition(":")
    return kind in SOURCES and (bool(colon) or SOURCES[kind].public)


def absolute_spec(spec: str) -> str:
    """The same spec with absolute paths, so that a run folder does not depend on the current folder."""
    return parse_spec(spec).spec


def remembered_spec(spec: str) -> str:
    """A spec as a run folder stores it. Before every text spec had `glob=`, a folder gave fewer files."""
    if spec.startswith("text:") and ",glob=" not in spec:
        return ",".join([spec, *(f"glob={pattern}" for pattern in text.KIND.earlier_globs)])
    return spec


def is_public(spec: str) -> bool:
    """Whether a spec names the same text on any machine, so that an artifact may store it."""
    return spec.partition(":")[0] in {source.name for source in SOURCES.values() if source.public}


def add_options(spec: str, options: Iterable[str]) -> str:
    """The spec with options such as `glob=*.md` as parts of it, so that the spec alone identifies the text."""
    source = find_source(spec)
    for option in options:
        name = option.partition("=")[0]
        if name not in source.options:
            takers = " or ".join(f"{other.name}:PATH" for other in SOURCES.values() if name in other.options)
            raise ConfigError(f"--{name} is not for --data {spec}; it goes with {takers}")
        if "," in option:
            raise ConfigError(
                f"--{name} {option.partition('=')[2]!r} has a comma, which separates the parts of a data spec"
            )
    return ",".join([spec, *options])


def read_options(glob: Iterable[str] | None = None, field: str | None = None, skip_bad: bool = False) -> list[str]:
    """--glob, --field and --skip-bad as parts of a data spec."""
    given = [f"glob={pattern}" for pattern in glob or ()]
    given += [f"field={field}"] if field is not None else []
    return given + (["skip-bad=yes"] if skip_bad else [])


def read_data(data: str | None, glob: Iterable[str] | None, field: str | None, skip_bad: bool) -> str | None:
    """The data spec with its options as parts of it, so that a run folder identifies the text."""
    options = read_options(glob, field, skip_bad)
    if not options:
        return data
    if data is None:
        names = ", ".join(dict.fromkeys("--" + option.partition("=")[0] for option in options))
        raise ConfigError(f"{names} without --data; say which text it is for, such as --data text:my_folder")
    return add_options(data, options)


def describe_sources() -> list[str]:
    """For `--help`: every kind of text, its form and its meaning."""
    return [f"{source.form}: {source.help}." for source in SOURCES.values()]
