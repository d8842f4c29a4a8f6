"""Coders: integers to few bytes and back. A new coder is a file here and a name in `CODERS`."""

from parbank.quant.coders.ans import ANS
from parbank.quant.coders.base import Coder
from parbank.quant.coders.fixed import FIXED
from parbank.quant.coders.lzma import LZMA

CODERS: dict[str, Coder] = {coder.name: coder for coder in (ANS, LZMA)}


def find_reader(tag: int) -> Coder | None:
    """The coder of a stream by its first byte. `FIXED` cannot be selected: it is the fallback of a stream."""
    return next((coder for coder in (FIXED, *CODERS.values()) if coder.tag == tag), None)
