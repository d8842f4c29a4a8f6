"""Streaming, mixed with predictions that learn from the text itself, score-first. (docs/design/adaptation.md)

1. A streaming pass gives the plain score of every token. It never changes.
2. Low-rank factors beside the matrices learn each document, many documents at once (adaptation/documents.py). The
   first documents are read at several learning rates, and the best of these is the rate of all other documents. These
   come in phases, each twice as long as the one before: factors start from what earlier phases taught.
3. Bayes' mixture over the text so far weighs the adapted model at several temperatures, with and without a share of
   the plain model (mixing/bayes.py).
4. n-grams of the document and of the text so far correct its probabilities (mixing/ngrams.py).
5. The weights of the n-grams learn online (mixing/online.py).
6. A mixture with the plain score guards every document, whatever its length (mixing/guard.py).

Steps 3 to 6 need nothing but the probability that each prediction gave to each token, since a mixture in probability
space is linear. Every rank computes them on the host from the same numbers.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parbank.config import require
from parbank.data.shards import TokenSet
from parbank.data.tokenizer import Tokenizer
from parbank.eval.adaptation.base import restored
from parbank.eval.adaptation.documents import DocumentReader, DocumentSpan, find_documents, group_documents
from parbank.eval.audit import Audit, audited
from parbank.eval.methods.base import Method, place_in_document
from parbank.eval.methods.streaming import Streaming
from parbank.eval.mixing.audit import SAMPLE, THOROUGH, audit_mixture
from parbank.eval.mixing.bayes import mix_bayes
from parbank.eval.mixing.guard import guard
from parbank.eval.mixing.ngrams import NgramCounts, count_ngrams, predict
from parbank.eval.mixing.online import MixConfig, classify_lead, mix_online
from parbank.eval.score import Pace, Progress, Scored, Text, run_scorer, silent
from parbank.model import GPT, ModelConfig
from parbank.runtime import Runtime

SCOPES = ("document", "text")
AGE = 64  # tokens of a document's first age; the next one is twice as long
NGRAMS = 0.1  # the weight of all n-grams at first
# The weight of the plain model in its mean with the adapted model: factors that learn fast err at tokens where it does not.
SHARE = 0.25
TOGETHER = 1 << 16  # tokens whose predictions are weighed together: a bound on memory
OVERFLOW = 1e4  # nats of a token whose prediction is not finite, because factors have overflowed: no probability at all


Watch = Callable[[Tensor], None]
"""Called with the places of the targets that were just scored."""


def ignore(places: Tensor) -> None:
    """Does nothing."""


@dataclass(frozen=True, kw_only=True)
class Adaptive(Method):
    """Streaming scores, mixed with predictions learnt from the text so far."""

    name = "adaptive"
    help = "streaming, mixed with factors that learn each document and with n-grams of the text so far"
    rounding = Method.rounding | {"segment", "rows"}

    segment: int | None = None
    """Tokens the model reads together; none takes a number that memory allows. Rounding only."""
    rank: int = 64
    """Inner width of the factors that learn each document; 0 leaves them out."""
    chunk: int = 48
    """Tokens of a document that are scored, then learnt from."""
    lr: float | None = None
    """Learning rate of the factors; if none, the first documents choose it among `rates`."""
    rates: tuple[float, ...] = (0.0003, 0.001, 0.003, 0.01)
    """Learning rates to choose from: the best ones of two models may differ by a factor of 10."""
    pilot: int = 16
    """The first documents of the text, which are read at every rate. The best rate on them is that of all later ones."""
    warm: float = 0.4
    """How far the factors of a document start on the way to where those of earlier phases ended, on average. Above 0, it also
    starts with the mean square of their gradients; 0 starts every document anew."""
    decay: int = 16384
    """Tokens after which the learning rate has fallen by a factor sqrt(2): it falls as 1 / sqrt(1 + tokens / decay)."""
    rows: int = 64
    """Documents read together; rounding only."""
    temperatures: tuple[float, ...] = (0.95, 1.0, 1.05, 1.1, 1.15, 1.2)
    """The adapted model's logits are divided by these numbers; the text so far weighs them. 1 alone changes nothing."""
    orders: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    """Lengths of the contexts of n-grams, in tokens; none leaves n-grams out."""
    scopes: tuple[str, ...] = SCOPES
    """The texts in which n-grams are counted: in the document, in the text so far, or in both."""
    discount: float = 0.7
    """Taken off each count of an n-gram, for tokens that have not followed its context yet."""
    strength: float = 1.0
    """Weight of shorter contexts, and of the model after the shortest, in occurrences."""
    mix_rate: float = 0.05
    """Learning rate of the weights of n-grams, per token."""
    mix_block: int = 32
    """Tokens that are scored with the same weights of n-grams, then learnt from."""
    prior: float = 0.5
    """Weight that the plain score always keeps: no document loses more than -log2 of it, in bits."""
    allowance: float = 0.002
    """Bits per byte that a document of any length may lose to the plain score. It limits how fast weight moves away from the
    plain score."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("chunk", "decay", "rows", "pilot", "mix_block"):
            value = getattr(self, name)
            require(value >= 1, f"--{name.replace('_', '-')} must be at least 1, got {value}")
        require(0 <= self.warm <= 10, f"warm must lie in 0..10, got {self.warm}")
        require(self.rank >= 0, f"--rank must be 0 (no factors) or more, got {self.rank}")
        require(self.lr is None or 0 <= self.lr <= 1, f"--lr must lie in 0..1, got {self.lr}")
        rates = list(self.rates)
        require(bool(rates) and all(0 <= rate <= 1 for rate in rates), f"rates must lie in 0..1, got {rates}")
        warm = all(0.01 <= temperature <= 100 for temperature in self.temperatures)
        given = list(self.temperatures)
        require(warm and bool(given), f"temperatures must be numbers in 0.01..100, at least one, got {given}")
        require(all(order >= 0 for order in self.orders), f"orders must be 0 or more, got {list(self.orders)}")
        unknown = [scope for scope in self.scopes if scope not in SCOPES]
        require(not unknown, f"scopes must be of {', '.join(SCOPES)}, got {', '.join(unknown)}")
        require(0 <= self.discount <= 1, f"discount must lie in 0..1, got {self.discount}")
        require(self.strength > 0, f"strength must be positive, got {self.strength}")
        require(0 <= self.mix_rate < float("inf"), f"mix_rate must be 0 or more and finite, got {self.mix_rate}")
        require(0 < self.prior < 1, f"prior must lie between 0 and 1, got {self.prior}")
        require(0 < self.allowance < float("inf"), f"allowance must be positive and finite, got {self.allowance}")

    def score(
        self,
        model: GPT,
        tokens: TokenSet,
        runtime: Runtime,
        progress: Progress = silent,
        *,
        tokenizer: Tokenizer | None = None,
    ) -> Scored:
        tokenizer = _require_tokenizer(tokenizer)
        text = Text.load(tokens, runtime)
        share = 0.2 if self.rank else 1.0  # of the time
        with ThreadPoolExecutor(1) as aside:  # n-grams need no model: they are counted while it runs
            counts = aside.submit(self.count_ngrams, text.tokens, model.config.bos_id)
            scorer = self.make_streaming().make_scorer(model, runtime, targets=text.targets)
            plain = run_scorer(scorer, model, text, runtime, lambda done: progress(share * done))
            adapted, passes = None, plain.audit
            if self.rank:
                with audited(model, runtime.device) as audit:
                    adapted = self.read_documents(
                        model, text, runtime, lambda done: progress(share + (1 - share) * done)
                    )
                passes = passes.join(audit.gather(runtime))
            sizes = plain.byte_counts(tokenizer)
            nats = self.mix(text.tokens, model.config.bos_id, sizes, plain.nats, adapted, counts.result())
        mixture, found = Audit(runtime.device), Scored(text.tokens, nats.astype(np.float32), plain=plain.nats)
        audit_mixture(self, mixture, model, found, sizes, runtime, SAMPLE)
        return replace(found, audit=passes.join(mixture.gather(Runtime(device=runtime.device))))

    def audit(
        self, audit: Audit, model: GPT, scored: Scored, runtime: Runtime, *, tokenizer: Tokenizer | None = None
    ) -> None:
        audit_mixture(self, audit, model, scored, scored.byte_counts(_require_tokenizer(tokenizer)), runtime, THOROUGH)

    def rehearse(self, model: GPT, runtime: Runtime) -> None:
        """The streaming pass. Factors learn through PyTorch's own kernels, which need no compiling."""
        self.make_streaming().rehearse(model, runtime)

    def make_streaming(self) -> Streaming:
        """The method of the plain score."""
        return Streaming(context=self.context, graphed=self.graphed, segment=self.segment)

    def count_ngrams(self, tokens: np.ndarray, bos_id: int) -> dict[str, list[NgramCounts]]:
        """Counts by scope and, within a scope, by order."""
        documents = np.cumsum(tokens == bos_id)
        parts = {"document": documents, "text": np.zeros_like(documents)}
        return {scope: list(count_ngrams(tokens, parts[scope], self.orders)) for scope in self.scopes if self.orders}

    def mix(
        self,
        tokens: np.ndarray,
        bos_id: int,
        sizes: np.ndarray,
        plain: np.ndarray,
        adapted: np.ndarray | None,
        counts: dict[str, list[NgramCounts]],
    ) -> np.ndarray:
        """The nats of the mixture, (N - 1,), from the targets' bytes, (N - 1,), the nats of the plain model, (N - 1,), and
        of the adapted model at every rate and temperature, (N - 1, rates x temperatures), and the n-grams' counts."""
        place = place_in_document(tokens, bos_id)
        age = np.log2(place // AGE + 1).astype(np.int64)  # doubling ages: what a document teaches grows with it
        config = MixConfig(rate=self.mix_rate, block=self.mix_block)
        found = plain = plain.astype(np.float64)
        if adapted is not None:
            found = mix_bayes(_list_predictions(plain, adapted))
        if counts:
            experts, contexts = [found], [age]
            for own in counts.values():
                ngrams = predict(found, own, discount=self.discount, strength=self.strength)
                experts.append(ngrams.nats)
                contexts += [ngrams.orders, ngrams.kinds, classify_lead(found - ngrams.nats)]
            start = [1 - NGRAMS, *[NGRAMS / len(counts)] * len(counts)]
            found = mix_online(np.stack(experts, axis=1), contexts, start, config)
        starts = np.flatnonzero(place == 0)
        return guard(plain, found, sizes, starts, prior=self.prior, allowance=self.allowance)

    def find_reach(self, tokens: np.ndarray, model: ModelConfig) -> np.ndarray:
        return Streaming(context=self.context).find_reach(tokens, model)

    def describe(self) -> dict[str, Any]:
        own = {field.name for field in fields(self)} - {field.name for field in fields(Method)} - self.rounding
        adapt = {name: getattr(self, name) for name in sorted(own)}
        # The mixture's weights, and the n-grams of the text, go on from document to document.
        about = {"scores": "streaming", "documents": "in the order of the text"}
        return {"method": self.name, "context": self.context, "stride": None, "adapt": adapt | about}

    def read_documents(
        self, model: GPT, text: Text, runtime: Runtime, progress: Progress, watch: Watch = ignore
    ) -> np.ndarray:
        """The nats of the adapted model, (N - 1, rates x temperatures).

        A phase is a run of documents in the order of the text, and is read when all phases before it are scored. The first
        phase is read at every rate. Later phases are read at the rate that was best on the first, and the columns of all
        rates hold these nats. So every token has the same number of predictions, and no prediction follows from a later
        token. `watch` is called after each chunk.
        """
        rates = self.rates if self.lr is None else (self.lr,)
        pilot, *later = self.find_phases(find_documents(text.tokens, model.config.bos_id), len(rates))
        known = later[0][0].first if later else text.targets
        nats = text.new_nats()[:, None, None].repeat(1, len(rates), len(self.temperatures))
        total, done, training = known * len(rates) + text.targets - known, 0, model.training
        turns = itertools.cycle(range(runtime.world))

        def read(groups: list[list[DocumentSpan]], ends: dict[int, Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            """For each chunk: the numbers of the rows' rates, (rows, 1), places and nats. Ranks take turns at groups. What
            the documents of a group learnt goes into its row of `ends`, (groups, ...) for each rate."""
            nonlocal done
            for number, group in enumerate(groups):
                mine = next(turns) == runtime.rank
                numbers = torch.tensor([d.rate for d in group] + [0] * self.rows, device=runtime.device)[:, None]
                chunks_of = reader.read(text.ids, group, rates, teaches=bool(ends)) if mine else ()
                for chunks, (places, found) in enumerate(chunks_of, 1):
                    yield numbers[: len(places)], places, found
                    watch(places)
                    pace.step()
                    read = sum(min(document.targets, chunks * self.chunk) for document in group)
                    progress((done + read) / total)
                for rate, own in ends.items() if mine else ():
                    own[number] = reader.sum_ends(group, rate)
                done += sum(document.targets for document in group)

        with restored(model):
            model.eval().requires_grad_(False)
            try:
                reader, pace = self.make_reader(model, runtime, pilot, *later), Pace(runtime.device)
                groups = group_documents(pilot, self.rows)
                teaching = range(len(rates)) if later and self.warm else ()
                ends = {rate: reader.new_ends(len(groups)) for rate in teaching}
                for numbers, places, found in read(groups, ends):
                    nats[places, numbers] = found
                best = _find_best(runtime.sum(nats[:known].clone())) if len(rates) > 1 else 0
                for phase in later:
                    if self.warm:  # a sum with the zeros of other ranks is exact, so any number of ranks agrees
                        reader.start_from(runtime.sum(ends[best]).sum(0), self.warm)
                    groups = group_documents([replace(document, rate=best) for document in phase], self.rows)
                    ends = {best: reader.new_ends(len(groups))} if self.warm and phase is not later[-1] else {}
                    for _, places, found in read(groups, ends):
                        nats[places] = found[:, :, None]
            finally:
                model.train(training)
        return np.asarray(runtime.sum(nats)[:-1].flatten(1).cpu().numpy())

    def find_phases(self, documents: list[DocumentSpan], rates: int) -> list[list[DocumentSpan]]:
        """Runs of documents. The first phase holds each of its documents once for each rate. Every later phase is twice as long
        as the one before: so there are few phases, and many documents are read side by side. Without a warm start, all
        later documents are one phase."""
        pilot = [replace(document, rate=rate) for document in documents[: self.pilot] for rate in range(rates)]
        phases, length, first = [pilot], 2 * self.pilot if self.warm else len(documents), self.pilot
        while first < len(documents):
            phases.append(documents[first : first + length])
            first, length = first + length, 2 * length
        return phases

    def make_reader(self, model: GPT, runtime: Runtime, *parts: list[DocumentSpan]) -> DocumentReader:
        """Reads groups of documents of these parts with factors that learn each document."""
        return DocumentReader(
            model,
            runtime,
            rows=min(self.rows, max(map(len, parts))),
            rank=self.rank,
            chunk=self.chunk,
            window=min(self.context, max(document.targets for part in parts for document in part)),
            decay=self.decay,
            temperatures=self.temperatures,
            graphed=self.graphed,
        )


def _list_predictions(plain: np.ndarray, adapted: np.ndarray) -> Iterator[np.ndarray]:
    """The nats of the plain model, of the adapted model, and of the means of both, (length, 1 + 2 x predictions). They come
    for some tokens at a time: for a long text they would take many gigabytes."""
    for start in range(0, len(plain), TOGETHER):
        own, learnt = plain[start : start + TOGETHER, None], adapted[start : start + TOGETHER].astype(np.float64)
        learnt = np.where(np.isfinite(learnt), learnt, OVERFLOW)
        shared = -np.logaddexp(math.log(SHARE) - own, math.log(1 - SHARE) - learnt)
        yield np.concatenate([own, learnt, shared], axis=1)


def _find_best(nats: Tensor) -> int:
    """The number of the rate with the fewest nats at its best temperature. nats (targets, rates, temperatures); a rate whose
    factors overflow is the worst."""
    costs = nats.double().sum(0).nan_to_num(nan=math.inf, posinf=math.inf)
    return int(costs.amin(-1).argmin())


def _require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    require(tokenizer is not None, "adaptive scores count the bytes of each token: pass tokenizer=, the text's own")
    assert tokenizer is not None
    return tokenizer
