"""ParallelMuon (Muon on batches of matrices, AdamW for the rest), learning-rate schedules, and weight averages."""

from parbank.optim.banking import Bank, bank
from parbank.optim.newton_schulz import orthogonalize
from parbank.optim.parallel_muon import ParallelMuon
from parbank.optim.split import split_parameters

__all__ = ["Bank", "ParallelMuon", "bank", "orthogonalize", "split_parameters"]
