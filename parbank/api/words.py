"""Errors in the words of Python. Messages name options of the command line, such as --max-bytes; a program gives
max_bytes=."""

import functools
import re
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from parbank.errors import ParbankError

P = ParamSpec("P")
R = TypeVar("R")

_SETTING = re.compile(r"--set ([\w.]+=[^\s;,)]+)")
_FLAG = re.compile(r"--(resume|skip-bad)\b")
# A value that follows its option: a word that needs quotes (a path, a spec, a device, a dtype), or a string, a number, or a
# placeholder in capitals.
_QUOTED = r"[^\s;,)'\"]*[:/][^\s;,)]+|cpu|cuda|stdlib|fineweb|b?float\d+"
_BARE = r"'[^']*'|\d[\d_]*|[A-Z]{2,}"
_OPTION = re.compile(rf"--([a-z][a-z-]*)(?: (?:({_QUOTED})|({_BARE}))(?![\w-]))?")


def translate(message: str) -> str:
    """The message with keywords for options. Commands in backquotes stay as they are."""
    parts = message.split("`")
    parts[::2] = [_translate_part(part) for part in parts[::2]]
    return "`".join(parts)


def _translate_part(text: str) -> str:
    text = _SETTING.sub(lambda found: f'settings=["{found[1]}"]', text)
    text = _FLAG.sub(lambda found: f"{found[1].replace('-', '_')}=True", text)
    text = re.sub(r"--set\b", "settings=", text)
    return _OPTION.sub(_spell_keyword, text)


def _spell_keyword(found: re.Match[str]) -> str:
    name, quoted, bare = found.groups()
    keyword = name.removeprefix("ttt-").replace("-", "_")  # --ttt-scores is the setting `scores` of ttt
    return f"{keyword}={repr(quoted) if quoted else bare or ''}"


def in_python_words(function: Callable[P, R]) -> Callable[P, R]:
    """A public function whose errors are in the words of Python. The command line calls the function inside
    (`inspect.unwrap`)."""

    @functools.wraps(function)
    def translated(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except ParbankError as error:
            error.args = (translate(str(error)),)
            raise

    return translated


def warn(message: str, stacklevel: int) -> None:
    """A warning in the words of Python, for the caller of a public function. The level counts from that function."""
    warnings.warn(translate(message), stacklevel=stacklevel + 2)
