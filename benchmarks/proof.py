"""What it costs to prove a score: that tokens are their text, and that probabilities sum to 1.

    python benchmarks/proof.py [--data SPEC] [--vocab-sizes 1024,8192] [--tokens 24576]

`parbank eval` encodes each validation document and proves its tokens, on one core of this process; encoding may use more.
Every score sums the probabilities of all tokens at a sample of positions: here the seconds of these sums in a score by the
model of `make demo` with random weights. The times are medians of several rounds.

Bound: none; each cost is also a share, of encoding and of the score. Writes benchmarks/results/proof.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from parbank.data.proof import check_tokens  # noqa: E402
from parbank.data.shards import TokenSet  # noqa: E402
from parbank.data.sources import parse_spec  # noqa: E402
from parbank.data.sources.source import Corpus, Skipped  # noqa: E402
from parbank.data.tokenizer import Tokenizer  # noqa: E402
from parbank.eval import audit  # noqa: E402
from parbank.eval.methods import adaptive, make_method  # noqa: E402
from parbank.files import default_cache  # noqa: E402
from parbank.model import GPT, ModelConfig  # noqa: E402
from parbank.recipes import get_recipe  # noqa: E402
from parbank.runtime import Runtime  # noqa: E402

MEASURED = (
    "parbank/data/proof.py",
    "parbank/data/tokenizer.py",
    "parbank/eval/audit.py",
    "parbank/eval/mixing/audit.py",
    "benchmarks/proof.py",
)
ROUNDS = 7
METHODS = {"chunked": 1, "streaming": 1, "adaptive": 4}
"""Methods of scoring, and by how much fewer tokens each is measured."""
DOCUMENT = 1024  # tokens, about 3 kB of text


def read_documents(spec: str, megabytes: float) -> list[bytes]:
    """The first documents of a text, about so many megabytes of them."""
    opened = parse_spec(spec).open(default_cache(), print)
    if not isinstance(opened, Corpus):
        raise SystemExit(f"--data must be text, got {spec}: of shards there is no text to prove")
    documents, size = [], 0
    for document in opened.documents(opened.val or opened.train, Skipped()):
        documents.append(document)
        size += len(document)
        if size >= 1e6 * megabytes:
            break
    return documents


def measure(documents: list[bytes], vocab_size: int) -> list[harness.Row]:
    texts = [document.decode() for document in documents]
    size = sum(map(len, documents))
    tokenizer = Tokenizer.train(texts, vocab_size)
    encoding, proving = [], []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        encoded = tokenizer.encode_batch(texts)
        encoding.append(time.perf_counter() - began)
        began = time.perf_counter()
        for number, (tokens, document) in enumerate(zip(encoded, documents, strict=True)):
            check_tokens(tokenizer, tokens, document, f"document {number}")
        proving.append(time.perf_counter() - began)
    encode, prove = statistics.median(encoding), statistics.median(proving)
    provider = f"{vocab_size:,} tokens"
    note = f"{len(documents):,} documents, {size:,} bytes"
    return [
        harness.Row("encoding on one core", provider, 1000 * encode, "ms", note=note),
        harness.Row("the proof", provider, 1000 * prove, "ms", note=note),
        harness.Row("the proof, of encoding", provider, 100 * prove / encode, "%"),
        harness.Row("speed of the proof", provider, size / prove / 1e6, "MB/s"),
    ]


class Clock:
    """Seconds inside some functions. Of functions that call each other, the outermost counts."""

    def __init__(self) -> None:
        self.seconds, self._began, self._depth = 0.0, 0.0, 0

    def begin(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._began = time.perf_counter()

    def end(self) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.perf_counter() - self._began


@contextmanager
def timed_sums() -> Iterator[Clock]:
    """The seconds of all sums inside this context: a sample begins with the choice of its positions, and ends with its check.
    A mixture is audited as a whole."""
    clock, choose, check, mixture = Clock(), audit._choose, audit.Audit.check, adaptive.audit_mixture

    def begin(*values: Any) -> Any:
        clock.begin()
        return choose(*values)

    def end(*values: Any) -> None:
        check(*values)
        clock.end()

    def both(*values: Any) -> None:
        clock.begin()
        mixture(*values)
        clock.end()

    with (
        mock.patch.object(audit, "_choose", begin),
        mock.patch.object(audit.Audit, "check", end),
        mock.patch.object(adaptive, "audit_mixture", both),
    ):
        yield clock


def make_text(config: ModelConfig, tokens: int) -> TokenSet:
    found = np.random.default_rng(0).integers(2, config.vocab_size, tokens + 1, dtype=np.uint16)
    found[::DOCUMENT] = config.bos_id
    return TokenSet([found])


def measure_sums(tokens: int) -> list[harness.Row]:
    """The share of a score that checking its sums takes, for each method."""
    config, place, rows = get_recipe("demo").model, Runtime(device=torch.device("cpu")), []
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    for name, fewer in METHODS.items():
        method, text, times = make_method(name), make_text(config, tokens // fewer), []
        for _ in range(ROUNDS):
            with timed_sums() as clock:
                began = time.perf_counter()
                method.score(model, text, place, tokenizer=ONE_BYTE)
                whole = time.perf_counter() - began
            times.append((whole, clock.seconds))
        whole, sums = map(statistics.median, zip(*times))
        note = f"{tokens // fewer:,} tokens, {config.layers} layers of width {config.width}"
        rows += [
            harness.Row("a score", name, 1000 * whole, "ms", note=note),
            harness.Row("its sums of probabilities", name, 1000 * sums, "ms", note=note),
            harness.Row("the sums, of the score", name, 100 * sums / whole, "%"),
        ]
    return rows


class _OneByte:
    """Stands for a tokenizer of random tokens."""

    def count_bytes(self, targets: Any, previous: Any) -> Any:
        return targets * 0 + 1


ONE_BYTE: Any = _OneByte()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--megabytes", type=float, default=3.0)
    parser.add_argument("--vocab-sizes", default="1024,8192", help="separated by commas")
    parser.add_argument("--tokens", type=int, default=24576, help="of the scores whose sums are checked")
    arguments = harness.start(parser)
    documents = read_documents(arguments.data, arguments.megabytes)
    rows = [row for word in arguments.vocab_sizes.split(",") for row in measure(documents, int(word))]
    rows += measure_sums(arguments.tokens)
    written = harness.write(
        "proof", rows, out=arguments.out, settings=harness.settings_of(arguments), measured=MEASURED
    )
    print(written.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
