"""Text from a model, one token after another."""

import math
from collections.abc import Iterator

import numpy as np
import torch

from parbank.config import require
from parbank.data.tokenizer import Tokenizer
from parbank.model import GPT
from parbank.model.stream import Segment, Stream
from parbank.precision import autocast
from parbank.runtime import check_seed

PREFILL = 4096  # tokens of a prompt read together: a bound on memory, however long it is


def sample_tokens(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str = "",
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    context: int = 1024,
) -> Iterator[int]:
    """Yields up to `tokens` tokens that continue the prompt, and stops where the model ends the document.

    temperature 0 takes the likeliest token; top_k 0 keeps all of them. The same seed gives the same text on one machine.
    Every token is computed once, over the keys and values of the `context` - 1 before it: the engine that scores a running
    text, a token at a time (parbank/model/stream.py).
    """
    check_settings(tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    require(context >= 1, f"a window has at least 1 token, got {context}")
    window = [tokenizer.bos_id, *map(int, tokenizer.encode(prompt))]
    generator = torch.Generator().manual_seed(seed)
    return _continue(model, window, tokenizer.bos_id, tokens, temperature, top_k, generator, context)


def check_settings(*, tokens: int, temperature: float, top_k: int, seed: int) -> None:
    """What can be refused before a model is read."""
    require(tokens >= 1, f"the number of tokens must be at least 1, got {tokens}")
    require(0 <= temperature < math.inf, f"the temperature must be a finite number, 0 or more, got {temperature}")
    require(top_k >= 0, f"top-k must be 0 (keep all) or positive, got {top_k}")
    check_seed(seed)


def continuation(tokenizer: Tokenizer, prompt: str, tokens: list[int]) -> str:
    """The text of tokens that follow a prompt. A tokenizer that drops the space before a document must not drop it here."""
    before = tokenizer.encode(prompt)
    previous = int(before[-1]) if len(before) else None
    return tokenizer.decode_bytes(tokens, previous=previous).decode("utf-8", errors="replace")


@torch.inference_mode()
def _continue(
    model: GPT,
    window: list[int],
    end: int,
    tokens: int,
    temperature: float,
    top_k: int,
    generator: torch.Generator,
    context: int,
) -> Iterator[int]:
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    stream, read = Stream(model, context, graph=True), 0
    try:
        for _ in range(tokens):
            while read < len(window):
                first, read = read, min(read + PREFILL, len(window))
                documents = np.flatnonzero(np.array(window) == end) if model.config.isolate_documents else None
                ids = torch.tensor(window, device=device)
                with autocast(device):
                    logits = stream.read(Segment.cut(ids, first, read, documents=documents), last=True)[-1]
            chosen = _choose(logits.double().cpu(), temperature, top_k, generator)
            if chosen == end:
                return
            window.append(chosen)
            yield chosen
    finally:
        model.train(training)


def _choose(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0 or top_k == 1:
        return int(logits.argmax())
    # The largest becomes 0 before the division, so that no temperature, however small, makes infinity of it.
    scaled = (logits - logits.max()) / temperature
    if 0 < top_k < len(scaled):
        kept = logits.topk(top_k).indices
        scaled = torch.full_like(scaled, float("-inf")).index_copy(0, kept, scaled[kept])
    return int(torch.multinomial(torch.softmax(scaled, dim=-1), 1, generator=generator))
