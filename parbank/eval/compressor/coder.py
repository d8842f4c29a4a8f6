"""Tokens to bytes and back: a range coder (Martin 1979; `constriction`, Bamler 2022) with a model's probabilities.

The tokens are cut into lanes of equal length, which go through the model side by side, one token of each a step (see
parbank/model/lanes.py). One range coder takes the tokens of a step lane by lane. The encoder knows all tokens and could
read them together, but its sums would then be rounded differently from the decoder's. So both run the same steps.

Probabilities become whole numbers before they are coded. All of a row's numbers sum to 2^24 exactly, in float32 as in
any other type, so no rounding is left to the coder.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parbank.config import require
from parbank.errors import ParbankError
from parbank.graphs import Graphs, addresses
from parbank.model import GPT
from parbank.model.lanes import Lanes
from parbank.precision import autocast

PRECISION = 24  # bits of constriction's range coder for models of floats; also the whole numbers of float32
MOST_LANES = 4096
CPU_LANES, GPU_LANES = 64, 512
"""Lanes unless the user chooses: enough to keep the products busy. More lanes are little faster and cost more starts."""
CONTEXTS = 4  # a lane has at least so many windows of tokens: its first window has little context, and costs more

WORD = 4  # bytes of the range coder's words: coded tokens are a whole number of them
STATE = 64  # bits that the range coder holds beyond the words it has written: coded tokens may take so many bits less

Step = Callable[[int], None]
Seen = Callable[[np.ndarray], None]


class CannotDecode(Exception):
    """The coded bytes stand for no token by this model's probabilities."""


