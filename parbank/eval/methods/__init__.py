"""The scoring methods, by name. A new method is a file here with a subclass of `Method`, and a name in `METHODS`."""

from typing import Any

from parbank.config import choose, require
from parbank.eval.methods.adaptive import Adaptive
from parbank.eval.methods.base import Method
from parbank.eval.methods.chunked import Chunked
from parbank.eval.methods.sliding import Sliding
from parbank.eval.methods.streaming import Streaming
from parbank.eval.methods.ttt import ScoreFirst

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Chunked, Sliding, Streaming, ScoreFirst, Adaptive)
}


def make_method(name: str, **settings: Any) -> Method:
    """The method of that name. A setting that is None keeps its default; an unknown setting is an error."""
    method = choose(METHODS, name, "--method")
    given = {key: value for key, value in settings.items() if value is not None}
    known = method.settings()
    for key in given:
        owners = [other.name for other in METHODS.values() if key in other.settings()]
        remedy = f"that is for {' and '.join(owners)}" if owners else f"{name} has: {', '.join(known)}"
        require(key in known, f"--{key.replace('_', '-')} is not a setting of {name}; {remedy}")
    return method.make(given)
