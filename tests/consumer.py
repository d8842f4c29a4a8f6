"""A program that uses every door with types: `mypy --strict` must take it, and would see a door that lost its types."""

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import parbank
from parbank import Model, ParallelMuon, Run, bank, load, ops, orthogonalize, pack, split_parameters, train
from parbank.artifact.pack import Packed
from parbank.data.tokenizer import Tokenizer
from parbank.eval.score import Score
from parbank.model.protocol import LanguageModel


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(self.table(ids), self.table.weight)


def use_a_run(out: Path) -> float:
    run = train(recipe="nano", data="stdlib", minutes=0.5, out=out, settings={"model.layers": 2}, quiet=True)
    assert_type(run, Run)
    assert_type(Run.open(out), Run)
    assert_type(run.folder, Path)
    assert_type(run.model, Model)
    bpb: float = run.summary["val_bpb"]
    return bpb


def use_a_model(path: str) -> str:
    model = load(path, device="cpu")
    assert_type(model, Model)
    score = model.score("text", method="sliding", stride=64)
    assert_type(score, Score)
    assert_type(score.bpb, float)
    assert_type(model.tokenizer, Tokenizer)
    assert_type(model.logits([1, 2]), Tensor)
    assert_type(model.save("copy.pbk"), Path)
    assert_type(model.export("model.safetensors", dtype="bfloat16"), Path)
    for piece in model.stream("a prompt", stop=["."]):
        print(piece, end="")
    return model.sample("a prompt", tokens=5, top_p=0.9, seed=1)


def use_the_parts(tokenizer: Tokenizer) -> Packed:
    module = Mine()
    language_model: LanguageModel = module
    for weights in bank(module):
        assert_type(weights.weights, Tensor)
    optimizer = ParallelMuon(split_parameters(module, lr=0.02))
    optimizer.step()
    optimizer.zero_grad()
    orthogonalize(torch.eye(3))
    ops.rms_norm(torch.ones(2, 8))
    print(parbank.__version__, parbank.Prefetcher)
    packed = pack(module, max_bytes=10_000, calibration=[torch.ones(1, 4, dtype=torch.int64)], out="module.pbk")
    assert_type(packed.uncalibrated, tuple[str, ...])
    print(language_model(torch.ones(1, 4, dtype=torch.int64)))
    return pack(Model(module, tokenizer, context=8), max_bytes=10_000)
