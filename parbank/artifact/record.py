"""The bytes, the error and the estimated loss of each packed tensor, recorded when the file is read back.

The file is decoded once, for the weights that are scored and for this record.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parbank.artifact.container import read_artifact
from parbank.artifact.contents import StoredTensor, read_contents
from parbank.quant.bank import MOST_EXPONENT
from parbank.quant.calibration import Calibration
from parbank.quant.integers import Quantised, dequantise_with_entropy

_ROWS = 4096  # of an error, multiplied by the Hessian at a time: a bound on memory


def read_back(
    path: Path, weights: Mapping[str, Tensor], calibration: Calibration | None
) -> tuple[dict[str, Tensor], dict[str, Any], float]:
    """The float32 tensors of an artifact; its record, given the weights it was packed from; the record's seconds."""
    artifact = read_artifact(path)
    tensors, rows, seconds = {}, [], 0.0
    for stored in read_contents(artifact):
        name, content = stored.spec.name, stored.content
        if isinstance(content, Quantised):
            values, entropy = dequantise_with_entropy(content)
        else:
            values, entropy = content.astype(np.float32), 0.0
        tensors[name] = torch.from_numpy(values.reshape(stored.spec.shape))
        began = time.perf_counter()
        rows.append(_describe(stored, entropy) | _measure(name, tensors[name], weights.get(name), calibration))
        seconds += time.perf_counter() - began
    return tensors, {"tensors": rows, "sections": artifact.sizes}, seconds


def _describe(stored: StoredTensor, entropy: float) -> dict[str, Any]:
    spec = stored.spec
    return {
        "name": spec.name,
        "shape": list(spec.shape),
        "role": spec.role,
        "count": spec.count,
        "levels": 2 * spec.q + 1 if spec.q else 0,
        "packed_bytes": round((stored.integer_bits + stored.side_bits) / 8, 1),
        "integer_bits": round(stored.integer_bits, 1),
        "entropy_bits": round(entropy, 1),
    }


@torch.no_grad()
def _measure(name: str, packed: Tensor, weights: Tensor | None, calibration: Calibration | None) -> dict[str, float]:
    """`error`: the root mean square of the error over that of the weights. `cost_nats`: its expected cost a token by the
    calibration (see `Calibration`), where there is one for this tensor."""
    if weights is None:
        return {}
    before = weights.detach().float()
    error = packed.to(before.device) - before
    size = float(before.norm())
    found = {"error": float(error.norm()) / size} if size else {}
    hessian = calibration.hessians.get(name) if calibration else None
    sensitivity = calibration.sensitivity.get(name) if calibration else None
    if hessian is not None and sensitivity is not None and error.ndim == 2 and len(hessian) == error.shape[1]:
        logits = calibration is not None and name in calibration.logits
        rows = sensitivity.double().to(hessian.device)
        found["cost_nats"] = _cost(error.to(hessian.device), hessian.float(), rows, logits=logits)
    return found


def _cost(error: Tensor, hessian: Tensor, sensitivity: Tensor, *, logits: bool) -> float:
    """1/2 sum_r g_r D_r H D_r^T; of logits as `parbank.quant.bank` says."""
    total = 0.0
    for d, g in zip(error.split(_ROWS), sensitivity.split(_ROWS), strict=True):
        cost = 0.5 * ((d @ hessian) * d).sum(1).double()
        total += float((g * (torch.expm1(cost.clamp(max=MOST_EXPONENT)) if logits else cost)).sum())
    return total
