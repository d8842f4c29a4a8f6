"""ParallelMuon with QK-clip: attention without a QK norm, whose logits stay below a threshold. Run: python examples/qk_clip.py"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from parbank import ParallelMuon
from parbank.optim import QKClip

QUERIES, KEYS = 64, 32  # rows of the joint weight: 8 queries, 4 keys and 4 values of 8 channels

torch.manual_seed(0)
qkv = nn.Linear(64, QUERIES + 2 * KEYS, bias=False)
clip = QKClip(threshold=100.0)
watch = clip.add(qkv.weight[:QUERIES], qkv.weight[QUERIES : QUERIES + KEYS], heads=8, kv_heads=4)
opt = ParallelMuon([{"params": [qkv.weight], "split_sizes": (QUERIES, KEYS, KEYS)}], extra_captured=clip.apply)
for step in range(10):
    joint = qkv(torch.randn(2, 16, 64)).split((QUERIES, KEYS, KEYS), -1)
    q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in joint)
    watch.observe(q, k)  # a bound of the logits; exact=True computes them in tiles
    loss = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).square().mean()
    loss.backward()
    opt.step()  # then shrinks the heads above the threshold
    opt.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
