"""Text and numbers for a page. Everything that parbank did not write itself passes through `shown`."""

import html
import math
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any, TypeGuard

# Characters that a browser hides, or that reorder the text around them: they are shown by their code. Joiners (U+200C and
# U+200D) stay: Persian words, Indian scripts and emoji need them.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_FOLDERS = re.compile("(?<=[:=])[^,:=]*/(?=[^,/])")
_JOINTS = re.compile(r"(?<=[^\W_])[-._/](?=[^\W_])")
MOST = 1e100  # far above any number of a run, and its square is still a float
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def escape(text: Any) -> str:
    """For HTML, in text and in attributes. Hidden characters appear by their code, such as \\u202e."""
    return html.escape(_HIDDEN.sub(_code, str(text)))


def shown(text: Any, *, breaks: bool = False) -> str:
    """Foreign text as an element of its own: its direction of writing does not reach the text around it. `breaks`: a narrow
    column may break a name such as blocks.0.attention_gain between its parts."""
    escaped = html.escape(str(text))
    escaped = _JOINTS.sub(r"\g<0><wbr>", escaped) if breaks else escaped
    marked = _HIDDEN.sub(lambda found: f'<span class="hidden-sign">{_code(found)}</span>', escaped)
    return f"<bdi>{marked}</bdi>"


def _code(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


def is_number(value: Any) -> TypeGuard[float]:
    """Finite, and no integer beyond the range of floats, which JSON may hold and no format can write."""
    if type(value) is float:  # a page asks this some million times
        return math.isfinite(value)
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MOST


def number(value: Any, digits: int = 4) -> str:
    """With a fixed number of decimals; a dash where there is no number."""
    return f"{value:,.{digits}f}" if is_number(value) else "–"


def count(value: Any) -> str:
    return f"{value:,.0f}" if is_number(value) else "–"


def short_spec(spec: Any) -> str:
    """A data spec with the names of files alone. The settings of a page have their folders."""
    return _FOLDERS.sub("", str(spec))


def signed(value: Any, digits: int = 4) -> str:
    """A difference. The minus is the typographic one, as wide as the plus."""
    return f"{value:+,.{digits}f}".replace("-", "−") if is_number(value) else "–"


def short(value: float) -> str:
    """With a prefix, for axes and tiles: 1.51M. The prefix is that of the rounded number: 999,700 is 1M."""
    rounded = abs(float(f"{value:.3g}"))
    if 1000 <= rounded < 10_000:
        return f"{value:,.0f}"
    for size, prefix in _PREFIXES:
        if size <= rounded < 1000 * size:
            return f"{value / size:.3g}{prefix}"
    return f"{value:.3g}"


def size(value: Any) -> str:
    """Bytes, in decimal units like the caps."""
    if not is_number(value):
        return "–"
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= unit:
            return f"{value / unit:.2f} {name}"
    return f"{value:.0f} bytes"


def duration(seconds: Any) -> str:
    if not is_number(seconds):
        return "–"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def share(part: Any, whole: Any, digits: int = 1) -> str:
    return f"{100 * part / whole:.{digits}f}%" if is_number(part) and is_number(whole) and whole else "–"


def date(stamp: Any) -> str:
    """An ISO time without its seconds and its zone, which is UTC."""
    try:
        return f"{datetime.fromisoformat(str(stamp)):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return "–"


def listed(items: Iterable[str]) -> str:
    """a, b and c."""
    *rest, last = list(items) or ["nothing"]
    return f"{', '.join(rest)} and {last}" if rest else last
