"""An audit of a mixture: at scored positions, its probabilities of all tokens must sum to 1.

The model's own predictions are audited where they are made (parbank/eval/audit.py). A mixture is computed for the targets
alone, so here the beginning of the text is read again, other tokens take the target's place, one after another, and the
mixture scores them. Their probabilities follow from the logits and from the nats of the target, at every temperature.

Only tokens that have followed the same token before can have counts of n-grams. All others enter the mixture by their
probability alone, and the mixture is linear in it. So they are scored together, as one token that never came before.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from parbank.eval.audit import Audit, reading_out_by
from parbank.eval.score import IGNORED, Scored, Text, run_scorer, silent
from parbank.model import GPT
from parbank.runtime import Runtime

if TYPE_CHECKING:
    from parbank.eval.methods.adaptive import Adaptive

# Targets at the beginning of the text that are scored again, and how many of them are audited: each takes some dozen
# mixtures of the text before it.
SAMPLE = (128, 2)
THOROUGH = (1024, 8)


def audit_mixture(
    method: "Adaptive",
    audit: Audit,
    model: GPT,
    scored: Scored,
    sizes: np.ndarray,
    runtime: Runtime,
    amount: tuple[int, int],
) -> None:
    """Every rank does the same work by itself. sizes (N - 1,): bytes of the targets. amount: `SAMPLE` or `THOROUGH`."""
    alone, method = Runtime(device=runtime.device), replace(method, graphed=False)  # a graph would not call `keep`
    targets, positions = amount
    tokens = scored.tokens[: targets + 1]
    text = Text(tokens, torch.from_numpy(tokens.astype(np.int32)).to(runtime.device))
    chosen = np.unique(np.linspace(0, text.targets - 1, positions).astype(np.int64))
    plain, plain_logits = _read_plain(method, model, text, alone, chosen)
    adapted, logits = _read_adapted(method, model, text, alone, chosen) if method.rank else (None, {})
    temperatures = np.array(method.temperatures)
    for place in chosen.tolist():
        target, past = int(tokens[place + 1]), slice(place + 1)
        p = _probabilities(plain_logits[place], target, plain[place], np.ones(1))
        if adapted is not None:
            by_rate = adapted[place].reshape(-1, len(temperatures))
            own = itertools.cycle(logits[place])  # of every rate, or of the one that stands for all
            learnt = [_probabilities(next(own), target, costs, temperatures) for costs in by_rate]
            p = np.concatenate([p, *learnt], axis=1)
        before = sizes[past], plain[past], None if adapted is None else adapted[past]
        total, nats = _sum(method, tokens[: place + 2], model.config.bos_id, before, p)
        audit.add(total, nats, float(scored.nats[place]))


def _read_plain(
    method: "Adaptive", model: GPT, text: Text, runtime: Runtime, chosen: np.ndarray
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """The nats of all targets, and the logits of the chosen ones."""
    logits: dict[int, np.ndarray] = {}
    done = 0

    def keep(found: Tensor, targets: Tensor) -> None:
        nonlocal done
        found = found[targets != IGNORED]
        for place in chosen:
            if done <= place < done + len(found):
                logits[int(place)] = found[place - done].double().cpu().numpy()
        done += len(found)

    scorer = method.make_streaming().make_scorer(model, runtime, targets=text.targets)
    with _tapped(model, keep):
        return run_scorer(scorer, model, text, runtime, silent).nats.astype(np.float64), logits


def _read_adapted(
    method: "Adaptive", model: GPT, text: Text, runtime: Runtime, chosen: np.ndarray
) -> tuple[np.ndarray, dict[int, list[np.ndarray]]]:
    """The nats of all targets by every prediction, and the logits of the chosen targets. The first documents are read at
    every learning rate and have logits for each, in the order of the rates; later documents have one."""
    logits: dict[int, list[np.ndarray]] = {int(place): [] for place in chosen}
    last: list[Tensor] = []

    def keep(found: Tensor, targets: Tensor) -> None:
        last[:] = [found]

    def watch(places: Tensor) -> None:
        flat = places.flatten().cpu().numpy()
        for row in np.flatnonzero(np.isin(flat, chosen)):
            logits[int(flat[row])].append(last[0][row].double().cpu().numpy())

    with _tapped(model, keep):
        return method.read_documents(model, text, runtime, silent, watch).astype(np.float64), logits


@contextmanager
def _tapped(model: GPT, keep: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Calls `keep` with the logits, (n, vocabulary), and targets, (n,), of every pass that scores tokens one by one."""
    read_out = model.read_out

    def tap(x: Tensor, targets: Tensor | None, reduction: str = "mean") -> Tensor:
        nats = read_out(x, targets, reduction)
        if targets is not None and reduction == "none":
            with torch.no_grad():
                keep(read_out(x, None).flatten(0, -2), targets.flatten())
        return nats

    with reading_out_by(tap, model):
        yield


def _probabilities(logits: np.ndarray, target: int, nats: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """(vocabulary, temperatures), by the nats of the target: nats that are too low make all of them too large."""
    found: np.ndarray = np.exp((logits - logits[target])[:, None] / temperatures - nats)
    return found


def _sum(
    method: "Adaptive",
    tokens: np.ndarray,
    bos_id: int,
    before: tuple[np.ndarray, np.ndarray, np.ndarray | None],
    p: np.ndarray,
) -> tuple[float, float]:
    """The mixture's probabilities of all tokens after tokens[:-1], summed, and the nats of the last token. p (vocabulary,
    predictions)."""
    vocabulary, target = len(p), int(tokens[-1])
    text = tokens.astype(np.int64)
    known = text[:-1] if 0 in method.orders else text[1:-1][text[:-2] == text[-2]]
    others = np.ones(vocabulary, dtype=bool)
    others[known] = others[target] = False
    cases = [(target, p[target]), *((int(token), p[token]) for token in np.unique(known) if token != target)]
    if others.any():
        cases.append((vocabulary, p[others].sum(0)))
    # The last of the sizes is the target's. The guard does not use it: a token's own bytes must not weigh its prediction.
    sizes, plain, adapted = before[0], before[1].copy(), None if before[2] is None else before[2].copy()
    nats = []
    for token, chances in cases:
        costs = -np.log(np.maximum(chances, np.finfo(np.float64).tiny))
        text[-1], plain[-1] = token, costs[0]
        if adapted is not None:
            adapted[-1] = costs[1:]
        found = method.mix(text, bos_id, sizes, plain, adapted, method.count_ngrams(text, bos_id))
        nats.append(float(found[-1]))
    return float(np.exp(-np.array(nats)).sum()), nats[0]
