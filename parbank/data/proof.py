"""The proof that tokens are a text: they stand for exactly its bytes, by the same table that counts bytes for the score.

A model's probability of the tokens is then at most its probability of the text, whatever the tokenizer does: different
texts have different tokens. So no tokenizer can make a text look cheaper than it is to the model.
"""

import numpy as np

from parbank.data.tokenizer import Tokenizer
from parbank.errors import DataError

PROVED = "proved"
NOT_PROVED = "not proved"
_SHOWN = 24  # bytes of a difference that an error quotes


def check_tokens(tokenizer: Tokenizer, tokens: np.ndarray, document: bytes, name: str) -> None:
    """Refuses tokens (without the BOS before them) that do not stand for exactly the bytes of the document."""
    if len(inside := np.flatnonzero(tokens == tokenizer.bos_id)):
        raise _refusal(name, document, f"token {int(inside[0]) + 1} of {len(tokens)} is BOS, which ends a document")
    found = tokenizer.decode_bytes(tokens)
    if found != document:
        raise _refusal(name, document, _describe_difference(found, document))


def describe_prefix(tokenizer: Tokenizer) -> str | None:
    """The one difference that is allowed, in words: the published FineWeb tokenizer puts a space before each document."""
    return "the tokenizer puts a space before each document, which counts no byte" if tokenizer.adds_prefix else None


def _describe_difference(found: bytes, document: bytes) -> str:
    length = min(len(found), len(document))
    theirs, ours = (np.frombuffer(text[:length], np.uint8) for text in (found, document))
    differs = np.flatnonzero(theirs != ours)
    place = int(differs[0]) if len(differs) else length
    there, here = (_quote(text[place : place + _SHOWN]) for text in (document, found))
    return (
        f"from byte {place:,} on the text has {there} and the tokens stand for {here} "
        f"({len(document):,} bytes and {len(found):,})"
    )


def _quote(text: bytes) -> str:
    return ascii(text.decode("utf-8", errors="replace")) if text else "nothing"


def _refusal(name: str, document: bytes, fault: str) -> DataError:
    return DataError(
        f"{name} (it begins {_quote(document[:_SHOWN])}) cannot be scored: its tokens are not its text; {fault}. The model's "
        "tokenizer rewrites or loses text; use a model whose tokenizer keeps every byte, as those of `parbank train` do"
    )
