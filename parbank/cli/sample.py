"""Writing with a model: `sample`."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from parbank.cli.terminal import DeviceOption, printable


def sample(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="A .pbk file, a checkpoint, or a run folder.")],
    prompt: Annotated[str, typer.Option(help="Text to continue; empty starts a new document.")] = "",
    tokens: Annotated[int, typer.Option(help="Most tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; 1 samples as the model says.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Keep only the k likeliest tokens; 0 keeps all.")] = 0,
    seed: Annotated[int, typer.Option(help="The same seed writes the same text.")] = 0,
    device: DeviceOption = "auto",
) -> None:
    """Let a model write.

    The text goes to standard output, the speed to standard error. It ends early where the model ends the document. On a
    terminal, control characters the model writes are shown as signs; piped, the text is exact.
    """
    from parbank import runtime
    from parbank.eval.sampling import check_settings, continuation, sample_tokens
    from parbank.training.load import load_model

    check_settings(tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
    with runtime.start(device) as place:
        loaded = load_model(artifact, place.device)
        began = time.perf_counter()
        written = list(
            sample_tokens(
                loaded.model,
                loaded.tokenizer,
                prompt,
                tokens=tokens,
                temperature=temperature,
                top_k=top_k,
                seed=seed,
                context=loaded.context,
            )
        )
        seconds = time.perf_counter() - began
    if not place.is_main:
        return
    text = prompt + continuation(loaded.tokenizer, prompt, written)
    print(printable(text) if sys.stdout.isatty() else text)
    print(f"[{len(written)} tokens, {len(written) / max(seconds, 1e-9):.0f} tokens/s]", file=sys.stderr)


COMMANDS = {"sample": sample}
