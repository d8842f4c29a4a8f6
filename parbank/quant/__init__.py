"""Weights to few bytes and back: integer codecs, packing under a byte cap, and sizes known before training."""

from parbank.quant.budget import check_fits, expected_bytes, overhead_bytes, worst_case_bytes
from parbank.quant.calibration import Calibration
from parbank.quant.config import QuantConfig
from parbank.quant.pack import Packed, TensorRow, describe_tensors, pack_tensors, role, unpack_tensors
from parbank.quant.solver import Solver, pack_solved

__all__ = [
    "Calibration",
    "Packed",
    "QuantConfig",
    "Solver",
    "TensorRow",
    "check_fits",
    "describe_tensors",
    "expected_bytes",
    "overhead_bytes",
    "pack_solved",
    "pack_tensors",
    "role",
    "unpack_tensors",
    "worst_case_bytes",
]