def choose_lanes(tokens: int, context: int, device: torch.device, wanted: int | None = None) -> int:
    """The number of lanes for so many tokens: at most `wanted`. By default so few that each lane is long."""
    most = wanted or min(GPU_LANES if device.type == "cuda" else CPU_LANES, tokens // (CONTEXTS * context))
    return max(1, min(most, tokens))


def find_least_bits(tokens: int, vocab: int) -> float:
    """The fewest bits that so many tokens cost. Every token has a frequency of at least 1, so none has more than
    2^24 - V + 1 of 2^24: at 1,024 tokens, 0.00009 bits each."""
    return -tokens * math.log1p(-(vocab - 1) / (1 << PRECISION)) / math.log(2)


def check_lanes(lanes: int | None) -> None:
    require(lanes is None or 1 <= lanes <= MOST_LANES, f"--segments is a number from 1 to {MOST_LANES}, got {lanes}")


class TokenCoder:
    """Codes tokens with one model. It keeps the memory of its lanes from one call to the next."""

    def __init__(self, model: GPT, context: int) -> None:
        self._model, self._context = model, context
        self.device = model.token_embedding.weight.device
        self._vocab, self._bos = model.config.vocab_size, model.config.bos_id
        self._steps: _Steps | None = None

    def encode(self, tokens: np.ndarray, lanes: int, step: Step = lambda done: None) -> tuple[bytes, float]:
        """The coded tokens, and the bits that the model's own probabilities give them."""
        queue, family = _load()
        coder, nats = queue.RangeEncoder(), torch.zeros((), dtype=torch.float64, device=self.device)
        table = np.full((-(-len(tokens) // lanes), lanes), self._bos, np.int32)
        for row, (rows, places) in zip(table, _walk(len(tokens), lanes)):
            row[:rows] = tokens[places]
        known = torch.from_numpy(table).to(self.device).long()
        with self._running(lanes) as steps:
            previous = torch.full((lanes,), self._bos, device=self.device)
            for number, (rows, _) in enumerate(_walk(len(tokens), lanes)):
                weights, chances = steps.take(previous)
                previous = known[number]
                own = chances.gather(1, previous[:, None])[:, 0]
                nats -= own[:rows].double().sum()  # where lanes have ended, their rows are computed and not coded
                coder.encode(table[number, :rows], family, _check_weights(weights[:rows].cpu().numpy()))
                step(rows)
        return coder.get_compressed().astype("<u4").tobytes(), float(nats) / np.log(2)

    def decode(self, coded: bytes, count: int, lanes: int, seen: Seen = lambda tokens: None) -> np.ndarray:
        """`count` tokens. From damaged bytes, or with other digits than the encoder's, it gives other tokens, or raises
        CannotDecode: check what comes back. `seen` gets the tokens of each step.

        The tokens of an encoder cost no more bits than it wrote. A decoder whose tokens cost more has read past the end
        of the bytes, and would go on to any count: it stops there."""
        left = 8.0 * len(coded) + STATE
        if find_least_bits(count, self._vocab) > left:
            raise CannotDecode
        queue, family = _load()
        coder = queue.RangeDecoder(np.frombuffer(coded, "<u4").astype(np.uint32))
        found, held = np.zeros(count, np.uint16), np.full(lanes, self._bos, np.int64)
        with self._running(lanes) as steps:
            previous = torch.full((lanes,), self._bos, device=self.device)
            for rows, places in _walk(count, lanes):
                weights, _ = steps.take(previous)
                table = weights[:rows].cpu().numpy()
                try:
                    symbols = coder.decode(family, table)
                except AssertionError as error:  # constriction's only sign that no token has the number it read
                    raise CannotDecode from error
                found[places] = symbols
                held[:rows] = symbols
                frequencies = table[np.arange(rows), symbols].astype(np.float64) + 1
                left -= PRECISION * rows - float(np.log2(frequencies).sum())
                if left < 0:
                    raise CannotDecode
                seen(symbols)
                previous = torch.from_numpy(held).to(self.device)
        return found

    @contextmanager
    def _running(self, lanes: int) -> Iterator["_Steps"]:
        training = self._model.training
        self._model.eval()
        try:
            with torch.inference_mode(), autocast(self.device):
                if self._steps is None or self._steps.count != lanes:
                    self._steps = _Steps(self._model, self._context, lanes)
                self._steps.restart()
                yield self._steps
        finally:
            self._model.train(training)


class _Steps:
    """The steps of one number of lanes: a token of each lane in, the weights of the next tokens out."""

    def __init__(self, model: GPT, context: int, count: int) -> None:
        self.count = count
        self._lanes = Lanes(model, context, count)
        self._graphs = Graphs(enabled=model.token_embedding.weight.is_cuda)
        self._places = addresses(model.parameters())

    def restart(self) -> None:
        self._lanes.restart()

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self._graphs.run(self._take, [ids], places=lambda: self._places)

    def _take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._lanes.read(ids)
        return make_weights(logits)


def make_weights(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, V) logits -> whole numbers of float32 that sum to 2^24 - V in every row, and log-probabilities.

    The coder adds one to each weight, so that no token is impossible. The likeliest token gets what rounding down left.
    """
    chances = logits.log_softmax(-1)  # subtracts the largest logit first: logits - logsumexp would cancel if large
    total = float((1 << PRECISION) - logits.shape[-1])
    weights = chances.exp().mul_(total).floor_()
    top = logits.argmax(-1, keepdim=True)
    # Rounding may push a sum above the total, too. Then the likeliest token, which has most, gives back the difference.
    rest = total - weights.sum(-1, keepdim=True)
    return weights.scatter_add_(1, top, rest), chances


def _check_weights(weights: np.ndarray) -> np.ndarray:
    """Refuses weights that no decoder could use, before anything is coded with them."""
    total = (1 << PRECISION) - weights.shape[1]
    sums = weights.sum(1, dtype=np.float64)
    if not (weights.min() >= 0 and np.abs(sums - total).max() <= 1e-6 * total):  # nor NaNs: they compare as false
        raise ParbankError(
            "the model gives no probabilities here: its logits are infinite, or not numbers; its weights are broken, "
            "and text that it compressed would be lost: use another model"
        )
    return weights


def _walk(tokens: int, lanes: int) -> Iterator[tuple[int, Any]]:
    """For every step: how many lanes still have a token, and the places of these tokens. The first lanes are one token
    longer where the tokens do not divide evenly, so lanes end from the last to the first."""
    length, longer = divmod(tokens, lanes)
    starts = np.arange(lanes) * length + np.minimum(np.arange(lanes), longer)
    for place in range(length + (longer > 0)):
        rows = lanes if place < length else longer
        yield rows, starts[:rows] + place


def _load() -> tuple[Any, Any]:
    try:
        from constriction import stream
    except ImportError as error:
        raise ParbankError(
            f"text is coded by the package constriction, which cannot be imported ({error}): pip install constriction"
        ) from error
    return stream.queue, stream.model.Categorical(perfect=False)
