"""benchmarks/scoring.py on a CPU: every method runs as parbank has it, and the published protocols give the same scores."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from parbank.model import GPT
from parbank.recipes import get_recipe
from parbank.runtime import Runtime


@pytest.fixture
def scoring(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("scoring")


def test_every_method_runs(scoring: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scoring, "CHUNK", 256)
    config = get_recipe("nano").model
    torch.manual_seed(0)
    model = GPT(config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    tokenizer = SimpleNamespace(count_bytes=lambda tokens, before: np.ones_like(tokens))
    loaded = SimpleNamespace(model=model, context=64, tokenizer=tokenizer)
    tokens = np.random.default_rng(0).integers(3, config.vocab_size, 901, dtype=np.uint16)
    arguments = Namespace(claim="scoring", out=tmp_path)
    bench = scoring.Bench(loaded, tokens, {}, 16, Runtime(device=torch.device("cpu")), arguments)
    scoring.run_all(bench, only=[], segments=[0], windows=[32])
    names = {"chunked", "streaming", "streaming, window 32", "sliding", "ttt on streaming", "ttt on sliding"}
    assert set(bench.bpb) == names | {scoring.SLIDING, scoring.TTT}
    assert bench.bpb["sliding"] == pytest.approx(bench.bpb[scoring.SLIDING], rel=1e-5)
    assert bench.bpb["ttt on sliding"] == pytest.approx(bench.bpb[scoring.TTT], rel=1e-3)
    assert bench.bpb["ttt on sliding"] != bench.bpb["sliding"]
    written = json.loads(bench.path.read_text())
    assert {row["provider"] for row in written["rows"]} == set(bench.bpb)
