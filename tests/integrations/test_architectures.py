"""`split_parameters` on public architectures: no errors, hidden matrices to Muon, and the table in docs is true."""

import re
from collections import Counter

import pytest
from torch import nn

from tests.integrations.architectures import NAMES, PAGE, build, describe

NO_MATRICES = ("embed", "router", "gate", "classifier", "head", "decoder.upscale", "mapping_in")


@pytest.mark.parametrize("name", NAMES)
def test_parameters_go_where_the_table_says(name: str) -> None:
    row = describe(name)
    assert str(row) in PAGE.read_text(), "python -m tests.integrations.architectures writes the table"
    model = build(name)
    assert set(row.algorithms) == {n for n, p in model.named_parameters() if p.requires_grad}

    # Independent of the rules in parbank: a Linear that every layer has is hidden, unless its name says otherwise.
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    kinds = Counter(re.sub(r"\d+", "*", n) for n in linears)
    for linear in linears:
        weight = f"{linear}.weight"
        repeated = kinds[re.sub(r"\d+", "*", linear)] > 1 and weight in row.algorithms
        if repeated and not any(word in linear for word in NO_MATRICES) and min(model.get_parameter(weight).shape) > 1:
            assert row.algorithms[weight] == "muon", linear
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.weight.numel() and f"{module_name}.weight" in row.algorithms:
            assert row.algorithms[f"{module_name}.weight"] == "adamw", module_name
    for method in ("get_output_embeddings", "get_classifier"):
        head = getattr(model, method, lambda: None)()
        layers = [layer for layer in (head if isinstance(head, tuple) else [head]) if layer is not None]
        ids = {id(param) for layer in layers for param in layer.parameters()}
        assert not [n for n, p in model.named_parameters() if id(p) in ids and row.algorithms.get(n) == "muon"]
