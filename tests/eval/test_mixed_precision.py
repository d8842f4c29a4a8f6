"""Every pass of a model takes its precision from one place: bfloat16 on a GPU, wherever the model is used."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from parbank import precision
from parbank.artifact.calibrate import calibrate
from parbank.data.shards import TokenSet
from parbank.eval.adaptation import ADAPTERS
from parbank.eval.methods import METHODS, make_method
from parbank.eval.sampling import sample_tokens
from parbank.model import GPT, ModelConfig
from parbank.quant.config import QuantConfig
from parbank.runtime import Runtime
from parbank.training.passes import Passes
from tests.eval.sizes import TOKENIZER

CPU = Runtime(device=torch.device("cpu"))
TOKENS = TokenSet([np.random.default_rng(0).integers(1, 40, 65).astype(np.uint16)])


def _train(model: GPT) -> None:
    passes = Passes(model, model, CPU.device, 1, graph=False, precision="float32")
    passes.start()
    passes.add(torch.from_numpy(TOKENS.read(0, 65).astype(np.int64))[None])


def _score(method: str, **settings: Any) -> Callable[[GPT], object]:
    return lambda model: make_method(method, context=16, **settings).score(model, TOKENS, CPU, tokenizer=TOKENIZER)


class _Letters:
    """As much of a tokenizer as sampling needs."""

    bos_id = 1


USES: dict[str, Callable[[GPT], object]] = {
    "training": _train,
    **{name: _score(name) for name in METHODS},
    **{f"learning by {name}": _score("ttt", adapter=name, chunk=16, epochs=1) for name in ADAPTERS},
    "calibrating": lambda model: calibrate(model, TOKENS, QuantConfig(calibration_tokens=64), context=16, runtime=CPU),
    "sampling": lambda model: list(sample_tokens(model, _Letters(), [7, 8, 9], tokens=4, context=16)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("use", USES)
def test_every_pass_runs_under_autocast(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: autocast is made to mean bfloat16 on the CPU, and the model says in which dtype it was asked to compute."""
    original, seen = precision.autocast, list[torch.dtype]()
    for name, module in list(sys.modules.items()):
        if name.startswith("parbank.") and getattr(module, "autocast", None) is original:
            monkeypatch.setattr(
                module, "autocast", lambda device, precision=None: torch.autocast("cpu", torch.bfloat16)
            )
    compute = GPT._compute_dtype

    def watch(self: GPT, device: torch.device) -> torch.dtype:
        seen.append(compute(self, device))
        return seen[-1]

    monkeypatch.setattr(GPT, "_compute_dtype", watch)
    torch.manual_seed(0)
    USES[use](GPT(ModelConfig(vocab_size=40, layers=2, width=32, heads=2, kv_heads=1, rope_dims=8)))
    assert set(seen) == {torch.bfloat16}


def test_autocast_is_bfloat16_on_a_gpu_and_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch, "autocast", lambda *args: asked.append(args))
    precision.autocast(torch.device("cuda", 1))
    assert asked == [("cuda", torch.bfloat16)]
    with precision.autocast(torch.device("cpu")):
        assert not torch.is_autocast_enabled("cpu")
    assert len(asked) == 1
