"""The record of packing: the tensors of the file, their bytes, and what their errors cost."""

from pathlib import Path

import pytest
import torch

from parbank.artifact.pack import describe_tensors, pack_tensors, unpack_tensors
from parbank.artifact.record import read_back
from parbank.quant.calibration import Calibration
from parbank.quant.config import QuantConfig


def test_the_record_says_what_packing_did(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {"a.weight": torch.randn(24, 32), "norm.gain": torch.randn(32)}
    packed = pack_tensors(weights, QuantConfig(method="rows"), roles={"a.weight": "matrix", "norm.gain": "other"})
    packed.write(tmp_path / "model.pbk")
    x = torch.randn(500, 32)
    hessian, sensitivity = x.T @ x / 500, torch.rand(24)
    calibration = Calibration(hessians={"a.weight": hessian}, sensitivity={"a.weight": sensitivity}, tokens=500)
    tensors, record, seconds = read_back(tmp_path / "model.pbk", weights, calibration)
    expected = unpack_tensors(packed.artifact)
    assert all(torch.equal(tensors[name], expected[name]) for name in weights)
    rows = {row["name"]: row for row in record["tensors"]}
    for described in describe_tensors(packed.artifact):
        row = rows[described.name]
        assert (row["count"], row["levels"], row["role"]) == (described.count, described.levels, described.role)
        assert row["packed_bytes"] == pytest.approx(described.packed_bytes, abs=0.1)
        assert row["entropy_bits"] == pytest.approx(described.entropy_bits, abs=0.1)
    error = (expected["a.weight"] - weights["a.weight"]).double()
    outputs = error @ x.T.double()  # the mean square of each output's error is D_r H D_r^T
    cost = 0.5 * float((sensitivity.double() * outputs.square().mean(1)).sum())
    assert rows["a.weight"]["cost_nats"] == pytest.approx(cost, rel=1e-4)
    assert rows["a.weight"]["error"] == pytest.approx(float(error.norm() / weights["a.weight"].norm()), rel=1e-4)
    assert "cost_nats" not in rows["norm.gain"], "nothing was measured for it"
    assert sum(record["sections"].values()) < packed.size
    assert seconds > 0
    logits = Calibration(
        hessians={"a.weight": hessian},
        sensitivity={"a.weight": sensitivity},
        logits=frozenset(["a.weight"]),
        tokens=500,
    )
    row, _ = read_back(tmp_path / "model.pbk", weights, logits)[1]["tensors"]
    exponential = float((sensitivity.double() * torch.expm1(outputs.square().mean(1) / 2)).sum())
    assert row["cost_nats"] == pytest.approx(exponential, rel=1e-4)
    assert row["cost_nats"] > rows["a.weight"]["cost_nats"]
