"""Writing with a model: `sample`."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from parbank import ahead
from parbank.cli.terminal import DeviceOption, ThreadsOption, printable
from parbank.errors import ConfigError, ParbankError

QUIT = "/quit"

Write = Callable[[str, int], Iterable[str]]
"""Prompt and seed -> the text that follows, piece by piece."""


def sample(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="A .pbk file, a checkpoint, or a run folder.")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue; if not given, a new document.")] = None,
    tokens: Annotated[int, typer.Option(help="Most tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; 1 samples as the model says.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Keep only the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Keep only the likeliest tokens that together have this share of the probability.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; repeatable.", show_default=False)
    ] = None,
    samples: Annotated[int, typer.Option(help="Write several texts, each with the seed after the last one's.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed writes the same text.")] = 0,
    interactive: Annotated[
        bool, typer.Option("--interactive", help=f"Read prompts line by line until {QUIT} or the end of the input.")
    ] = False,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Sample text from a model.

    The text goes to standard output, the speed to standard error. It ends early where the model ends the document. On a
    terminal, control characters the model writes are shown as signs; piped, the text is exact.

    Examples:

      parbank sample runs/demo --prompt "def main" --top-p 0.9 --samples 3

      parbank sample model.pbk --prompt "Q: " --stop "Q:" --tokens 50

      parbank sample model.pbk --interactive
    """
    if samples < 1:
        raise ConfigError(f"--samples must be at least 1, got {samples}")
    if interactive and (prompt is not None or samples != 1):
        raise ConfigError("--interactive reads prompts and answers each once; leave --prompt and --samples out")
    ahead.begin(device)
    from parbank import runtime
    from parbank.eval.sampling import check_settings, sample_tokens, write_text
    from parbank.threads import compute_with
    from parbank.training.compiled import use_compile_cache
    from parbank.training.load import load_model

    use_compile_cache()
    words = tuple(stop or ())
    check_settings(tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=words)
    with runtime.start(device) as place, compute_with(threads):
        if not place.is_main:
            return
        loaded = load_model(artifact, place.device)
        ahead.wait()

        def write(text: str, number: int) -> _Writing:
            before = loaded.tokenizer.encode(text)
            drawn = sample_tokens(
                loaded.model,
                loaded.tokenizer,
                before,
                tokens=tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=number,
                context=loaded.context,
            )
            return _Writing(drawn, lambda counted: write_text(loaded.tokenizer, before, counted, words))

        if interactive:
            _interact(write, seed)
            return
        for number in range(seed, seed + samples):
            writing = write(prompt or "", number)
            if samples > 1:
                print(f"--- seed {number}")
            _show(prompt or "")
            for piece in writing:
                _show(piece)
            print(flush=True)
            print(f"[{writing.speed}]", file=sys.stderr)


class _Writing:
    """A text on its way, piece by piece, whose tokens are counted and timed."""

    def __init__(self, tokens: Iterator[int], write: Callable[[Iterator[int]], Iterator[str]]) -> None:
        self._tokens, self._write = tokens, write
        self._count, self._seconds = 0, 0.0

    def __iter__(self) -> Iterator[str]:
        began = time.perf_counter()
        yield from self._write(self._counted())
        self._seconds = time.perf_counter() - began

    def _counted(self) -> Iterator[int]:
        for token in self._tokens:
            self._count += 1
            yield token

    @property
    def speed(self) -> str:
        return f"{self._count} tokens, {self._count / max(self._seconds, 1e-9):.0f} tokens/s"


def _interact(write: Write, seed: int) -> None:
    """Prompt in, continuation out, until the input ends. Ctrl-C ends the text being written, or, at the prompt, all."""
    asks = sys.stdin.isatty()
    if asks:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (lets `input` edit lines and remember them)
        print(f"A line in, its continuation out; Ctrl-C stops a text, {QUIT} or Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            line = input("> " if asks else "")
        except (EOFError, KeyboardInterrupt):
            break
        if line.strip() == QUIT:
            return
        try:
            for piece in write(line, seed):
                _show(piece)
        except KeyboardInterrupt:
            print(" [stopped]", file=sys.stderr, end="", flush=True)
        except ParbankError as error:
            print(f"error: {error}", file=sys.stderr)
        print(flush=True)
        seed += 1
    if asks:
        print()


def _show(text: str) -> None:
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


COMMANDS = {"sample": sample}
