"""Kernels of a score are compiled beside the loading of a model, and a failure costs time only."""

from collections.abc import Callable

import pytest
import torch

from parbank.errors import ConfigError
from parbank.eval import aside
from parbank.eval.aside import ScoringKernels
from parbank.eval.methods import METHODS, make_method
from parbank.eval.methods.base import Method, random_tokens
from parbank.eval.methods.streaming import StreamScorer
from parbank.eval.windows import WindowScorer
from parbank.model import GPT
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from tests.eval.sizes import TOKENIZER

CONFIG = get_recipe("nano").model
CPU, CUDA = (Runtime(device=torch.device(name)) for name in ("cpu", "cuda:0"))


def chunked() -> Method:
    return make_method("chunked", context=64)


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Instead of a rehearsal, a note: there may be no GPU here."""
    found: list[str] = []
    monkeypatch.setattr(aside, "can_rehearse", lambda: True)
    monkeypatch.setattr(aside, "rehearse_method", lambda method, config, runtime: found.append(method.name))
    return found


def test_the_first_model_is_rehearsed_on_a_gpu(rehearsed: list[str]) -> None:
    kernels = ScoringKernels(CUDA, print)
    kernels.begin(CONFIG, chunked)
    kernels.begin(CONFIG, chunked)
    kernels.wait()
    assert rehearsed == ["chunked"]
    elsewhere = ScoringKernels(CPU, print)
    elsewhere.begin(CONFIG, chunked)
    elsewhere.wait()
    assert rehearsed == ["chunked"]


@pytest.mark.parametrize(("error", "notes"), [(ConfigError("no such setting"), 0), (RuntimeError("no compiler"), 1)])
def test_a_failure_is_left_to_the_score(rehearsed: list[str], error: Exception, notes: int) -> None:
    def fail() -> Method:
        raise error

    said: list[str] = []
    kernels = ScoringKernels(CUDA, said.append)
    kernels.begin(CONFIG, fail)
    kernels.wait()
    assert len(said) == notes


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_can_be_rehearsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one batch, or one segment: a second one would capture a graph."""
    done: list[type] = []

    def counted(real: Callable[..., None]) -> Callable[..., None]:
        def count(self: object, *given: object) -> None:
            done.append(type(self))
            real(self, *given)

        return count

    monkeypatch.setattr(WindowScorer, "_score_batch", counted(WindowScorer._score_batch))
    monkeypatch.setattr(StreamScorer, "_score_segment", counted(StreamScorer._score_segment))
    monkeypatch.setattr("parbank.eval.methods.streaming.GRAPHED", 256)
    monkeypatch.setattr("parbank.eval.score._LOGITS_CPU", 320 * 256)
    make_method(name, context=64).rehearse(GPT(CONFIG), CPU)
    assert done == [WindowScorer if name in ("chunked", "sliding") else StreamScorer]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["chunked", "sliding", "streaming", "ttt", "adaptive"])
def test_a_rehearsal_on_a_gpu_leaves_the_score_as_it_is(name: str) -> None:
    place = Runtime(device=torch.device("cuda", 0))
    torch.manual_seed(0)
    model, method = GPT(CONFIG).to(place.device), make_method(name, context=64)
    text = random_tokens(CONFIG, 2000)
    before = method.score(model, text, place, tokenizer=TOKENIZER).nats.sum()
    aside.rehearse_method(method, CONFIG, place)
    assert float(method.score(model, text, place, tokenizer=TOKENIZER).nats.sum()) == pytest.approx(
        float(before), rel=1e-3
    )
