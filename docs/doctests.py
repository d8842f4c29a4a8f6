"""Shows the examples in docstrings as code: a griffe extension for mkdocstrings."""

import re
import textwrap
from typing import Any

from griffe import Extension, Object

# From a line with >>> to the next empty line.
EXAMPLE = re.compile(r"^( *)>>> .*?(?=\n\s*\n|\Z)", flags=re.MULTILINE | re.DOTALL)


class Doctests(Extension):
    """Puts fences around every block that begins with >>>, indented or not."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fence, obj.docstring.value)


def _fence(match: re.Match[str]) -> str:
    return f"```pycon\n{textwrap.dedent(match[0])}\n```"
