"""Score-first test-time training: a model learns from the text it is scored on, but only after scoring it. (Dynamic
evaluation, Krause et al. 2017; test-time training, Sun et al. 2019; parameter-golf #549.)

The driver owns the text. It scores a chunk with the current weights and then gives the adapter a copy of that chunk.
An adapter never holds the text, the scores, or a reference to them, so no token can affect the weights that score it.
An adapter that leaves a hook on the model is refused before the next chunk is scored. The model does not learn from
the last chunk: nothing is scored after it.

Under streaming scores, the keys and values carried into a chunk were made by earlier weights. They come from scored
tokens, so the order holds. The model differs from one that recomputes them, and is cheaper.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from parbank.config import choose, from_dict, require
from parbank.data.shards import TokenSet
from parbank.data.tokenizer import Tokenizer
from parbank.eval.adaptation import ADAPTERS
from parbank.eval.adaptation.base import AdaptConfig, Adapter, restored
from parbank.eval.adaptation.guard import CodeGuard
from parbank.eval.adaptation.sgd import SgdConfig
from parbank.eval.audit import audited
from parbank.eval.methods.base import Method, PieceMethod, setting_docs
from parbank.eval.methods.sliding import Sliding
from parbank.eval.methods.streaming import Streaming
from parbank.eval.score import Pace, Progress, Scored, Scorer, Text, silent
from parbank.model import GPT, ModelConfig
from parbank.model.gpt import MAX_POSITIONS
from parbank.runtime import Runtime

SCORES: dict[str, type[PieceMethod]] = {method.name: method for method in (Streaming, Sliding)}


@dataclass(frozen=True)
class TargetSpan:
    """Targets first .. last of a text."""

    first: int
    last: int
    fresh: bool
    """A document begins with it."""
    goes_on: bool
    """The next piece is of the same document, or documents do not matter: learning from it may help."""


def plan_pieces(tokens: np.ndarray, chunk: int, bos_id: int | None) -> Iterator[TargetSpan]:
    """Chunks of a text; with a bos_id, chunks of each document. Where a piece ends follows from tokens up to its end."""
    last, first = len(tokens) - 1, 0
    while first < last:
        end = min(first + chunk, last)
        fresh = bos_id is not None and (first == 0 or tokens[first] == bos_id)
        if bos_id is not None:
            closing = np.flatnonzero(tokens[first + 1 : end + 1] == bos_id)
            end = first + 1 + int(closing[0]) if len(closing) else end
        yield TargetSpan(first, end, fresh, end < last and (bos_id is None or tokens[end] != bos_id))
        first = end


def is_learnt_from(piece: TargetSpan, chunk: int) -> bool:
    return piece.goes_on and piece.last - piece.first == chunk


@dataclass(frozen=True, kw_only=True)
class ScoreFirst(Method):
    """Scores a text by chunks and adapts the model after each."""

    name = "ttt"
    help = "test-time training: learns from each chunk after scoring it"

    scores: PieceMethod = field(default_factory=Streaming)
    """How a chunk is scored before anything is learnt from it."""
    adapt: AdaptConfig = field(default_factory=SgdConfig)
    """The adapter and its settings."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.scores.context == self.context,
            f"ttt has one context: {self.context} is given for learning and {self.scores.context} for scoring",
        )
        width = min(self.context, self.chunk)
        require(
            width <= MAX_POSITIONS,  # an adapter learns through the model's plain forward pass
            f"ttt learns from windows of {width} tokens; a model has {MAX_POSITIONS} positions: lower --context or --chunk",
        )

    @classmethod
    def settings(cls) -> dict[str, str]:
        parts = [*SCORES.values(), *ADAPTERS.values()]
        docs = {name: doc for part in parts for name, doc in setting_docs(part).items()}
        return docs | {
            "scores": "How a chunk is scored before anything is learnt from it: " + _list_choices(SCORES),
            "adapter": "What learns: " + _list_choices(ADAPTERS),
        }

    @classmethod
    def make(cls, settings: dict[str, Any]) -> "ScoreFirst":
        """`scores` and `adapter` name the two parts. Any other setting goes to the part that has it."""
        own = dict(settings)
        scores = choose(SCORES, own.pop("scores", Streaming.name), "--ttt-scores")
        adapter = choose(ADAPTERS, own.pop("adapter", SgdConfig.name), "--adapter")
        for name in own:
            require(
                name in setting_docs(scores) or name in setting_docs(adapter),
                f"--{name.replace('_', '-')} is not a setting of ttt with {scores.name} scores and the {adapter.name} adapter; "
                "leave it out, or choose others by --ttt-scores and --adapter",
            )
        scorer = from_dict(scores, {name: own[name] for name in own if name in setting_docs(scores)})
        adapt = from_dict(adapter, {name: own[name] for name in own if name in setting_docs(adapter)})
        return cls(context=scorer.context, graphed=scorer.graphed, scores=scorer, adapt=adapt)

    @property
    def chunk(self) -> int:
        """Tokens scored before the model learns from them."""
        return self.adapt.chunk or self.context

    def score(
        self,
        model: GPT,
        tokens: TokenSet,
        runtime: Runtime,
        progress: Progress = silent,
        *,
        tokenizer: Tokenizer | None = None,
    ) -> Scored:
        """Restores the weights afterwards, also after an error."""
        text = Text.load(tokens, runtime)
        chunk = min(self.chunk, text.targets)
        nats = text.new_nats()
        training = model.training
        with restored(model):
            model.eval()
            try:
                with audited(model, runtime.device) as audit:
                    guard = CodeGuard(model)
                    scorer = self.scores.make_scorer(model, runtime, targets=text.targets, piece=chunk)
                    graphed = self.graphed and runtime.is_cuda
                    learner = self.adapt.make_adapter(model, runtime, context=self.context, graphed=graphed)
                    _run(text, nats, scorer, learner, guard, chunk, self._bos_id(model.config), progress)
            finally:
                model.train(training)
        return Scored.gather(text, nats, runtime, audit.gather(runtime))

    def rehearse(self, model: GPT, runtime: Runtime) -> None:
        """Scores without learning: an adapter decides by numbers that a rehearsal does not compute."""
        self.scores.rehearse(model, runtime)

    def find_reach(self, tokens: np.ndarray, model: ModelConfig) -> np.ndarray:
        pieces = [(piece.first, piece.last) for piece in plan_pieces(tokens, self.chunk, self._bos_id(model))]
        return self.scores.find_reach_in(pieces, len(tokens) - 1)

    def find_idle(self, tokens: np.ndarray, model: ModelConfig) -> str | None:
        targets = len(tokens) - 1
        chunk = min(self.chunk, targets)
        if any(is_learnt_from(piece, chunk) for piece in plan_pieces(tokens, self.chunk, self._bos_id(model))):
            return None
        if targets == chunk:
            reason = f"the text is one chunk of {targets:,} tokens, and the last is never learnt from"
        else:
            reason = f"no document goes on after a whole chunk of {chunk:,} tokens"
        return f"nothing was learnt: {reason}; lower --chunk"

    def describe(self) -> dict[str, Any]:
        adapt = self.adapt.describe(self.context) | {"scores": self.scores.name}
        return self.scores.describe() | {"method": self.name, "adapt": adapt}

    def _bos_id(self, model: ModelConfig) -> int | None:
        """The token at which a chunk ends, for an adapter that tells documents apart."""
        return model.bos_id if self.adapt.per_document else None


def _list_choices(choices: Mapping[str, type[Method] | type[AdaptConfig]]) -> str:
    return "; ".join(f"{name}, {choice.help}" for name, choice in choices.items())


def _run(
    text: Text,
    nats: torch.Tensor,
    scorer: Scorer,
    learner: Adapter,
    guard: CodeGuard,
    chunk: int,
    bos_id: int | None,
    progress: Progress,
) -> None:
    chunks = -(-text.targets // chunk)
    pace = Pace(text.ids.device)
    for piece in plan_pieces(text.tokens, chunk, bos_id):
        if piece.fresh:
            learner.reset()
        guard.check()
        scorer.score(text.upto(piece.last), piece.first, nats, more=piece.last < text.targets)
        progress(piece.last / text.targets)
        if is_learnt_from(piece, chunk):
            # A copy (a cast is one): a view would give access to the whole text. From the text on the device already: a copy
            # from the host would be waited for. The share is 0 at the first chunk and 1 at the last.
            seen = text.ids[piece.first : piece.last + 1].long()
            learner.learn(seen, piece.first // chunk / max(1, chunks - 1))
        pace.step()
