"""Pack a module that parbank did not build: python examples/pack_module.py

A few batches tell `pack` which weights the loss depends on. The file is never larger than asked.
"""

import torch
from torch import nn

import parbank

torch.manual_seed(0)
module = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 500))
plain = sum(p.numel() for p in module.parameters()) * 4
batches = [torch.randint(500, (8, 32)) for _ in range(4)]

for max_bytes in (100_000, 60_000):
    packed = parbank.pack(module, max_bytes=max_bytes, calibration=batches, out="module.pbk")
    restored = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 500))
    restored.load_state_dict(parbank.load("module.pbk").state_dict())
    with torch.no_grad():
        error = (restored(batches[0]) - module(batches[0])).norm() / module(batches[0]).norm()
    print(f"{plain:,} bytes in float32 -> {packed.size:,} bytes; outputs differ by {error:.2%}")
