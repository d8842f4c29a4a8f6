"""ParallelMuon (Muon on batches of matrices, AdamW for the rest), and learning-rate schedules."""

from parbank.optim.banking import Bank, bank
from parbank.optim.newton_schulz import orthogonalize
from parbank.optim.parallel_muon import ParallelMuon
from parbank.optim.qk_clip import QKClip
from parbank.optim.split import split_parameters
from parbank.optim.widths import carry_rate

__all__ = ["Bank", "ParallelMuon", "QKClip", "bank", "carry_rate", "orthogonalize", "split_parameters"]
