"""One loop over the layers serves every way to read a text: a feature that passes a tensor between blocks is written once."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from parbank.eval.adaptation.documents import DocumentReader, find_documents
from parbank.model import GPT, ModelConfig
from parbank.model.lanes import Lanes
from parbank.model.stream import Stream
from parbank.runtime import Runtime

CPU = Runtime(device=torch.device("cpu"))
TOKENS = torch.tensor([1, *np.random.default_rng(0).integers(2, 32, 23).tolist()])
WINDOW = 16


def read_window(model: GPT) -> Tensor:
    return model(TOKENS[None, :WINDOW])


def read_stream(model: GPT) -> Tensor:
    return Stream(model, WINDOW).read(TOKENS, 0, WINDOW)


def read_lanes(model: GPT) -> Tensor:
    return Lanes(model, WINDOW, 1).read(TOKENS[:1])


def read_documents(model: GPT) -> Tensor:
    reader = DocumentReader(model, CPU, rows=1, rank=1, chunk=8, window=WINDOW, decay=1, graphed=False)
    documents = find_documents(TOKENS.numpy().astype(np.uint16), bos_id=1)
    return torch.cat([nats for _, nats in reader.read(TOKENS, documents, [0.01])])


@pytest.mark.parametrize("read", [read_window, read_stream, read_lanes, read_documents])
def test_every_reader_goes_through_the_one_loop(read: Callable[[GPT], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = GPT(
        ModelConfig(vocab_size=32, layers=3, width=16, heads=2, kv_heads=1, rope_dims=4, unet_skips=True)
    ).eval()
    walk, calls = model.run_blocks, list[tuple[int, ...]]()

    def feature(x: Tensor, *rest: object) -> Tensor:
        calls.append(tuple(x.shape))
        return walk(x, *rest) + torch.linspace(-1, 1, x.shape[-1])  # type: ignore[arg-type]

    before = read(model).detach().clone()
    monkeypatch.setattr(model, "run_blocks", feature)
    after = read(model).detach()
    assert calls
    assert not torch.allclose(before, after)
