"""A score with everything that a page shows of it: by context, by place, by document, token by token, and samples."""

import codecs
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parbank.data.shards import TokenSet
from parbank.data.tokenizer import DecodeState, Tokenizer
from parbank.display import END
from parbank.eval.breakdown import by_octave, find_documents
from parbank.eval.methods.base import place_in_document
from parbank.eval.sampling import sample_text, sample_tokens, write_text
from parbank.eval.score import Progress, Score, Scored, silent
from parbank.eval.windows import find_window_reach, score_windows
from parbank.model import GPT
from parbank.runtime import Runtime

SAMPLE_TOKENS = 120  # enough to see whether the model writes words, lines and indentation
PROMPT_TOKENS = 24
SHOWN_BYTES = 4000  # of the text with the bits of its tokens: a page or two
LARGEST = 1 << 22
"""Tokens at the beginning of a text that are described. So many take half a second."""
BITS_WIDTH, BITS_MOST = 0.5, 24
"""Width of a bin in the histogram of bits, and the end of its last bin, which also counts all larger values."""


@dataclass(frozen=True)
class Examined:
    """A score, and its details as plain data."""

    score: Score
    details: dict[str, Any] = field(default_factory=dict)
    """Empty on all ranks but the first, and where none were asked for."""
    sample_seconds: float = 0.0
    """Seconds of the first sample, which a run prints."""
    detail_seconds: float = 0.0
    """Seconds of all other details, which only its page shows."""


def examine(
    model: GPT,
    tokens: TokenSet,
    tokenizer: Tokenizer,
    *,
    context: int,
    runtime: Runtime,
    detailed: bool = True,
    progress: Progress = silent,
    say: Callable[[str], None] = lambda line: None,
) -> Examined:
    """The score of `score_chunked`, to the last bit, and its details. Details may fail without failing the score."""
    scored = score_windows(model, tokens, context=context, stride=context, runtime=runtime, progress=progress)
    score = scored.total(tokenizer)
    if not (detailed and runtime.is_main):
        return Examined(score)
    began = time.perf_counter()
    samples = [{"prompt": "", "text": sample_text(model, tokenizer, tokens=SAMPLE_TOKENS, context=context)}]
    sampled = time.perf_counter()
    details: dict[str, Any] = {"samples": samples}
    try:
        samples += continue_text(model, tokenizer, scored.tokens, context)
        details |= describe(scored, tokenizer, context, isolated=model.config.isolate_documents)
    except Exception as error:
        say(f"warning: the score could not be described ({type(error).__name__}: {error}); the run's page will lack it")
    return Examined(score, details, sampled - began, time.perf_counter() - sampled)


def describe(scored: Scored, tokenizer: Tokenizer, context: int, *, isolated: bool = False) -> dict[str, Any]:
    """Three divisions of the score, a histogram of bits, and the beginning of the text with the bits of its tokens."""
    few = Scored(scored.tokens[: LARGEST + 1], scored.nats[:LARGEST])
    sizes, bits = few.byte_counts(tokenizer), few.nats.astype(np.float64) / np.log(2)
    places = place_in_document(few.tokens, tokenizer.bos_id)
    reach = find_window_reach([(0, len(few.nats))], len(few.nats), context, context)
    starts = find_documents(few.tokens, tokenizer.bos_id)
    return {
        "by_context": [
            _plain(part) for part in by_octave(np.minimum(reach, places) if isolated else reach, sizes, bits)
        ],
        "by_place": [_plain(part) for part in by_octave(places, sizes, bits)],
        "documents": {
            "bytes": np.add.reduceat(sizes, starts).tolist(),
            "bits": np.add.reduceat(bits, starts).round(2).tolist(),
            "whole_text": len(few.nats) == len(scored.nats),
        },
        "bits_histogram": _histogram(bits),
        "surprise": _surprise(few.tokens, bits, tokenizer),
    }


def _plain(part: Any) -> dict[str, Any]:
    return {
        "first": part.first,
        "last": part.last,
        "tokens": part.tokens,
        "bytes": part.bytes,
        "bits": round(part.bits, 2),
    }


def _histogram(bits: np.ndarray) -> dict[str, Any]:
    edges = np.arange(0, BITS_MOST + BITS_WIDTH, BITS_WIDTH)
    counts, _ = np.histogram(np.minimum(bits, BITS_MOST - BITS_WIDTH / 2), edges)
    return {"width": BITS_WIDTH, "counts": counts.tolist()}


def _surprise(tokens: np.ndarray, bits: np.ndarray, tokenizer: Tokenizer) -> dict[str, Any]:
    """Tokens that share a character are one piece: only together are they text. So are case operators and the next token."""
    decoder, state = codecs.getincrementaldecoder("utf-8")(errors="replace"), DecodeState(int(tokens[0]))
    pieces, costs, size, cost = [], [], 0, 0.0
    for n in range(min(len(bits), SHOWN_BYTES)):  # most tokens have a byte at least
        if size >= SHOWN_BYTES:
            break
        token = int(tokens[n + 1])
        data = tokenizer.decode_bytes([token], state=state)
        text = decoder.decode(data) or (END if token == tokenizer.bos_id else "")
        size, cost = size + len(data), cost + float(bits[n])
        if text:
            pieces.append(text)
            costs.append(round(cost, 2))
            cost = 0.0
    return {"pieces": pieces, "bits": costs, "bytes": size}


def continue_text(model: GPT, tokenizer: Tokenizer, tokens: np.ndarray, context: int) -> list[dict[str, str]]:
    """A sample after the beginning of a text; none if the text begins with an empty document."""
    prompt = tokens[1 : 1 + PROMPT_TOKENS]
    prompt = prompt[: int(np.argmax(prompt == tokenizer.bos_id)) if tokenizer.bos_id in prompt else len(prompt)]
    if not len(prompt):
        return []
    more = sample_tokens(model, tokenizer, prompt, tokens=SAMPLE_TOKENS, context=context)
    given = tokenizer.decode_bytes(prompt).decode("utf-8", errors="replace")
    return [{"prompt": given, "text": "".join(write_text(tokenizer, prompt, more))}]
