"""A measured figure in README, guide, design or reference is a link to its result, and one in the package's comments and
docstrings names its source. Other figures are constants, and listed here."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import FENCE, ROOT, name

FOLDERS = ("guide", "design", "reference")
TABLES = {"levers.md", "compatibility.md"}  # a test of their own holds them to their data
MANUAL = [page for folder in FOLDERS for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
PAGES = [ROOT / "README.md", *(page for page in MANUAL if page.name not in TABLES)]
NUMBER = r"(?<![\w.,/#=^-])\d+(?:[.,]\d+)*"
FIGURE = re.compile(
    rf"{NUMBER}[kM]? ?(?:%|(?:ms|µs|s|seconds|tokens/s|[kMG]B/s|[GT]FLOP/s|W|MHz|joules|times|bits per byte)\b)"
    r"|(?<![\w.,/#=^-])\d\.\d{3,}\b"  # a score
)
BLOCKS = re.compile(r"<!-- claims:.*?<!-- /claims -->", flags=re.DOTALL)
MEASURED = re.compile(r"\[[^\]]*\]\[[\w.]+\]")
CODE = re.compile(r"`[^`]*`")
IN_CODE = re.compile(
    rf"{NUMBER}(?:[kM]? (?:ms|µs|us|s|seconds|tokens/s|[kMG]B/s|[GT]FLOP/s)\b"
    r"|(?:%| times) (?:of the time|(?:as |too )?(?:\w+er|worse|less|more|fast|long|high|accurate|exact)\b))"
    r"|(?<![\w.,/#=^-])\d\.\d{3,}\b"
)
SOURCE = re.compile(r"docs/log/\w+\.md|benchmarks/|#\d{2,4}\b|autoresearch|\b(?:19|20)\d\d\b")
"""A page of the log, a result or a benchmark, a public pull request, a paper by its year."""

CONSTANTS: dict[str, dict[str, str]] = {
    "README.md": {"1%": "the clock's promise, tests/training"},
    "docs/design/adaptation.md": {"0.002 bits per byte": "the allowance of eval/methods/adaptive.py"},
    "docs/design/communication.md": {
        "371 GB/s": "the model's input, with its source",
        "47 GB/s": "the model's input, with its source",
        "11.25 GB/s": "the model's input, assumed",
        "20 µs": "the model's input, assumed",
        "5%": "the share that the token counts are computed for",
    },
    "docs/design/compressor.md": {"0.0001": "log2 of 1 + 1024 / 2^24"},
    "docs/design/data.md": {"2%": "the share that validates", "99.5%": "a setting of the tokenizer"},
    "docs/design/faults.md": {
        "1 s": "a limit of the benchmark",
        "60 s": "a limit of the benchmark",
        "2 s": "a limit, tests/faults/test_small_files.py",
    },
    "docs/design/ops.md": {"0.1%": "a tolerance of the tests", "0.2%": "a tolerance of the tests"},
    "docs/design/optimizer.md": {"10%": "a limit, tests/optim/test_optim_footprint.py"},
    "docs/design/performance.md": {"700 W": "the card's limit"},
    "docs/design/plan.md": {
        "0.02 bits per byte": "UNTRIED of plan/candidates.py",
        "80%": "the share of memory that a micro-batch may fill",
        "40%": "SHORT_SHARE of plan/choose.py",
    },
    "docs/design/promises.md": {
        "2%": "the share that validates",
        "0.001": "the tolerance of eval/audit.py",
    },
    "docs/design/ranks.md": {"60 s": "a limit", "2 s": "the beat of watch.py"},
    "docs/design/study.md": {
        "5%": "the level of the verdict",
        "80%": "the power of the study",
        "99%": "the level of benchmarks/study_noise.py",
        "60 seconds": "a limit of queue.py",
    },
    "docs/design/training.md": {"1%": "the clock's promise, tests/training"},
    "docs/guide/muon.md": {"1%": "tests/optim/test_optim_parallel_muon.py", "5 seconds": "a limit of agreement.py"},
    "docs/guide/own-text.md": {"2%": "the share that validates"},
    "docs/guide/pages.md": {
        "95%": "the level of an interval",
        "30 seconds": "the setting above it",
        "20 seconds": "a setting of the recipe",
    },
    "docs/guide/playground.md": {"5%": "a limit of serve/watch.py"},
    "docs/reference/artifact.md": {"32 times": "a limit of the format"},
    "docs/reference/measurements.md": {
        "120 seconds": "the training clock",
        "5%": "the level of the verdict",
        "80%": "the power of the study",
    },
}
"""Page -> figure -> why it is not a measurement."""

CODE_CONSTANTS: dict[str, set[str]] = {
    "parbank/cli/eval.py": {"0.002"},  # an example of an option
    "parbank/eval/compressor/coder.py": {"0.00009"},  # computed
    "parbank/optim/coefficients.py": {"0.008", "0.139"},  # computed
    "parbank/plan/choose.py": {"0.997"},  # a setting
    "parbank/plan/fit.py": {"0.0035"},  # computed
    "parbank/quant/coders/models.py": {"0.0018"},  # computed
    "parbank/recipes.py": {"600 s", "120 s", "0.997"},  # the track and settings
    "parbank/statistics.py": {"80% power"},  # a setting
    "parbank/study/arms.py": {"600 s"},  # the track
}
"""File of the package -> figures in comments and docstrings that are no measurements."""


def find_figures(text: str) -> Iterator[str]:
    """Figures with units in prose and tables, outside code, generated blocks and links to results."""
    for part in (BLOCKS, FENCE, MEASURED, CODE):
        text = part.sub(" ", text)
    yield from (match[0] for match in FIGURE.finditer(" ".join(text.split())))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_measured_figure_is_a_link_to_its_result(page: Path) -> None:
    allowed = CONSTANTS.get(name(page), {})
    found = set(find_figures(page.read_text(encoding="utf-8")))
    assert found <= set(allowed), "name it in benchmarks/claims.toml, move it to docs/log, or say here what it is"
    assert set(allowed) <= found, "this figure is gone: take it off the list"


def test_a_bare_figure_is_found() -> None:
    text = (
        "Takes 12 ms at 1.31M and 1.2154; [3.5 ms][step.ours]; `--set a=4 ms`; 2,000 tokens/s; 3 times; 98,304 tokens."
    )
    assert list(find_figures(text)) == ["12 ms", "1.2154", "2,000 tokens/s", "3 times"]


def find_comments(text: str) -> Iterator[str]:
    """Docstrings, and comments on lines that follow each other as one."""
    comment, last = "", -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield comment
                comment = ""
            comment, last = f"{comment} {token.string.lstrip('# ')}", token.start[0]
        elif token.type == tokenize.STRING and token.string.startswith('"""'):
            yield token.string
    yield comment


def find_unsourced(text: str) -> set[str]:
    """Figures in comments and docstrings that name no source."""
    comments = [" ".join(CODE.sub(" ", comment).split()) for comment in find_comments(text)]
    return {match[0] for comment in comments if not SOURCE.search(comment) for match in IN_CODE.finditer(comment)}


def test_every_figure_in_the_package_names_its_source() -> None:
    files = sorted((ROOT / "parbank").rglob("*.py"))
    found = {name(file): figures for file in files if (figures := find_unsourced(file.read_text(encoding="utf-8")))}
    assert found == CODE_CONSTANTS, "name the page of the log, the result or the paper; or leave the number out"


def test_an_unsourced_figure_is_found() -> None:
    assert find_unsourced("# takes 3 ms\n# and is 2 times faster\nx = 1  # at 1.2345\n") == {
        "3 ms",
        "2 times faster",
        "1.2345",
    }
    assert find_unsourced("# takes 3 ms\n# (docs/log/step.md)\nx = 1  # at 1.2345 (parameter-golf #670)\n") == set()
