"""Prepares text in a process of its own, while this process compiles kernels.

Python runs one thread of a process at a time. The threads that compile kernels hold its lock for long, and a preparation
beside them would wait for it after every NumPy call (docs/log/startup.md).

    python -m parbank.data.apart SPEC VOCABULARY CACHE TOKENIZER [quiet]

TOKENIZER are the settings of a `TokenizerConfig`, as JSON.

The child prints one JSON object a line: a message to show, or the error that ended it. A bar goes to the terminal by
itself, since the child has this process's stderr.
"""

import json
import subprocess
import sys
from pathlib import Path

from parbank import errors
from parbank.config import from_dict
from parbank.data.progress import Say, say_nothing
from parbank.data.tokenizer import PLAIN, TokenizerConfig
from parbank.data.workers import child_environment


def prepare_apart(spec: str, *, vocab_size: int, cache: Path, say: Say, tokenizer: TokenizerConfig = PLAIN) -> None:
    """Prepares the text of a data spec in the cache, as `ensure_ready` does. A child that dies without a message leaves the
    work to the caller."""
    words = [
        spec,
        str(vocab_size),
        str(cache),
        json.dumps(tokenizer.changes),
        *(["quiet"] if say is say_nothing else []),
    ]
    command = [sys.executable, "-P", "-m", "parbank.data.apart", *words]  # -P as in workers.py
    with subprocess.Popen(
        command, env=child_environment(), stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                _pass_on(line, say)
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        say(f"note: the process that prepared the data ended with {child.returncode}; preparing in this one")


def _pass_on(line: str, say: Say) -> None:
    try:
        message = json.loads(line)
    except ValueError:  # a library's own words
        message = {"text": line.rstrip()}
    if "error" in message:
        raise getattr(errors, message["error"])(message["text"])
    say(message["text"])


def main(spec: str, vocab_size: str, cache: str, tokenizer: str, *words: str) -> None:
    from parbank.data.dataset import ensure_ready

    def tell(text: str, **more: str) -> None:
        print(json.dumps({"text": text, **more}), flush=True)

    try:
        config = from_dict(TokenizerConfig, json.loads(tokenizer), path="tokenizer")
        ensure_ready(spec, int(vocab_size), Path(cache), say_nothing if "quiet" in words else tell, tokenizer=config)
    except errors.ParbankError as error:
        tell(str(error), error=type(error).__name__)


if __name__ == "__main__":
    main(*sys.argv[1:])
