"""Weights to few bytes and back: integer codecs, packing under a byte cap, and sizes known before training."""

from parbank.quant.budget import FEW_BITS, check_fits, expected_bytes, overhead_bytes, worst_case_bytes
from parbank.quant.calibration import Calibration
from parbank.quant.codecs import Quantised, dequantise
from parbank.quant.config import QuantConfig
from parbank.quant.contents import pack_contents, read_contents, read_specs
from parbank.quant.entropy import coded_bits
from parbank.quant.pack import Packed, TensorRow, describe_tensors, pack_tensors, role, unpack_tensors
from parbank.quant.solver import Solver, pack_solved

__all__ = [
    "FEW_BITS",
    "Calibration",
    "Packed",
    "QuantConfig",
    "Quantised",
    "Solver",
    "TensorRow",
    "check_fits",
    "coded_bits",
    "dequantise",
    "describe_tensors",
    "expected_bytes",
    "overhead_bytes",
    "pack_contents",
    "pack_solved",
    "pack_tensors",
    "read_contents",
    "read_specs",
    "role",
    "unpack_tensors",
    "worst_case_bytes",
]
