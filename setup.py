"""The one thing pyproject.toml cannot say: the README for a package index, where relative links lead nowhere.

A relative link becomes its text with the path beside it; a picture goes. Both are in the source distribution.
"""

import re
from pathlib import Path

from setuptools import setup

ELSEWHERE = r"(?!https?:|mailto:|#)"  # of a target: not on the web and not on the page


def prepare_readme(text: str) -> str:
    """The README without relative links."""
    text = re.sub(rf"!\[[^\]]*\]\({ELSEWHERE}[^)]+\)\n*", "", text)
    text = re.sub(rf"\[([^\]]+)\]\({ELSEWHERE}\1\)", r"\1", text)
    return re.sub(rf"\[([^\]]+)\]\({ELSEWHERE}([^)]+)\)", r"\1 (\2)", text)


if __name__ == "__main__":  # which it is for a build, and is not for a test
    setup(
        long_description=prepare_readme(Path("README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )
