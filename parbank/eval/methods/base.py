"""The interface of a scoring method: a subclass of `Method` in its own file."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import numpy as np

from parbank.config import field_docs, from_dict
from parbank.data.shards import TokenSet
from parbank.data.tokenizer import Tokenizer
from parbank.eval.audit import Audit
from parbank.eval.score import Progress, Scored, Scorer, Text, check_context, run_scorer, silent
from parbank.model import GPT, ModelConfig
from parbank.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A scoring method. Its fields are its settings."""

    name: ClassVar[str]
    help: ClassVar[str]
    rounding: ClassVar[frozenset[str]] = frozenset({"graphed"})
    """Settings that change rounding only: scores that differ in them still compare."""
    any_model: ClassVar[bool] = False
    """Whether the forward pass is all it needs of a model, so that modules parbank did not build can be scored."""

    context: int = 1024
    """The window, in tokens."""
    graphed: bool = True
    """On a GPU, replay passes of one shape as CUDA graphs. Rounding only."""

    def __post_init__(self) -> None:
        check_context(self.context)

    @classmethod
    def settings(cls) -> dict[str, str]:
        """The settings of `make`, by name, with their meanings."""
        return setting_docs(cls)

    @classmethod
    def make(cls, settings: dict[str, Any]) -> "Method":
        """The method with these settings: plain values by the names in `settings`."""
        return from_dict(cls, settings)

    @abstractmethod
    def score(
        self,
        model: GPT,
        tokens: TokenSet,
        runtime: Runtime,
        progress: Progress = silent,
        *,
        tokenizer: Tokenizer | None = None,
    ) -> Scored:
        """The cost of every token of the text. `tokenizer` made the text; only methods that count bytes need it."""

    def audit(
        self, audit: Audit, model: GPT, scored: Scored, runtime: Runtime, *, tokenizer: Tokenizer | None = None
    ) -> None:
        """Checks what passes of the model do not show. By default nothing: their probabilities are the score's."""
        return

    def rehearse(self, model: GPT, runtime: Runtime) -> None:
        """Launches the kernels of a score once, on random tokens. By default none."""
        return

    @abstractmethod
    def find_reach(self, tokens: np.ndarray, model: ModelConfig) -> np.ndarray:
        """(N - 1,) how far back, in tokens, each target's window goes: 0 for the first target of a window."""

    def find_contexts(self, tokens: np.ndarray, model: ModelConfig) -> np.ndarray:
        """(N - 1,) context of each target: how many tokens before its predecessor it sees. 0 is a window's first target."""
        reach = self.find_reach(tokens, model)
        return np.minimum(reach, place_in_document(tokens, model.bos_id)) if model.isolate_documents else reach

    def find_idle(self, tokens: np.ndarray, model: ModelConfig) -> str | None:
        """One line that names a setting without effect on this text; None if every setting had an effect."""
        return None

    def describe(self) -> dict[str, Any]:
        """The identity of a score: scores that differ here do not compare."""
        own = {field.name for field in fields(self)} - {field.name for field in fields(Method)} - self.rounding
        about = {"method": self.name, "context": self.context, "stride": None, "adapt": None}
        return about | ({"options": {name: getattr(self, name) for name in sorted(own)}} if own else {})


class PieceMethod(Method):
    """A method that can score a text piece by piece, as test-time training does: weights may change in between."""

    @abstractmethod
    def make_scorer(self, model: GPT, runtime: Runtime, *, targets: int, piece: int | None = None) -> Scorer:
        """A scorer for a text of so many targets that comes whole, or in pieces of at most so many."""

    @abstractmethod
    def find_reach_in(self, pieces: Iterable[tuple[int, int]], targets: int) -> np.ndarray:
        """`find_reach` of a text whose targets are scored in pieces, from .. to."""

    def score(
        self,
        model: GPT,
        tokens: TokenSet,
        runtime: Runtime,
        progress: Progress = silent,
        *,
        tokenizer: Tokenizer | None = None,
    ) -> Scored:
        text = Text.load(tokens, runtime)
        return run_scorer(self.make_scorer(model, runtime, targets=text.targets), model, text, runtime, progress)

    def find_reach(self, tokens: np.ndarray, model: ModelConfig) -> np.ndarray:
        targets = len(tokens) - 1
        return self.find_reach_in([(0, targets)], targets)


def setting_docs(config: type) -> dict[str, str]:
    """The fields of a config dataclass by name, inherited ones too, with the docstring under each."""
    docs: dict[str, str] = {}
    for owner in reversed(config.__mro__):
        docs |= field_docs(owner) if is_dataclass(owner) else {}
    return {field.name: docs.get(field.name, "") for field in fields(config)}


def place_in_document(tokens: np.ndarray, bos_id: int) -> np.ndarray:
    """(N - 1,) the place, in its document, of the token each target follows: 0 is the BOS."""
    place = np.arange(len(tokens) - 1)
    starts = np.where(tokens[:-1] == bos_id, place, 0)
    return place - np.maximum.accumulate(starts)


def random_tokens(model: ModelConfig, targets: int) -> TokenSet:
    """A text of so many targets, to rehearse with."""
    return TokenSet([np.random.default_rng(0).integers(0, model.vocab_size, targets + 1, dtype=np.uint16)])
