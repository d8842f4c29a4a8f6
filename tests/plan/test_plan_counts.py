"""`parbank plan` counts the parameters of thousands of shapes by a formula. A setting that the formula forgets is found here."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from parbank.model import GPT, ModelConfig
from parbank.plan.shapes import count_parameters
from parbank.recipes import GOLF_MODEL

PLAIN = ModelConfig(vocab_size=96, layers=3, width=32, heads=4, kv_heads=2, rope_dims=4)
FULL = replace(GOLF_MODEL, **{name: getattr(PLAIN, name) for name in ("vocab_size", "width", "heads", "kv_heads", "rope_dims")},
               layers=5, value_layers=(1, 3))  # fmt: skip
OTHER: dict[str, Any] = {
    "vocab_size": 128, "bos_id": 2, "layers": 4, "width": 64, "heads": 8, "kv_heads": 4, "mlp_multiple": 2.0, "activation": "gelu",
    "activation_slope": 0.25, "qk_gain": 2.0, "rope_dims": 2, "rope_base": 500.0, "norm_scale": True, "unet_skips": True,
    "residual_mix": True, "block_gains": True, "smear": True, "smear_input": 4, "bigram_buckets": 24, "bigram_width": 16,
    "value_layers": (0, 2), "value_width": 24, "xsa_layers": 2, "gated_attention": True, "value_residual": True, "dense": True,
    "parallel_layers": 1, "softcap": 20.0, "tied": False, "embedding_std": 0.1, "isolate_documents": True, "window": 8,
    "window_layers": (1,),
}  # fmt: skip
"""Another value than the default for every setting."""
NEEDED: dict[str, dict[str, Any]] = {"smear_input": {"smear": True}}


def test_the_table_has_every_setting() -> None:
    assert set(OTHER) == {field.name for field in fields(ModelConfig)}, "a new setting: give it another value here"


@pytest.mark.parametrize("name", OTHER)
def test_the_formula_counts_what_the_model_has(name: str) -> None:
    for base in (PLAIN, FULL):
        config = replace(base, **NEEDED.get(name, {}), **{name: OTHER[name]})
        with torch.device("meta"):
            built = {own: parameter.numel() for own, parameter in GPT(config).named_parameters()}
        counted = count_parameters(config)
        assert counted.total == sum(built.values()), f"parbank/plan/shapes.py does not count what {name} adds"
        assert counted.matrices == sum(count for own, count in built.items() if own.startswith("banks."))
