"""Coders: integers to few bytes and back. A new coder is a file here and a name in `CODERS`."""

from parbank.quant.coders.ans import ANS
from parbank.quant.coders.base import Coder
from parbank.quant.coders.fixed import FIXED
from parbank.quant.coders.lzma import LZMA

CODERS: dict[str, Coder] = {coder.name: coder for coder in (ANS, LZMA)}
READERS: dict[int, Coder] = {coder.tag: coder for coder in (*CODERS.values(), FIXED)}
"""Readers by the first byte of a stream. `FIXED` cannot be selected: it is the fallback of a stream."""
