"""Speed and score of every scoring method on one text in one run, beside the published protocol.

    python benchmarks/scoring.py ARTIFACT_OR_CHECKPOINT --data SPEC [--stride 64] [--segments 0,32768] [--windows 1536,...]
                                 [--only sliding,...] [--tokens N] [--claim NAME] [--out DIR]

The reference is the protocol as it is published: sliding windows in batches of 32 through the compiled model in plain PyTorch,
with each window's scores picked out by the host. For ttt it is the recipe on top of it, chunk by chunk, three epochs of eager
SGD. All times are warm: what compiles has run once before on a short piece of the text, in the same shapes.

Bound of `speed`: the FLOP of a pass at the rate of a large product; sliding computes each token context / stride times. ttt has
none. Writes benchmarks/results/scoring, or the folder of --claim, after every method.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from parbank.artifact.load import LoadedModel  # noqa: E402
from parbank.data.shards import TokenSet  # noqa: E402
from parbank.data.validation import open_validation  # noqa: E402
from parbank.eval.adaptation.base import restored  # noqa: E402
from parbank.eval.methods import make_method  # noqa: E402
from parbank.eval.score import Scored  # noqa: E402
from parbank.model import GPT, ModelConfig  # noqa: E402
from parbank.ops.backend import use_backend  # noqa: E402
from parbank.precision import autocast  # noqa: E402
from parbank.runtime import Runtime, pick_device  # noqa: E402
from parbank.training.load import load_model  # noqa: E402

MEASURED = ("parbank/eval", "parbank/model", "parbank/ops", "benchmarks/scoring.py")
ROWS = 32  # windows a batch, as published
CHUNK, EPOCHS, RATE = 32_768, 3, 0.002  # the published ttt
SLIDING, TTT = "sliding, as published", "ttt, as published"


@torch.inference_mode()
def reference_sliding(
    forward: Callable[..., torch.Tensor],
    ids: torch.Tensor,
    windows: list[int],
    context: int,
    stride: int,
    nats: torch.Tensor,
) -> None:
    """Scores the windows that start at `windows`: all tokens of the one at 0, the last `stride` of the others."""
    targets = len(ids) - 1
    for first in range(0, len(windows), ROWS):
        batch = windows[first : first + ROWS]
        inputs = torch.zeros(ROWS, context, dtype=torch.long, device=ids.device)
        wanted = torch.zeros(ROWS, context, dtype=torch.long, device=ids.device)
        for row, start in enumerate(batch):
            end = min(start + context, targets)
            inputs[row, : end - start] = ids[start:end]
            wanted[row, : end - start] = ids[start + 1 : end + 1]
        with autocast(ids.device):
            losses = forward(inputs, wanted, reduction="none").float()
        for row, start in enumerate(batch):
            end = min(start + context, targets)
            begin = 0 if start == 0 else start + context - stride
            nats[begin:end] = losses[row, begin - start : end - start]


def all_windows(targets: int, context: int, stride: int) -> list[int]:
    """Starts of the windows that have something left to score."""
    return [0, *range(stride, max(stride, targets - context + stride), stride)]


def reference_ttt(
    model: GPT, forward: Callable[..., torch.Tensor], ids: torch.Tensor, context: int, stride: int, nats: torch.Tensor
) -> None:
    """Each chunk's windows, then three steps of SGD on the chunk, through the model as it is, uncompiled."""
    targets = len(ids) - 1
    chunks = math.ceil(targets / CHUNK)
    windows: list[list[int]] = [[] for _ in range(chunks)]
    for start in all_windows(targets, context, stride):
        windows[(0 if start == 0 else start + context - stride) // CHUNK].append(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for number in range(chunks):
        reference_sliding(forward, ids, windows[number], context, stride, nats)
        if number == chunks - 1:
            return
        optimizer.param_groups[0]["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * number / max(1, chunks - 1)))
        piece = ids[number * CHUNK : (number + 1) * CHUNK + 1].long()
        rows = torch.stack([piece[s : s + context + 1] for s in range(0, CHUNK - context + 1, context)])
        for _ in range(EPOCHS):
            for batch in rows.split(ROWS):
                optimizer.zero_grad(set_to_none=True)
                with autocast(ids.device):
                    loss = model(batch[:, :-1], batch[:, 1:])
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()


class Bench:
    """One model, one text, and the rows found so far."""

    def __init__(
        self,
        loaded: LoadedModel,
        tokens: np.ndarray,
        about: dict[str, Any],
        stride: int,
        place: Runtime,
        arguments: argparse.Namespace,
    ) -> None:
        self.loaded, self.tokens, self.stride, self.place = loaded, tokens, stride, place
        self.arguments, self.about = arguments, about
        self.context, self.model = loaded.context, loaded.model
        self.forward: Callable[..., torch.Tensor] = (
            torch.compile(self.model, dynamic=False) if place.is_cuda else self.model
        )
        self.rows: list[harness.Row] = []
        self.path = Path()
        self.speed: dict[str, float] = {}
        self.bpb: dict[str, float] = {}
        self.seconds: dict[str, list[float]] = {}
        # enough for a full batch of windows and one chunk to learn from, in the shapes of the whole text
        self.short = tokens[: min(len(tokens), 2 * CHUNK + 2)]
        self.model.eval()

    def ours(self, name: str, call: Callable[[TokenSet], Scored], *, warm: str = "short", repeats: int = 1) -> None:
        def run(tokens: np.ndarray) -> np.ndarray:
            return call(TokenSet([tokens])).nats

        self._measure(name, run, self.tokens if warm == "whole" else self.short, repeats)

    def reference(self, name: str, call: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """In plain PyTorch, as published."""

        def run(tokens: np.ndarray) -> np.ndarray:
            ids = torch.from_numpy(tokens.astype(np.int32)).to(self.place.device)
            nats = torch.zeros(len(tokens) - 1, device=self.place.device)
            with restored(self.model), use_backend("reference"):
                call(ids, nats)
            return nats.cpu().numpy()

        self._measure(name, run, self.short, 1)

    def _measure(self, name: str, run: Callable[[np.ndarray], np.ndarray], warm: np.ndarray, repeats: int) -> None:
        began = time.perf_counter()
        run(warm)
        setup = time.perf_counter() - began
        times = []
        # A short warm-up does not meet every shape of the whole text, such as its last batch.
        with harness.nothing_compiles() if warm is self.tokens else nullcontext():
            for _ in range(repeats):
                self.place.synchronize()
                began = time.perf_counter()
                nats = run(self.tokens)
                self.place.synchronize()
                times.append(time.perf_counter() - began)
        seconds = statistics.median(times)
        targets = len(self.tokens) - 1
        self.seconds[name], self.speed[name] = times, targets / seconds
        self.bpb[name] = Scored(self.tokens, nats).total(self.loaded.tokenizer).bpb
        print(f"{name:34} {self.bpb[name]:.5f} bpb  {seconds:8.3f} s  {targets / seconds:12,.0f} tokens/s  "
              f"(warm-up {setup:.1f} s)", flush=True)  # fmt: skip
        self._write(name, seconds, setup)

    def _write(self, name: str, seconds: float, setup: float) -> None:
        bound = None
        if self.place.is_cuda and not name.startswith(("ttt", "streaming, window")):
            work = flops_per_token(self.model, self.context, "streaming" if name.startswith("streaming") else "windows")
            again = self.context / self.stride if name.startswith("sliding") else 1.0
            bound = harness.product_rate() / (work * again)
        self.rows += [
            harness.Row("score", name, self.bpb[name], "bits/byte"),
            harness.Row("speed", name, self.speed[name], "tokens/s", bound),
            harness.Row("time", name, seconds, "s", note=f"{setup:.1f} s of warm-up and compilation before"),
        ]
        against = TTT if name.startswith("ttt") else SLIDING
        if against in self.speed and name != against:
            self.rows.append(
                harness.Row(f"speed over {against}", name, self.speed[name] / self.speed[against], "times")
            )
            self.rows.append(harness.Row(f"bpb less {against}", name, self.bpb[name] - self.bpb[against], "bits/byte"))
        extra = {
            **self.about,
            "context": self.context,
            "stride": self.stride,
            "tokens": len(self.tokens) - 1,
            "seconds": self.seconds,
        }
        self.path = harness.write(
            self.arguments.claim,
            self.rows,
            out=self.arguments.out,
            settings=harness.settings_of(self.arguments),
            measured=MEASURED,
            extra=extra,
        )


def flops_per_token(model: GPT, context: int, kind: str) -> float:
    """Products of the banks and the head, and attention: over the window when streaming, half of it in a causal window."""
    c: ModelConfig = model.config
    matrices = sum(parameter.numel() for name, parameter in model.named_parameters() if name.startswith("banks."))
    keys = context if kind == "streaming" else context / 2
    return 2.0 * (matrices + c.vocab_size * c.width) + 4.0 * keys * c.width * c.layers


def run_all(bench: Bench, only: list[str], segments: list[int], windows: list[int]) -> None:
    model, context, stride = bench.model, bench.context, bench.stride

    def wanted(name: str) -> bool:
        return not only or any(name.startswith(part) for part in only)

    def ours(label: str, name: str, *, whole: bool = True, **settings: Any) -> None:
        """A method with the settings that `parbank eval` gives it, but for these."""
        method = make_method(name, **{"context": context, **settings})
        warm, repeats = ("whole", 3) if whole else ("short", 1)
        bench.ours(label, lambda tokens: method.score(model, tokens, bench.place), warm=warm, repeats=repeats)

    if wanted("reference") or wanted("sliding"):
        bench.reference(
            SLIDING,
            lambda ids, nats: reference_sliding(
                bench.forward, ids, all_windows(len(ids) - 1, context, stride), context, stride, nats
            ),
        )
    if wanted("chunked"):
        ours("chunked", "chunked")
    for segment in segments if wanted("streaming") else []:
        ours(f"streaming, segments of {segment:,}" if segment else "streaming", "streaming", segment=segment or None)
    for window in windows:
        ours(f"streaming, window {window:,}", "streaming", context=window)
    if wanted("sliding"):
        ours("sliding", "sliding", whole=False, stride=stride)
    if wanted("ttt"):
        bench.reference(TTT, lambda ids, nats: reference_ttt(model, bench.forward, ids, context, stride, nats))
        learn = {"chunk": CHUNK, "epochs": EPOCHS, "lr": RATE}
        ours("ttt on streaming", "ttt", whole=False, scores="streaming", **learn)
        ours("ttt on sliding", "ttt", whole=False, scores="sliding", stride=stride, **learn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="ARTIFACT_OR_CHECKPOINT")
    parser.add_argument("--data", required=True)
    parser.add_argument("--stride", type=int, default=64)
    parser.add_argument("--segments", default="0,32768", help="of streaming; 0 is the default length")
    parser.add_argument("--windows", default="", help="more rows of streaming, over windows of so many tokens")
    parser.add_argument("--only", default="", help="reference, chunked, streaming, sliding, ttt; all if not given")
    parser.add_argument("--tokens", type=int, default=0, help="score only so many; 0 is all")
    parser.add_argument("--claim", default="scoring", help="the result's folder")
    arguments = harness.start(parser)
    device = pick_device("auto")
    place = Runtime(device=torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device)
    loaded = load_model(arguments.model, place.device)
    validation = open_validation(arguments.data, loaded.tokenizer)
    text = validation.tokens
    about = {
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "text_sha256": validation.sha256,
        "documents": validation.documents,
        "tokenizer": loaded.tokenizer.fingerprint,
    }
    tokens = text.read(0, min(len(text), arguments.tokens + 1) if arguments.tokens else len(text))
    bench = Bench(loaded, tokens, about, arguments.stride, place, arguments)
    numbers = {name: [int(n) for n in getattr(arguments, name).split(",") if n] for name in ("segments", "windows")}
    run_all(bench, [part for part in arguments.only.split(",") if part], **numbers)
    print(bench.path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
