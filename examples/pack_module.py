"""Pack a module that parbank did not build: python examples/pack_module.py

The module learns which number follows which. A few batches tell `pack` which weights its loss depends on. The file is never
larger than asked.
"""

import torch
from torch import nn

import parbank

WORDS = 500


def make_module() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, WORDS))


def make_batch() -> torch.Tensor:
    """Rows in which each number is followed by three times itself, plus 1."""
    rows = [torch.randint(WORDS, (32,))]
    for _ in range(15):
        rows.append((3 * rows[-1] + 1) % WORDS)
    return torch.stack(rows, 1)


def compute_loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(module(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


torch.manual_seed(0)
module = make_module()
opt = parbank.ParallelMuon(parbank.split_parameters(module, lr=0.02, adam_lr=3e-3))
for _ in range(60):
    compute_loss(module, make_batch()).backward()
    opt.step()
    opt.zero_grad()

plain = sum(p.numel() for p in module.parameters()) * 4
batches, unseen = [make_batch() for _ in range(4)], make_batch()
print(f"{plain:,} bytes in float32: loss {compute_loss(module, unseen).item():.4f}")
for max_bytes in (100_000, 40_000):
    packed = parbank.pack(module, max_bytes=max_bytes, calibration=batches, out="module.pbk")
    restored = make_module()
    restored.load_state_dict(parbank.load("module.pbk").state_dict())
    print(f"packed in {packed.size:,} bytes: loss {compute_loss(restored, unseen).item():.4f}")
