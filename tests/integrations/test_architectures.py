"""`split_parameters` on public architectures: no errors, hidden matrices to Muon, and the table in docs is true."""

import re
from collections import Counter

import pytest

from tests.integrations.architectures import NAMES, ROOT, TIMM_NAMES, Findings, inspect, inspect_timm

PAGE = ROOT / "docs" / "reference" / "compatibility.md"

NO_MATRICES = ("embed", "router", "gate", "classifier", "head", "decoder.upscale", "mapping_in")


@pytest.fixture(scope="module")
def timm_findings() -> dict[str, Findings]:
    return inspect_timm()


@pytest.mark.parametrize("name", NAMES)
def test_parameters_of_transformers_go_where_the_table_says(name: str) -> None:
    check(inspect(name))


@pytest.mark.parametrize("name", TIMM_NAMES)
def test_parameters_of_timm_go_where_the_table_says(name: str, timm_findings: dict[str, Findings]) -> None:
    check(timm_findings[name])


def check(found: Findings) -> None:
    assert found.row in PAGE.read_text(), "python -m tests.integrations.compatibility writes the table"
    assert set(found.algorithms) == set(found.trainable)

    # Independent of the rules in parbank: a Linear that every layer has is hidden, unless its name says otherwise.
    kinds = Counter(re.sub(r"\d+", "*", name) for name in found.linears)
    for linear, side in found.linears.items():
        weight = f"{linear}.weight"
        repeated = kinds[re.sub(r"\d+", "*", linear)] > 1 and weight in found.algorithms
        if repeated and not any(word in linear for word in NO_MATRICES) and side > 1:
            assert found.algorithms[weight] == "muon", linear
    for embedding in found.embeddings:
        assert found.algorithms.get(embedding, "adamw") == "adamw", embedding
    assert not [head for head in found.heads if found.algorithms.get(head) == "muon"]
