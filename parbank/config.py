"""Helpers for every config dataclass: to and from plain dicts, `a.b=value` overrides, and the docstrings of fields.

Configs are frozen keyword-only dataclasses, each beside its owner. Nothing here depends on a particular one.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from parbank.errors import ConfigError

C = TypeVar("C")
T = TypeVar("T")


def to_dict(config: Any) -> dict[str, Any]:
    """The config as nested dicts, lists and scalars, as in config.json and artifacts."""
    return dataclasses.asdict(config)


def from_dict(cls: type[C], values: dict[str, Any], *, path: str = "") -> C:
    """Builds `cls` from nested dicts. An unknown, missing or ill-typed field is an error that names its full path."""
    if not isinstance(values, dict):
        raise ConfigError(f"{path or cls.__name__} must be a table of fields, got {values!r}")
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    names = [field.name for field in fields]
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise ConfigError(f"{_join(path, unknown[0])} is not a setting; {path or cls.__name__} has: {', '.join(names)}")
    needed = [f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    if missing := sorted(set(needed) - set(values)):
        raise ConfigError(f"{_join(path, missing[0])} is missing; {path or cls.__name__} needs: {', '.join(needed)}")
    return cls(**{name: _convert_field(cls, name, hints[name], value, path) for name, value in values.items()})


def override(config: C, *assignments: str) -> C:
    """Returns a copy with each `a.b=value` applied. A value is JSON if it parses as JSON, else a plain string.

    All assignments are applied before the result is checked, so two settings that depend on each other may be set in
    any order.
    """
    values = to_dict(config)
    for assignment in assignments:
        key, sign, text = assignment.partition("=")
        key = key.strip()
        if not sign or not key:
            raise ConfigError(f"cannot read the setting {assignment!r}; write it as a.b=value, e.g. model.layers=6")
        *parents, last = key.split(".")
        table: Any = values
        for depth, name in enumerate(parents):
            if not isinstance(table.get(name), dict):
                _raise_unknown(config, ".".join(parents[: depth + 1]))
            table = table[name]
        if last not in table:
            _raise_unknown(config, key)
        if isinstance(table[last], dict):
            raise ConfigError(
                f"{key} is a group of settings: set one of {', '.join(f'{key}.{n}' for n in table[last])}"
            )
        table[last] = parse_value(text)
    return from_dict(type(config), values)


def walk(config: Any, *, path: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yields (dotted path, value, docstring) for every leaf setting, in the order of declaration."""
    docs = field_docs(type(config))  # type: ignore[arg-type]  # a class is hashable
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from walk(value, path=_join(path, field.name))
        else:
            table = field.metadata.get("table")
            choices = f" There are: {', '.join(table)}." if table is not None else ""
            yield _join(path, field.name), value, docs.get(field.name, "") + choices


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring written under each field. Python drops them at run time, so they are read from the source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except OSError:  # no source available (a frozen build): docstrings are optional
        return {}
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    docs = {}
    for statement, following in itertools.pairwise(body):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def named(table: Mapping[str, Any], default: Any) -> Any:
    """A field whose value is a name of a table, or several names. `walk` lists the names that the table has when it is
    called."""
    return dataclasses.field(default=default, metadata={"table": table})


def require(condition: bool, message: str) -> None:
    """Raises ConfigError(message) unless the condition holds: one line per check in `__post_init__`."""
    if not condition:
        raise ConfigError(message)


def choose(table: Mapping[str, T], name: str, setting: str) -> T:
    """The entry of a table under a name. An unknown name is an error that lists the choices."""
    if not isinstance(name, str) or name not in table:
        near = difflib.get_close_matches(str(name), table, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{setting} must be one of {', '.join(table)}, got {name!r}{hint}")
    return table[name]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def parse_json(text: str | bytes) -> Any:
    """`json.loads` of a file that may be damaged. JSON that nests too deeply raises a ValueError, too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_value(text: str) -> Any:
    """The value of an assignment's text: JSON if it parses as JSON, else the text itself."""
    try:
        return parse_json(text.replace("_", "") if text.replace("_", "").isdigit() else text)
    except json.JSONDecodeError:
        lowered = text.strip().lower()
        return {"none": None, "true": True, "false": False}.get(lowered, text)
    except ValueError as error:  # too many brackets or digits
        raise ConfigError(f"a value of {len(text):,} characters cannot be read: {error}; give a shorter one") from None


def _raise_unknown(config: Any, key: str) -> typing.NoReturn:
    paths = [path for path, _, _ in walk(config)]
    leaf = key.rsplit(".", 1)[-1]
    near = [p for p in paths if p.rsplit(".", 1)[-1] == leaf] or difflib.get_close_matches(key, paths, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else "`parbank recipes NAME` prints every setting"
    raise ConfigError(f"{key} is not a setting; {hint}")


def _convert_field(cls: type, name: str, hint: Any, value: Any, path: str) -> Any:
    """`_convert`, whose error also has the field's docstring: it says which form a value has."""
    try:
        return _convert(hint, value, _join(path, name))
    except ConfigError as error:
        about = "" if dataclasses.is_dataclass(hint) else field_docs(cls).get(name)
        raise ConfigError(f"{error}. What it is: {about}") if about else error from None


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        for option in options:
            if option is not type(None):
                try:
                    return _convert(option, value, path)
                except ConfigError:
                    continue
        raise ConfigError(f"{path} must be {_describe(hint)}, got {value!r}")
    if dataclasses.is_dataclass(hint):
        return value if isinstance(value, hint) else from_dict(hint, value, path=path)  # type: ignore[arg-type]
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{path} must be a list, got {value!r}; write it as {path}=[...]")
        kinds = typing.get_args(hint)
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(value)
        if len(kinds) != len(value):
            raise ConfigError(f"{path} must be a list of {len(kinds)}, got {value!r}")
        return tuple(_convert(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value)))
    if origin is typing.Literal:
        if value is None:
            value = "none"  # `--set a.b=none` is parsed as None, and some settings have a choice of that name
        if value in typing.get_args(hint):
            return value
        raise ConfigError(f"{path} must be {_describe(hint)}, got {value!r}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > sys.float_info.max:
            raise ConfigError(f"{path} must be at most {sys.float_info.max:.1e}, got {value!r:.20}...")
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, hint) and not (hint in (int, float) and isinstance(value, bool)):
        return value
    digits = "; write the digits alone, such as 200_000" if hint is int and isinstance(value, str) else ""
    raise ConfigError(f"{path} must be {_describe(hint)}, got {value!r}{digits}")


def _describe(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(a) for a in typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(a) for a in typing.get_args(hint))
    if origin is tuple:
        return f"a list (each {_describe(typing.get_args(hint)[0])})"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "none"}
    return names.get(hint, str(hint))
