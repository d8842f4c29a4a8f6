"""The skeleton of a page: head, style, sections and tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from parbank import __version__
from parbank.report.text import escape, shown

GENERATOR = '<meta name="generator" content="parbank '  # and the version: `report` replaces only files that have it


@dataclass(frozen=True)
class Section:
    """A part of a page. An empty one is left out."""

    title: str
    body: str
    note: str = ""


def page(title: str, head: str, sections: Iterable[Section]) -> str:
    """One HTML file. Everything in it is inline, and the policy forbids any request."""
    kept = [section for section in sections if section.body]
    anchors = {section.title: _anchor(section.title) for section in kept}
    links = "".join(f'<li><a href="#{anchors[s.title]}">{escape(s.title)}</a></li>' for s in kept)
    body = "".join(_section(s, anchors[s.title]) for s in kept)
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'{GENERATOR}{escape(__version__)}">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{asset("page.css")}</style></head>\n'
        f'<body><a class="skip" href="#main">To the content</a><header>{head}</header>\n'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n<main id="main">{body}</main>\n'
        f"<footer>Made by parbank {escape(__version__)}. This file needs no network.</footer>"
        f"<script>{asset('page.js')}</script></body></html>\n"
    )


@cache
def asset(name: str) -> str:
    """A file that lies beside this module."""
    return (files("parbank.report") / name).read_text(encoding="utf-8")


def _section(section: Section, anchor: str) -> str:
    note = f'<p class="note">{section.note}</p>' if section.note else ""
    return f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{escape(section.title)}</h2>{note}{section.body}</section>\n'


def _anchor(title: str) -> str:
    return "".join(sign if sign.isalnum() else "-" for sign in title.lower())


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, label: str, numeric: Iterable[int] = ()) -> str:
    """Cells are HTML: pass foreign text through `shown`. The first column heads its row. A wide table scrolls by itself, so
    that the page does not. A column whose name has a leading dot has a heading for screen readers only; a long
    name, such as that of a run, may break between its parts."""
    right = set(numeric)
    heads = "".join(f'<th scope="col"{_numeric(n in right)}>{_heading(name)}</th>' for n, name in enumerate(columns))
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{cell}</th>' if n == 0 else f"<td{_numeric(n in right)}>{cell}</td>"
            for n, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" role="group" aria-label="{escape(label)}" tabindex="0">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _heading(name: str) -> str:
    return (
        f'<span class="aside">{escape(name[1:])}</span>' if name.startswith(".") else shown(name, breaks=len(name) > 20)
    )


def _numeric(is_number: bool) -> str:
    return ' class="n"' if is_number else ""


def tiles(items: Iterable[tuple[str, str, str]]) -> str:
    """(name, value, remark): the numbers that a reader looks for first."""
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{value}{f'<small>{remark}</small>' if remark else ''}</dd></div>"
        for name, value, remark in items
    )
    return f'<dl class="tiles">{cells}</dl>'


def grid(*figures: str) -> str:
    found = "".join(figures)
    return f'<div class="grid-of">{found}</div>' if found else ""


def missing(text: str, why: str = "Not recorded. ") -> str:
    """Says that a part of the page has nothing to show."""
    return f'<p class="missing"><b>{escape(why)}</b>{escape(text)}</p>'
