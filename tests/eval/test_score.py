"""Bits per byte against a plain reading of its definition: no token twice, no byte lost, whatever the lengths."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parbank.data.dataset import Dataset, open_dataset
from parbank.data.shards import TokenSet
from parbank.data.tokenizer import Tokenizer
from parbank.errors import ConfigError, DataError
from parbank.eval.score import Score, tokens_together, window_tokens_together
from parbank.eval.windows import score_chunked
from parbank.model import GPT, ModelConfig
from parbank.model.protocol import PlainModel
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from tests.distributed import run_distributed_test

CPU = Runtime(device=torch.device("cpu"))
CONTEXT = 16


@pytest.fixture(scope="module")
def dataset(text_spec: str) -> Dataset:
    return open_dataset(text_spec, vocab_size=320, say=lambda line: None)


def make_model(seed: int = 3) -> GPT:
    """Every parameter random: a fresh model is close to uniform, which would hide a shifted target."""
    torch.manual_seed(seed)
    model = GPT(get_recipe("nano").model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


@pytest.fixture(scope="module")
def model() -> GPT:
    return make_model()


def plain_score(model: GPT, tokens: np.ndarray, tokenizer: Tokenizer, context: int) -> Score:
    """The definition, one window at a time: each token given what precedes it in its window, the first one for free."""
    bits, count, size = 0.0, 0, 0
    for start in range(0, len(tokens) - 1, context):
        window = tokens[start : start + context + 1].astype(np.int64)
        with torch.no_grad():
            logits = model(torch.from_numpy(window[:-1])[None])[0].double()
        for position, target in enumerate(window[1:]):
            bits -= float(torch.log_softmax(logits[position], -1)[target]) / math.log(2)
            size += len(tokenizer.decode_bytes([target], previous=int(window[position])))
            count += 1
    return Score(bits=bits, tokens=count, bytes=size)


def score(model: GPT, tokens: np.ndarray, tokenizer: Tokenizer, batch_tokens: int | None = None) -> Score:
    # cut where it hurts: the stream of a data set is several files
    pieces = TokenSet([tokens[:5], tokens[5:]]) if len(tokens) > 5 else TokenSet([tokens])
    return score_chunked(model, pieces, tokenizer, context=CONTEXT, batch_tokens=batch_tokens, runtime=CPU)


@pytest.mark.parametrize("batch_tokens", [1, CONTEXT, 2 * CONTEXT + 1, None])
@pytest.mark.parametrize("length", [2, 3, CONTEXT, CONTEXT + 1, CONTEXT + 2, 2 * CONTEXT, 2 * CONTEXT + 1, 83])
def test_every_length_is_scored_exactly(model: GPT, dataset: Dataset, length: int, batch_tokens: int | None) -> None:
    tokens = dataset.val.read(0, length)
    got = score(model, tokens, dataset.tokenizer, batch_tokens)
    expected = plain_score(model, tokens, dataset.tokenizer, CONTEXT)
    assert (got.tokens, got.bytes) == (length - 1, expected.bytes)
    assert got.bits == pytest.approx(expected.bits, rel=1e-5)
    assert got.bpb == got.bits / got.bytes
    assert got.loss == pytest.approx(expected.bits * math.log(2) / (length - 1), rel=1e-5)


def test_the_bytes_counted_are_the_size_of_the_files(model: GPT, dataset: Dataset, text_spec: str) -> None:
    files = list(Path(text_spec.partition("val=")[2].partition(",")[0]).iterdir())
    got = score_chunked(model, dataset.val, dataset.tokenizer, context=64, runtime=CPU)
    assert got.bytes == sum(path.stat().st_size for path in files)
    assert got.tokens == len(dataset.val) - 1


def test_no_window_size_loses_a_byte(model: GPT, dataset: Dataset) -> None:
    tokens = dataset.val.read(0, 500)
    sizes = {
        score_chunked(model, TokenSet([tokens]), dataset.tokenizer, context=context, runtime=CPU).bytes
        for context in (1, 2, 7, 63, 499, 500, 501)
    }
    assert sizes == {len(dataset.tokenizer.decode_bytes(tokens))}


def test_a_uniform_model_pays_log2_of_the_vocabulary(model: GPT, dataset: Dataset) -> None:
    uniform = GPT(get_recipe("nano").model)
    with torch.no_grad():
        uniform.token_embedding.weight.zero_()
    got = score(uniform, dataset.val.read(0, 100), dataset.tokenizer)
    assert got.bits == pytest.approx(99 * math.log2(320), rel=1e-6)


def test_a_document_boundary_costs_bits_and_counts_no_bytes(model: GPT, dataset: Dataset) -> None:
    tokenizer, bos = dataset.tokenizer, dataset.tokenizer.bos_id
    text = np.concatenate([[bos], tokenizer.encode("one document")]).astype(np.uint16)
    alone, closed = (score(model, t, tokenizer) for t in (text, np.append(text, bos).astype(np.uint16)))
    assert alone.bytes == closed.bytes == len("one document")
    assert closed.tokens == alone.tokens + 1
    with torch.no_grad():
        price = -torch.log_softmax(model(torch.from_numpy(text.astype(np.int64))[None])[0, -1], -1)[bos]
    assert closed.bits - alone.bits == pytest.approx(float(price) / math.log(2), rel=1e-3)


def test_scoring_again_gives_the_same_bits_and_leaves_the_model_as_it_was(model: GPT, dataset: Dataset) -> None:
    shares: list[float] = []
    for training in (True, False):
        model.train(training)
        first, second = (
            score_chunked(
                model,
                dataset.val,
                dataset.tokenizer,
                context=64,
                batch_tokens=4096,
                runtime=CPU,
                progress=shares.append,
            )
            for _ in range(2)
        )
        assert first == second
        assert model.training is training
    assert shares[-1] == 1.0
    assert all(0 < share <= 1 for share in shares)


def test_text_that_cannot_be_scored(model: GPT, dataset: Dataset) -> None:
    bos = np.full(3, dataset.tokenizer.bos_id, dtype=np.uint16)
    with pytest.raises(DataError, match="1 tokens; scoring needs at least 2"):
        score(model, bos[:1], dataset.tokenizer)
    with pytest.raises(DataError, match="nothing but document boundaries"):
        score(model, bos, dataset.tokenizer)
    with pytest.raises(ConfigError, match="at least 1 token, got 0"):
        score_chunked(model, TokenSet([bos]), dataset.tokenizer, context=0, runtime=CPU)


def rank_score(tokens: np.ndarray, tokenizer_model: bytes) -> list[tuple[float, int, int]]:
    place = Runtime(device=torch.device("cpu"), rank=dist.get_rank(), world=dist.get_world_size())
    found = []
    for length in (CONTEXT, len(tokens)):  # with one window, the second rank has nothing to do and still takes part
        part = TokenSet([tokens[:length]])
        tokenizer = Tokenizer.from_bytes(tokenizer_model)
        got = score_chunked(make_model(), part, tokenizer, context=CONTEXT, batch_tokens=32, runtime=place)
        found.append((got.bits, got.tokens, got.bytes))
    return found


def test_two_ranks_score_what_one_does(model: GPT, dataset: Dataset) -> None:
    tokens = dataset.val.read(0, 1000)
    first, second = run_distributed_test(rank_score, 2, args=(tokens, dataset.tokenizer.model_bytes))
    assert first == second
    for length, (bits, count, size) in zip((CONTEXT, 1000), first):
        alone = score(model, tokens[:length], dataset.tokenizer, 32)
        assert (count, size) == (alone.tokens, alone.bytes)
        assert bits == alone.bits, "to the last bit"


def test_windows_that_go_through_a_gpu_together_fit_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where logits come in chunks do more tokens need little more memory: 65,536 tokens of a vocabulary of 50,257 have
    logits of 13 GB."""
    cuda = Runtime(device=torch.device("cuda"))

    def together(model: object) -> int:
        return window_tokens_together(model, cuda)  # type: ignore[arg-type]

    def built(**changes: object) -> GPT:
        with torch.device("meta"):
            return GPT(replace(ModelConfig(vocab_size=8192, width=512, mlp_multiple=3, layers=1), **changes))  # type: ignore[arg-type]

    def has(gibibytes: float) -> None:
        gpu = SimpleNamespace(total_memory=int(gibibytes * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)

    has(79.1)
    monkeypatch.setattr("parbank.model.gpt.use_triton", lambda *tensors: True)
    assert together(built()) == together(built(vocab_size=65_536)) == 65_536
    assert together(built(isolate_documents=True)) == 8192, "a mask with an entry for each pair"
    assert together(built(vocab_size=2048)) == 32_768, "below the vocabularies whose logits come in chunks"
    assert together(built(width=2048, mlp_multiple=4)) == 16_384
    assert together(built(vocab_size=512)) == tokens_together(512, cuda) == 131_072
    assert together(PlainModel(torch.nn.Identity(), vocab_size=50_257, bos_id=0)) == 1335
    assert window_tokens_together(built(), CPU) == 512
    has(23.6)
    assert together(built()) == 16_384
    has(7.8)
    assert together(built()) == 8192
    has(79.1)
    monkeypatch.setattr(Runtime, "agree", lambda self, values: [max(values[0], -16_384)])
    assert together(built()) == 16_384, "another rank has a smaller GPU"
    monkeypatch.undo()
    monkeypatch.setattr("parbank.model.gpt.use_triton", lambda *tensors: False)
    assert together(built()) == 8192, "plain PyTorch makes all logits at once"
