"""Test-time training scores before it learns: for every adapter and every way of scoring, and whatever an adapter tries."""

import builtins
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.nn.modules.module as torch_module
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from parbank import ops
from parbank.errors import ParbankError
from parbank.eval.adaptation import ADAPTERS
from parbank.eval.methods import ttt as ttt_module
from parbank.eval.methods.ttt import SCORES
from parbank.model import GPT, ModelConfig
from parbank.model import gpt as gpt_module
from tests.eval.test_ttt import BOS, CHUNK, CONTEXT, ttt

KINDS = [(adapter, scores) for adapter in ADAPTERS for scores in SCORES]
VOCAB = 97


def make_model() -> GPT:
    """Small, and every parameter random."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(vocab_size=VOCAB, layers=2, width=32, heads=2, kv_heads=1, rope_dims=8, bos_id=BOS))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    """Two chunks and a rest, in one document: nothing in it can be guessed, so that learning a token by heart shows."""
    found = np.random.default_rng(0).integers(2, VOCAB, 2 * CHUNK + 10).astype(np.uint16)
    found[0] = BOS
    return found


@pytest.mark.parametrize(("adapter", "scores"), KINDS)
def test_a_token_changes_no_score_before_its_own(tokens: np.ndarray, adapter: str, scores: str) -> None:
    """Also within its chunk: weights that have learnt from the chunk would score all of it otherwise."""
    settings: dict[str, Any] = {"adapter": adapter, "scores": scores, "lr": 0.05, "epochs": 1}
    found = ttt(make_model(), tokens, **settings)
    for place in (30, CHUNK):  # inside the first chunk, and its last
        other = tokens.copy()
        other[place] = 2 + (other[place] + 40) % (VOCAB - 2)
        changed = np.abs(ttt(make_model(), other, **settings) - found)
        assert changed[: place - 1].max() < 1e-5, "targets before it: token t is target t - 1"
        assert changed[place - 1] > 1e-3
        # Beyond what the two layers' windows reach back to, only weights carry it on.
        assert changed[CHUNK + 2 * CONTEXT :].max() > 1e-3, "the test must be able to see what was learnt from it"


class Wrecker:
    """Learns so badly that it cannot be overlooked."""

    def __init__(self, model: GPT) -> None:
        self.model = model

    def learn(self, tokens: torch.Tensor, progress: float) -> None:
        with torch.no_grad():
            self.model.token_embedding.weight.fill_(torch.nan)

    def reset(self) -> None: ...


@pytest.mark.parametrize(("adapter", "scores"), KINDS)
def test_the_first_chunk_is_scored_by_the_weights_as_they_came(tokens: np.ndarray, adapter: str, scores: str) -> None:
    found = ttt(make_model(), tokens, Wrecker, adapter=adapter, scores=scores)
    plain = ttt(make_model(), tokens, adapter=adapter, scores=scores, lr=0.0)
    assert np.array_equal(found[:CHUNK], plain[:CHUNK])
    assert np.isnan(found[CHUNK:]).all()


def _see(*args: Any) -> None:
    """A hook."""


class Spy(nn.Module):
    """Stands in for a module, and sees what it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


def _put_in_place(model: GPT) -> None:
    model.token_embedding = Spy(model.token_embedding)  # type: ignore[assignment]


def _replace_forward(model: GPT) -> None:
    forward = model.blocks[0].forward
    model.blocks[0].forward = lambda *args: (_see(), forward(*args))[1]  # type: ignore[method-assign]


class Undo:
    """Puts back what a trick has changed outside the model, as the handle of a hook does."""

    def __init__(self, undo: Callable[[], Any]) -> None:
        self.remove = undo


def _patch(place: Any, name: str) -> Undo:
    before = getattr(place, name)
    setattr(place, name, lambda *args, **options: (_see(), before(*args, **options))[1])
    return Undo(lambda: setattr(place, name, before))


def _add(place: Any, name: str) -> Undo:
    """An attribute in front of one that is looked up elsewhere."""
    setattr(place, name, getattr(place, name))
    return Undo(lambda: delattr(place, name))


def _hide(module: Any, name: str) -> Undo:
    """A function in front of one that is built in, for one module."""
    setattr(module, name, getattr(builtins, name))
    return Undo(lambda: delattr(module, name))


def _patch_class(cls: type, name: str) -> Undo:
    """Calls of the model's own class, whose instances all change."""
    before = vars(cls)[name]

    def spy(self: Any, *args: Any, **options: Any) -> Any:
        return before(self, *args, **options)

    setattr(cls, name, spy)
    return Undo(lambda: setattr(cls, name, before))


