"""The program of the counted archive (parbank.artifact.code): training and scoring by `name=value`, and nothing else.

    train recipe=NAME out=FOLDER [a.b=value ...]     any setting that `parbank recipes NAME` prints
    train config=PATH out=FOLDER [a.b=value ...]     as an earlier run, by its folder or config.json: a plan, too
    score model=PATH [data=SPEC] [method=NAME ...]   any setting that `parbank eval --methods` prints

Both print one line of JSON. The command line with its help, checks and tables is `parbank` (parbank.cli).
"""

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parbank import runtime
from parbank.config import override, parse_value
from parbank.data.validation import open_validation
from parbank.errors import ConfigError, ParbankError
from parbank.eval.methods import make_method
from parbank.recipes import get_recipe
from parbank.training.compiled import use_compile_cache
from parbank.training.folder import load_run_config
from parbank.training.load import load_model
from parbank.training.run import run

USAGE = (
    "usage: train recipe=NAME|config=PATH out=FOLDER [a.b=value ...] | score model=PATH [data=SPEC] [name=value ...]"
)


def train(
    place: runtime.Runtime, *, out: str, recipe: str = "", config: str = "", **settings: str
) -> dict[str, Any] | None:
    """Trains, scores and packs; the summary, or None where a signal stopped it."""
    if bool(recipe) == bool(config):
        raise ConfigError("train takes recipe=NAME, or config=PATH, the folder or the config.json of an earlier run")
    changes = [f"{name}={value}" for name, value in settings.items()]
    wanted = load_run_config(Path(config), *changes) if config else override(get_recipe(recipe), *changes)
    return run(wanted, place, Path(out)).summary


def score(
    place: runtime.Runtime, model: str, data: str | None = None, method: str = "chunked", **settings: str
) -> dict[str, Any]:
    """The score of a model on the validation text of a data spec: that of its training, if none is given."""
    loaded = load_model(Path(model), place.device)
    spec = data or loaded.data
    if spec is None:
        raise ConfigError(f"{model} was trained on text without a public name; say by data=SPEC what to score")
    given = {name: parse_value(text) for name, text in settings.items()}
    scoring = make_method(method, **{"context": loaded.context, **given})
    text = place.in_turn(lambda: open_validation(spec, loaded.tokenizer))
    scored = scoring.score(loaded.model, text.tokens, place, tokenizer=loaded.tokenizer)
    result = scored.total(loaded.tokenizer)
    about = {"val_bpb": result.bpb, "val_loss": result.loss, "tokens": result.tokens, "bytes": result.bytes}
    return about | {"text": text.text}


def main(words: list[str]) -> None:
    """Runs a command by its words. An error that a user can fix ends in one message."""
    commands: dict[str, Callable[..., dict[str, Any] | None]] = {"train": train, "score": score}
    if not words or words[0] not in commands or any("=" not in word for word in words[1:]):
        raise SystemExit(USAGE)
    command, given = commands[words[0]], dict(word.split("=", 1) for word in words[1:])
    try:
        inspect.signature(command).bind(None, **given)
    except TypeError as error:
        raise SystemExit(f"error: {error}; {USAGE}") from None
    use_compile_cache()
    try:
        with runtime.start() as place:
            result = command(place, **given)
            if place.is_main:
                print(json.dumps(result))
    except ParbankError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
