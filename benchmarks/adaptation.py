"""What each ingredient of `parbank eval --method adaptive` gains, on one text.

    python benchmarks/adaptation.py MODEL --data text:val=FILE_OR_FOLDER [--limit TOKENS] [--set lr=0.001] [--claim NAME]

MODEL is an artifact, a checkpoint or a run folder: the demo's model on a CPU (--limit 60000 takes minutes on two cores), the
sprint's artifact on a GPU. Choose settings on text that is not reported. The passes of the model run once; every mixture is
computed from their scores.

Rows, all in bits per byte: the score of a mixture, its gain over streaming, and how much its worst document loses to streaming.
Bound: none; streaming is the baseline. Writes benchmarks/results/adaptation, or the folder of --claim.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402

from parbank.config import parse_value  # noqa: E402
from parbank.data.shards import TokenSet  # noqa: E402
from parbank.data.validation import open_validation  # noqa: E402
from parbank.eval.methods import make_method  # noqa: E402
from parbank.eval.methods.adaptive import Adaptive  # noqa: E402
from parbank.eval.methods.streaming import Streaming  # noqa: E402
from parbank.eval.score import Scored, Text, silent  # noqa: E402
from parbank.runtime import Runtime, pick_device  # noqa: E402
from parbank.training.load import load_model  # noqa: E402

MEASURED = ("parbank/eval", "benchmarks/adaptation.py")


class Variant(NamedTuple):
    """A mixture to be scored."""

    method: Adaptive
    adapted: np.ndarray | None
    """Nats of the model that reads each document alone, at every rate and temperature."""
    scopes: tuple[str, ...]
    """Where n-grams are counted."""


def variants(full: Adaptive, unlearnt: np.ndarray, cold: np.ndarray, adapted: np.ndarray) -> dict[str, Variant]:
    """Nats at every rate and temperature: of the model that learns nothing, of factors that start anew with each document,
    and of factors that start from what earlier documents taught."""
    change, both = dataclasses.replace, ("document", "text")
    one, step = full.temperatures.index(1.0), len(full.temperatures)
    plain, anew, learnt = (
        nats[:, one::step] for nats in (unlearnt, cold, adapted)
    )  # the columns of temperature 1, for each rate
    return {
        "each document alone": Variant(full, plain, ()),
        "temperatures": Variant(full, unlearnt, ()),
        "factors that start anew": Variant(full, anew, ()),
        "factors of each document": Variant(full, learnt, ()),
        "factors and temperatures": Variant(full, adapted, ()),
        "n-grams of the document": Variant(full, None, ("document",)),
        "n-grams of the text": Variant(full, None, ("text",)),
        "n-grams of both": Variant(full, None, both),
        "everything": Variant(full, adapted, both),
        "everything, weights that do not learn": Variant(change(full, mix_rate=0.0), adapted, both),
        "everything, hardly guarded": Variant(change(full, prior=1e-9, allowance=1e9), adapted, both),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", required=True, help="as in `parbank eval`; documents matter")
    parser.add_argument("--limit", type=int, help="tokens of the text, from its start; all if not given")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the method")
    parser.add_argument("--claim", default="adaptation", help="the result's folder")
    arguments = harness.start(parser)
    place = Runtime(device=pick_device(arguments.device))
    loaded = load_model(arguments.model, place.device)
    validation = open_validation(arguments.data, loaded.tokenizer, say=lambda line: print(line, file=sys.stderr))
    tokens = validation.tokens.read(0, min(arguments.limit or len(validation.tokens), len(validation.tokens)))
    given = dict(assignment.split("=", 1) for assignment in arguments.set)
    method = make_method("adaptive", context=loaded.context, **{name: parse_value(v) for name, v in given.items()})
    assert isinstance(method, Adaptive)
    if not method.rank or 1.0 not in method.temperatures:
        parser.error("the table of ingredients needs factors (rank above 0) and a temperature of 1")

    began = time.perf_counter()
    plain = Streaming(context=loaded.context).score(loaded.model, TokenSet([tokens]), place).nats
    streamed = time.perf_counter()
    text = Text.load(TokenSet([tokens]), place)
    adapted = method.read_documents(loaded.model, text, place, silent)
    seconds = {"streaming": streamed - began, "factors and temperatures": time.perf_counter() - streamed}
    cold = dataclasses.replace(method, warm=0.0).read_documents(loaded.model, text, place, silent)
    unlearnt = dataclasses.replace(method, lr=0.0).read_documents(loaded.model, text, place, silent)

    bos_id, sizes = loaded.model.config.bos_id, Scored(tokens, plain).byte_counts(loaded.tokenizer)
    ngrams = method.count_ngrams(tokens, bos_id)
    starts = np.flatnonzero(tokens[:-1] == bos_id)
    rows = [harness.Row("streaming", "bpb", bits(plain) / sizes.sum(), "bpb")]
    for name, variant in variants(method, unlearnt, cold, adapted).items():
        began = time.perf_counter()
        own = {scope: ngrams[scope] for scope in variant.scopes if scope in ngrams}
        nats = variant.method.mix(tokens, bos_id, sizes, plain, variant.adapted, own)
        seconds.setdefault(name, time.perf_counter() - began)
        lost = np.add.reduceat(nats - plain, starts) / np.log(2) / np.maximum(np.add.reduceat(sizes, starts), 1)
        gain = (bits(plain) - bits(nats)) / sizes.sum()
        rows += [
            harness.Row(name, "bpb", bits(nats) / sizes.sum(), "bpb"),
            harness.Row(name, "gain", gain, "bpb"),
            harness.Row(name, "worst document", float(lost.max()), "bpb"),
        ]
        print(f"{name:45} {rows[-3].value:.4f}  gain {gain:.4f}  worst document {lost.max():+.5f}", flush=True)
    extra: dict[str, Any] = {
        "text": {"tokens": len(tokens), "bytes": int(sizes.sum()), "documents": len(starts)},
        "method": method.describe(),
        "seconds": seconds,
    }
    settings = harness.settings_of(arguments)
    print(harness.write(arguments.claim, rows, out=arguments.out, settings=settings, measured=MEASURED, extra=extra))


def bits(nats: np.ndarray) -> float:
    return float(nats.sum(dtype=np.float64) / np.log(2))


if __name__ == "__main__":
    main()
