"""Pages that mkdocs builds from other files: README, REFERENCES and their like, the command line, and all settings.

Links in Markdown point to files of the repository, so that they work where the repository is read. Here each link is rewritten to
the page of the site that shows the file. Results and other files outside docs/ are copied into the site under files/.
"""

import json
import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "REFERENCES.md": "references.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
# Inline links, ](target) and ](target#anchor), and the targets of reference links, [name]: target at the start of a line.
LINK = re.compile(r"(\]\(|^\[[^\]\n]+\]: )(?![a-z]+:|#)([^)#\s]+)", flags=re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "reference/cli.md", content=command_line()))
    files.append(File.generated(config, "reference/settings.md", content=settings()))
    for page in [file for file in files if file.is_documentation_page()]:
        for _, target in LINK.findall(page.content_string):
            linked = repository_path(source_of(page.src_uri), target)
            if (ROOT / linked).is_file() and site_path(linked).startswith("files/"):
                copy = site_path(linked)
                if files.get_file_from_path(copy) is None:
                    files.append(File.generated(config, copy, abs_src_path=str(ROOT / linked)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = page.file.src_uri

    def rewrite(match: re.Match[str]) -> str:
        linked = repository_path(source_of(here), match[2])
        return match[1] + posixpath.relpath(site_path(linked), posixpath.dirname(here) or ".")

    return markdown if here.startswith("files/") else LINK.sub(rewrite, markdown)


def source_of(page: str) -> str:
    """The file of the repository that a page of the site shows."""
    return next((source for source, shown in PAGES.items() if shown == page), f"docs/{page}")


def site_path(source: str) -> str:
    """Where the site shows a file of the repository."""
    return PAGES.get(source) or (source.removeprefix("docs/") if source.startswith("docs/") else f"files/{source}")


def repository_path(source: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def command_line() -> str:
    """typer's own description of all commands, with examples as code."""
    command = [sys.executable, "-m", "typer", "parbank.cli.main", "utils", "docs", "--name", "parbank"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    text = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment).stdout
    text = re.sub(r"^  (?=\S)", "    ", text, flags=re.MULTILINE)  # two spaces are no code to Markdown
    text = re.sub(r'<span style="font-weight: bold">(.*?)</span>', r"`\1`", text)
    text = re.sub(r"^\* `--help`.*\n", "", text, flags=re.MULTILINE)
    return text.replace("# `parbank`", "# Command line", 1)


def settings() -> str:
    """Every setting of a run, with its value in the recipe golf."""
    from parbank.config import walk
    from parbank.recipes import get_recipe

    rows = [
        f"| `{path}` | `{json.dumps(value)}` | {' '.join(doc.split())} |".replace("||", "\\|\\|")
        for path, value, doc in walk(get_recipe("golf"))
    ]
    head = "# Settings\n\nEvery setting, with its value in the recipe `golf`. Change one with `--set model.layers=6`.\n"
    return "\n".join([head, "| setting | golf | |", "| --- | --- | --- |", *rows, ""])
