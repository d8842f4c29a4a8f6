"""Techniques of quantisation.py that work on the solver's banks, each alone on the matrices of the 6-bit rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parbank.quant.bank import Contents, QuantBank
from parbank.quant.gptq import round_bank
from parbank.quant.integers import Quantised
from parbank.quant.low_rank import correct
from parbank.quant.pruning import prune_ones
from parbank.quant.rotation import block_size, rotate

Q6 = 31
Parts = tuple[Tensor, Tensor, dict[str, Any]]
Technique = Callable[[QuantBank, Contents], Parts]
"""Integers, scales, and what else a Quantised of these tensors holds (rotation, factors), for one bank."""


def scales_of(bank: QuantBank, contents: Contents) -> Tensor:
    found = [torch.from_numpy(c.scales) for name in bank.names if isinstance(c := contents[name], Quantised)]
    return torch.stack(found).to(bank.weights.device)


def values_of(bank: QuantBank, contents: Contents) -> Tensor:
    found = [torch.from_numpy(c.values) for name in bank.names if isinstance(c := contents[name], Quantised)]
    return torch.stack(found).to(bank.weights.device)


def plain(weights: Tensor, scales: Tensor, q: int = Q6) -> Tensor:
    """To nearest, on scales per row."""
    wide = scales.float()
    return (weights / torch.where(wide > 0, wide, torch.inf)).round().clamp(-q, q).to(torch.int8)


def full_range(weights: Tensor) -> Tensor:
    """Scales that reach the largest value of each row, rounded up to float16."""
    largest = weights.abs().amax(2, keepdim=True) / Q6
    return (largest * (1 + 2.0**-10)).clamp(max=65504).half()


def gptq(bank: QuantBank, base: Contents) -> Parts:
    scales = scales_of(bank, base)
    return round_bank(bank.weights, scales, Q6, bank.factors)[0], scales, {}


def rotation(bank: QuantBank, base: Contents) -> Parts:
    block = block_size(bank.weights.shape[2])
    turned = rotate(bank.weights, block)
    scales = full_range(turned)
    return plain(turned, scales), scales, {"rotation": block}


def prune_at(multiplier: float) -> Technique:
    def pruning(bank: QuantBank, base: Contents) -> Parts:
        scales, values = scales_of(bank, base), values_of(bank, base)
        return prune_ones(bank.weights, values, scales, bank.hessians, bank.sensitivity, multiplier), scales, {}

    return pruning


def low_rank(bank: QuantBank, base: Contents) -> Parts:
    scales, values = scales_of(bank, base), values_of(bank, base)
    error = bank.weights - values.float() * scales.float()
    tall, flat = correct(error, bank.hessians, bank.sensitivity, 8)
    return values, scales, {"low_rank": (tall.cpu(), flat.cpu())}


TECHNIQUES: dict[str, Technique] = {"GPTQ": gptq, "rotation": rotation, "low rank 8 (LQER)": low_rank}


def apply(technique: Technique, banks: list[QuantBank], base: Contents, roles: dict[str, Any]) -> Contents:
    """The 6-bit rows with one technique on every matrix; embeddings and floats stay as they are."""
    found = dict(base)
    for bank in banks:
        chosen = bank.pick([roles[name] == "matrix" for name in bank.names])
        if chosen is None:
            continue
        values, scales, more = technique(chosen, base)
        values, scales = values.cpu(), scales.cpu()
        for i, name in enumerate(chosen.names):
            content = Quantised(values[i].numpy(), scales[i].numpy(), Q6, more.get("rotation", 0))
            if "low_rank" in more:
                content = replace(content, low_rank=tuple(factor[i].numpy() for factor in more["low_rank"]))
            found[name] = content
    return found
