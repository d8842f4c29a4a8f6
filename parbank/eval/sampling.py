"""Samples text from a model, token by token."""

import codecs
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from parbank.config import require
from parbank.data.tokenizer import DecodeState, Tokenizer
from parbank.errors import ParbankError
from parbank.model import GPT
from parbank.model.protocol import PlainModel
from parbank.model.stream import BEFORE, Stream
from parbank.precision import autocast
from parbank.runtime import check_seed

PREFILL = 2048  # tokens of a prompt read together: a bound on memory, and on the time between two steps

Prompt = Sequence[int] | np.ndarray
"""The tokens of a text to continue, without BOS, as `Tokenizer.encode` gives them."""
Reader = Callable[[list[int]], Tensor | None]
"""All tokens so far -> the logits of the next. None: only a part of them has been read yet; call it again."""


def sample_tokens(model: GPT | PlainModel, tokenizer: Tokenizer, prompt: Prompt = (), **settings: Any) -> Iterator[int]:
    """Yields tokens that continue the prompt, and stops where the model ends the document. The settings are those of
    `draw_steps`."""
    return (found.choice.token for found in draw_tokens(model, tokenizer, prompt, likeliest=0, **settings))


@dataclass(frozen=True, kw_only=True)
class NextToken:
    """A token that could come next."""

    token: int
    probability: float
    """The model's own, before temperature, top-k and top-p."""
    chance: float
    """The probability of being drawn, after them."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A token that was drawn, and the likeliest tokens at its place, in falling order."""

    choice: NextToken
    likeliest: tuple[NextToken, ...]


def draw_tokens(model: GPT | PlainModel, tokenizer: Tokenizer, prompt: Prompt = (), **settings: Any) -> Iterator[Drawn]:
    """The tokens of `sample_tokens`, each with its probability and the `likeliest` tokens that could have come. The settings
    are those of `draw_steps`."""
    return (found for found in draw_steps(model, tokenizer, prompt, **settings) if found is not None)


