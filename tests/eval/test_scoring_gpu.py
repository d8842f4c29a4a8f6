"""The compiled methods on a GPU, in bfloat16, against the same on the CPU in float32."""

import numpy as np
import pytest
import torch

from parbank.data.dataset import Dataset, open_dataset
from parbank.data.shards import TokenSet
from parbank.eval.adapt import AdaptConfig
from parbank.eval.methods import EvalConfig, score_text
from parbank.model import GPT
from parbank.runtime import Runtime
from tests.eval.test_score import make_model

CPU = Runtime(device=torch.device("cpu"))
CONFIGS = [
    EvalConfig(method="chunked", context=64),
    EvalConfig(method="sliding", context=64, stride=16),
    EvalConfig(method="streaming", context=64, segment=512),
    EvalConfig(method="ttt", context=64, adapt=AdaptConfig(chunk=512)),
    EvalConfig(method="ttt", context=64, adapt=AdaptConfig(chunk=512, scores="sliding"), stride=16),
    EvalConfig(method="ttt", context=64, adapt=AdaptConfig(chunk=128, adapter="low-rank")),
]


@pytest.fixture(scope="module")
def tokens(text_spec: str) -> np.ndarray:
    dataset: Dataset = open_dataset(text_spec, vocab_size=320, say=lambda line: None)
    return np.concatenate([dataset.val.read(0, 1500), dataset.val.read(0, 700)])


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.method}-{config.scores}")
def test_a_gpu_scores_what_a_cpu_does(config: EvalConfig, tokens: np.ndarray) -> None:
    cuda = Runtime(device=torch.device("cuda"))
    expected = score_text(make_model(), TokenSet([tokens]), config, CPU).nats
    model: GPT = make_model().cuda()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    found = score_text(model, TokenSet([tokens]), config, cuda).nats
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())), "the weights are as they were"
    assert found.mean() == pytest.approx(expected.mean(), rel=5e-3)
    assert np.abs(found - expected).mean() < 0.1
    again = score_text(model, TokenSet([tokens]), config, cuda).nats
    if config.method != "ttt":  # gradients of embeddings are added by atomics, in any order
        assert np.array_equal(found, again), "the same bits again"
