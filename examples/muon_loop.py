"""ParallelMuon in a plain training loop: python examples/muon_loop.py [STEPS]

A small transformer learns to add numbers. The same loop runs with AdamW for comparison; only the optimizer's line differs.
"""

import sys

import torch
from torch import nn

from parbank import ParallelMuon, split_parameters

DIGITS, WIDTH = 3, 64
TOKENS = {c: i for i, c in enumerate("0123456789+=")}


class Adder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(TOKENS), WIDTH)
        self.places = nn.Embedding(32, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(TOKENS), bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1])
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.blocks(self.tokens(ids) + self.places(places), mask=mask, is_causal=True))


def make_batch(count: int) -> torch.Tensor:
    """Lines such as 123+456=9750: the sum backwards, so that each digit follows from those before it."""
    a, b = torch.randint(10**DIGITS, (2, count)).tolist()
    lines = [f"{x:0{DIGITS}}+{y:0{DIGITS}}=" + f"{x + y:0{DIGITS + 1}}"[::-1] for x, y in zip(a, b, strict=True)]
    return torch.tensor([[TOKENS[c] for c in line] for line in lines])


def train(name: str, steps: int) -> float:
    torch.manual_seed(0)
    model = Adder()
    if name == "ParallelMuon":
        optimizer: torch.optim.Optimizer = ParallelMuon(split_parameters(model, lr=0.02, adam_lr=3e-3), max_norm=1.0)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = make_batch(128)
        answer = model(batch[:, :-1])[:, -DIGITS - 1 :]
        loss = nn.functional.cross_entropy(answer.flatten(0, 1), batch[:, -DIGITS - 1 :].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
for name in ("AdamW", "ParallelMuon"):
    print(f"{name:13} loss after {steps} steps: {train(name, steps):.4f}")