def draw_steps(
    model: GPT | PlainModel,
    tokenizer: Tokenizer,
    prompt: Prompt = (),
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    context: int = 1024,
    likeliest: int = 10,
) -> Iterator[Drawn | None]:
    """`draw_tokens` in steps of limited time, for a server that has other work: a None follows each part of a long prompt
    that was read.

    It draws up to `tokens` tokens. temperature 0 takes the likeliest token. top_k keeps the k likeliest tokens (0: all); of
    these, top_p keeps the fewest whose probabilities sum to it. The same seed gives the same text on one machine.
    """
    check_settings(tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    require(_is_whole(context) and context >= 1, f"a window is a whole number of tokens, at least 1; got {context!r}")
    window = [tokenizer.bos_id, *map(int, prompt)]
    generator = torch.Generator().manual_seed(int(seed))
    drawn: list[Drawn] = []

    def choose(logits: Tensor) -> int:
        found = logits.double().cpu()
        if found.isnan().any() or found.isposinf().any():
            raise ParbankError(
                "the model gave logits that are not numbers, so no token can be drawn; its weights are damaged"
            )
        own, chances = torch.softmax(found, dim=-1), find_chances(found, temperature, top_k, top_p)
        token = _pick(chances, generator)
        best = found.topk(min(likeliest, len(found))).indices.tolist()
        each = [NextToken(token=t, probability=float(own[t]), chance=float(chances[t])) for t in (token, *best)]
        drawn.append(Drawn(choice=each[0], likeliest=tuple(each[1:])))
        return token

    steps = _extend_in_steps(model, window, tokens, context=context, choose=choose, end=tokenizer.bos_id)
    return (None if token is None else drawn.pop() for token in steps)


def check_settings(
    *, tokens: int, temperature: float, top_k: int, seed: int, top_p: float = 1.0, stop: Sequence[str] = ()
) -> None:
    """Refuses bad settings before a model is read."""
    require(
        _is_whole(tokens) and tokens >= 1, f"the number of tokens must be a whole number, at least 1; got {tokens!r}"
    )
    require(
        _is_number(temperature) and 0 <= temperature < math.inf,
        f"the temperature must be a finite number, 0 or more, got {temperature!r}",
    )
    require(_is_whole(top_k) and top_k >= 0, f"top-k must be 0 (keep all) or a positive whole number, got {top_k!r}")
    require(
        _is_number(top_p) and 0 < top_p <= 1,
        f"top-p is a share of the probability, above 0 and at most 1 (keep all), got {top_p!r}",
    )
    require(not isinstance(stop, str), f"stop strings come as a list, such as [{stop!r}]")
    require(
        isinstance(stop, Sequence) and all(isinstance(word, str) for word in stop),
        f"stop strings come as a list of strings, got {stop!r}",
    )
    require(all(stop), "a stop string must not be empty: the text would end before it begins")
    check_seed(seed)


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def sample_text(model: GPT | PlainModel, tokenizer: Tokenizer, **settings: Any) -> str:
    """A document that the model begins, by the settings of `sample_tokens`."""
    return "".join(write_text(tokenizer, (), sample_tokens(model, tokenizer, **settings)))


def write_text(tokenizer: Tokenizer, prompt: Prompt, tokens: Iterable[int], stop: Sequence[str] = ()) -> Iterator[str]:
    """The text of tokens that follow a prompt, piece by piece, as soon as it is certain.

    It ends before the first complete stop string, so a possible beginning of one is held back, and so are the first
    bytes of a character. The bytes of a token may depend on the prompt: a space before a document is none after a prompt,
    and a case operator at the prompt's end changes the first letters.
    """
    state = DecodeState()
    tokenizer.decode_bytes(prompt, state=state)
    decoder, held = codecs.getincrementaldecoder("utf-8")(errors="replace"), ""
    for token in tokens:
        held += decoder.decode(tokenizer.decode_bytes([token], state=state))
        if (end := _find_stop(held, stop)) is not None:
            yield held[:end]
            return
        certain = len(held) - _partial_stop(held, stop)
        if certain:
            yield held[:certain]
            held = held[certain:]
    held += decoder.decode(b"", final=True)
    if held:
        yield held[: _find_stop(held, stop)]


def _find_stop(text: str, stop: Sequence[str]) -> int | None:
    """The start of the stop string that is complete first, however many tokens it took."""
    found = [(place + len(word), place) for word in stop if (place := text.find(word)) >= 0]
    return min(found)[1] if found else None


def _partial_stop(text: str, stop: Sequence[str]) -> int:
    """The number of characters at the end of the text that may begin a stop string."""
    lengths = (n for word in stop for n in range(1, min(len(word), len(text) + 1)) if text.endswith(word[:n]))
    return max(lengths, default=0)


def extend(
    model: GPT | PlainModel,
    window: Sequence[int],
    tokens: int,
    *,
    context: int,
    choose: Callable[[Tensor], int],
    end: int = -1,
) -> Iterator[int]:
    """Yields up to `tokens` tokens after the tokens of `window`, up to the token `end`. `choose` picks each from its
    logits."""
    steps = _extend_in_steps(model, window, tokens, context=context, choose=choose, end=end)
    return (token for token in steps if token is not None)


@torch.inference_mode()
def _extend_in_steps(
    model: GPT | PlainModel,
    window: Sequence[int],
    tokens: int,
    *,
    context: int,
    choose: Callable[[Tensor], int],
    end: int,
) -> Iterator[int | None]:
    """`extend`, with a None after each part of the window that was read."""
    training = model.training
    model.eval()
    sight = find_sight(model, context) if isinstance(model, GPT) else context
    read = _read_stream(model, end, context) if isinstance(model, GPT) else _read_window(model, context)
    text = list(window[-sight:])
    try:
        for _ in range(tokens):
            while (logits := read(text)) is None:
                yield None
            chosen = choose(logits)
            if chosen == end:
                return
            text.append(chosen)
            yield chosen
    finally:
        model.train(training)


def find_sight(model: GPT, context: int) -> int:
    """The number of tokens at the end of a text on which the next one depends: in each layer a token sees `context` - 1
    before it, and an embedding a few more. Earlier tokens of a long prompt need no reading."""
    return model.config.layers * (context - 1) + 1 + BEFORE


def _read_stream(model: GPT, end: int, context: int) -> Reader:
    """Computes every token once, over the keys and values of the `context` - 1 tokens before it
    (parbank/model/stream.py)."""
    stream, done = Stream(model, context, graph=True), 0
    device = next(model.parameters()).device
    ids, known = torch.zeros(0, dtype=torch.int64, device=device), 0  # with room for tokens to come
    documents: np.ndarray | None = None

    def read(text: list[int]) -> Tensor | None:
        nonlocal ids, known, done, documents
        if known == 0 and model.config.isolate_documents:
            documents = np.flatnonzero(np.array(text) == end)  # all: sampling ends where the next document begins
        if len(text) > len(ids):
            ids = F.pad(ids, (0, len(text) - len(ids) + PREFILL))
        if len(text) > known:
            ids[known : len(text)] = torch.tensor(text[known:], device=device)
            known = len(text)
        first, done = done, min(done + PREFILL, known)
        with autocast(device):
            logits = stream.read(ids, first, done, documents=documents, last=True)[-1]
        return logits if done == known else None

    return read


def _read_window(model: PlainModel, context: int) -> Reader:
    """Computes the whole window for every token: the only way for a model that parbank did not build."""
    device = model.device

    def read(text: list[int]) -> Tensor:
        with autocast(device):
            return model(torch.tensor([text[-context:]], device=device))[0, -1]

    return read


def find_chances(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """The probability with which each token is drawn, from logits (vocabulary,) in float64."""
    if temperature == 0 or top_k == 1:
        return torch.zeros_like(logits).index_fill(0, logits.argmax(), 1.0)
    # Subtract the largest before dividing, so that no small temperature gives infinity.
    scaled = (logits - logits.max()) / temperature
    if 0 < top_k < len(scaled):
        kept = logits.topk(top_k).indices
        scaled = torch.full_like(scaled, float("-inf")).index_copy(0, kept, scaled[kept])
    chances = torch.softmax(scaled, dim=-1)
    if top_p < 1:
        falling, order = chances.sort(descending=True, stable=True)
        before = falling.cumsum(0) - falling  # of likelier tokens: a token is needed while that is below p
        chances[order[before >= top_p]] = 0
        chances /= chances.sum()
    return chances


def _pick(chances: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(chances, 1, generator=generator))