def _patch_property(cls: type, name: str) -> Undo:
    before = vars(cls)[name]
    setattr(cls, name, property(lambda self: (_see(), before.fget(self))[1]))
    return Undo(lambda: setattr(cls, name, before))


def _patch_code(function: Any) -> Undo:
    """The same function object, which does something else."""
    before = function.__code__

    def spy(*args: Any, **options: Any) -> None: ...

    function.__code__ = spy.__code__
    return Undo(lambda: setattr(function, "__code__", before))


class Impostor:
    """A function that claims to be the one in whose place it stands."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.inner(*args, **options)

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash(self.inner)


def _put_an_impostor(model: GPT) -> Undo:
    before = ops.rms_norm
    ops.rms_norm = Impostor(before)  # type: ignore[assignment]
    return Undo(lambda: setattr(ops, "rms_norm", before))


class SpyTensor(torch.Tensor):
    """Sees every function that it is an argument of."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class SpyFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class SpyOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _put_a_table(model: GPT) -> None:
    model.cos = model.cos.as_subclass(SpyTensor)


def _put_a_config(model: GPT) -> None:
    model.config = replace(model.config)


def _enter(mode: Any) -> Undo:
    mode.__enter__()
    return Undo(lambda: mode.__exit__(None, None, None))


def _profile(model: GPT) -> Undo:
    before = sys.getprofile()
    sys.setprofile(lambda *event: None)
    return Undo(lambda: sys.setprofile(before))


TRICKS: dict[str, Callable[[GPT], Any]] = {
    "a hook": lambda model: model.blocks[1].register_forward_hook(_see),
    "a hook before": lambda model: model.register_forward_pre_hook(_see),
    "a hook of a deep module": lambda model: model.token_embedding.register_forward_hook(_see),
    "a hook of backward": lambda model: model.blocks[0].register_full_backward_hook(_see),
    "a hook of a weight": lambda model: model.token_embedding.weight.register_hook(_see),
    "a hook after a weight's gradient": lambda model: model.token_embedding.weight.register_post_accumulate_grad_hook(
        _see
    ),
    "a hook of every module": lambda model: torch_module.register_module_forward_hook(_see),
    "another forward": _replace_forward,
    "another module": _put_in_place,
    "another forward of a class": lambda model: _patch_class(type(model.blocks[0]), "forward"),
    "another call of every module": lambda model: _patch_class(nn.Module, "__call__"),
    "another method of tensors": lambda model: _patch_class(torch.Tensor, "split"),
    "another function of PyTorch": lambda model: _patch(F, "linear"),
    "another function of torch": lambda model: _patch(torch, "cat"),
    "another operator of PyTorch": lambda model: _patch(torch._C._nn, "leaky_relu"),
    "another function below PyTorch's": lambda model: _add(torch._VF, "dropout"),
    "another function of NumPy": lambda model: _patch(np, "concatenate"),
    "another function of Python": lambda model: _patch(math, "log"),
    "another function of ours": lambda model: _patch(ops, "rms_norm"),
    "other code of a function of ours": lambda model: _patch_code(ops.rms_norm),
    "a function that claims to equal ours": _put_an_impostor,
    "another function that Python has built in": lambda model: _patch(builtins, "zip"),
    "a name in front of one that is built in": lambda model: _hide(gpt_module, "range"),
    "a method added to a class": lambda model: _add(type(model), "__call__"),
    "another property": lambda model: _patch_property(ttt_module.Text, "targets"),
    "another scorer": lambda model: _patch_class(ttt_module.Text, "upto"),
    "a tensor that sees": _put_a_table,
    "another config": _put_a_config,
    "a mode of functions": lambda model: _enter(SpyFunctions()),
    "a mode of operators": lambda model: _enter(SpyOperators()),
    "a profiler": _profile,
}


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("when", ["at once", "when it learns", "when a document begins"])
def test_an_adapter_that_leaves_something_on_the_model_is_refused(tokens: np.ndarray, trick: str, when: str) -> None:
    """Before another token is scored: the hook must not have run."""
    handles: list[Any] = []

    class Hooked:
        def __init__(self, model: GPT) -> None:
            self.model = model
            self._play("at once")

        def learn(self, tokens: torch.Tensor, progress: float) -> None:
            self._play("when it learns")

        def reset(self) -> None:
            self._play("when a document begins")

        def _play(self, now: str) -> None:
            if now == when and not handles:
                handles.append(TRICKS[trick](self.model))

    try:
        with pytest.raises(ParbankError, match="the adapter has changed"):
            ttt(make_model(), tokens, Hooked, adapter="low-rank")
    finally:
        for handle in handles:
            if handle is not None:
                handle.remove()
