"""A measured figure in README, guide or design is a link to its result. Other figures are constants, and listed here."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import FENCE, ROOT, name

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("guide/*.md")), *sorted((ROOT / "docs").glob("design/*.md"))]
NUMBER = r"(?<![\w.,/#=^-])\d+(?:[.,]\d+)*"
FIGURE = re.compile(
    rf"{NUMBER} ?(?:%|(?:ms|µs|s|seconds|tokens/s|[kMG]B/s|TFLOP/s|W|MHz|joules|times|bits per byte)\b)"
    r"|(?<![\w.,/#=^-])\d\.\d{3,}\b"  # a score
)
BLOCKS = re.compile(r"<!-- claims:.*?<!-- /claims -->", flags=re.DOTALL)
MEASURED = re.compile(r"\[[^\]]*\]\[[\w.]+\]")
CODE = re.compile(r"`[^`]*`")

CONSTANTS: dict[str, dict[str, str]] = {
    "README.md": {"1%": "the clock's promise, tests/training"},
    "docs/design/adaptation.md": {"0.002 bits per byte": "the allowance of eval/methods/adaptive.py"},
    "docs/design/communication.md": {
        "371 GB/s": "the model's input, with its source",
        "47 GB/s": "the model's input, with its source",
        "11.25 GB/s": "the model's input, assumed",
        "20 µs": "the model's input, assumed",
        "5%": "the share that the token counts are computed for",
        "2 µs": "a launch, assumed",
        "0.5 ms": "66 * 4 * 2 µs",
    },
    "docs/design/compressor.md": {"0.0001": "log2 of 1 + 1024 / 2^24"},
    "docs/design/data.md": {"2%": "the share that validates", "99.5%": "a setting of the tokenizer"},
    "docs/design/faults.md": {"1 s": "a limit of the benchmark", "60 s": "a limit of the benchmark"},
    "docs/design/ops.md": {"0.1%": "a tolerance of the tests", "0.2%": "a tolerance of the tests"},
    "docs/design/optimizer.md": {"10%": "a limit, tests/optim/test_optim_memory.py"},
    "docs/design/performance.md": {"700 W": "the card's limit"},
    "docs/design/plan.md": {
        "94%": "tests/plan/test_plan_laws.py",
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
    "docs/guide/study.md": {"30 s": "the setting above it"},
}
"""Page -> figure -> why it is not a measurement."""


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
