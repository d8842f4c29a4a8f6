"""The algorithms, one file each. A new one is a file here and a line below; `parbank.optim.algorithm` has the interface."""

from parbank.optim.algorithm import ALGORITHMS
from parbank.optim.algorithms.adamw import AdamW
from parbank.optim.algorithms.lion import Lion
from parbank.optim.algorithms.muon import Muon

ALGORITHMS["muon"] = Muon()
ALGORITHMS["adamw"] = AdamW()
ALGORITHMS["lion"] = Lion()

__all__ = ["ALGORITHMS"]
