"""The page of what works and what is refused: it has every row, and each refused one is refused by its sentence.

No attempt may hang: four ranks run all of those for several ranks within the limit below.
"""

import re

import pytest

from tests.distributed import run_distributed_test
from tests.integrations import architectures
from tests.integrations.compatibility import ON_ONE_RANK, ON_RANKS, PAGE, WORLD, find_rows, hear, hear_on_ranks

LIMIT_SECONDS = 240.0


def test_the_page_has_every_row_and_no_other() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if re.match(r"\| .*\| (works|refused.*) \|$", line)]
    assert rows == find_rows(), "python -m tests.integrations.compatibility writes the page"
    assert len(rows) >= 6 + 8
    assert architectures.count() >= 40


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_refuses_on_one_rank(name: str) -> None:
    attempt, sentence = ON_ONE_RANK[name]
    assert sentence in hear(attempt)


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    return run_distributed_test(hear_on_ranks, WORLD, timeout=LIMIT_SECONDS)


@pytest.mark.parametrize("name", ON_RANKS)
def test_refuses_on_several_ranks(said: list[dict[str, str]], name: str) -> None:
    everywhere = said[:1] if "on rank 0 alone" in name else said
    for heard in everywhere:
        assert ON_RANKS[name][1] in heard[name]
