"""What it costs to prove that tokens are their text: seconds of the proof beside those of the encoding.

    python benchmarks/proof.py [--data SPEC] [--vocab-sizes 1024,8192]

`parbank eval` encodes each validation document and proves its tokens, on one core of this process; encoding may use more.
The times are medians of several rounds in which both take turns.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402

from parbank.data.proof import check_tokens  # noqa: E402
from parbank.data.sources import parse_spec  # noqa: E402
from parbank.data.sources.source import Corpus, Skipped  # noqa: E402
from parbank.data.tokenizer import Tokenizer  # noqa: E402
from parbank.files import default_cache  # noqa: E402

MEASURED = ("parbank/data/proof.py", "parbank/data/tokenizer.py", "benchmarks/proof.py")
ROUNDS = 7


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--megabytes", type=float, default=3.0)
    parser.add_argument("--vocab-sizes", default="1024,8192", help="separated by commas")
    arguments = harness.start(parser)
    documents = read_documents(arguments.data, arguments.megabytes)
    rows = [row for word in arguments.vocab_sizes.split(",") for row in measure(documents, int(word))]
    written = harness.write(
        "proof", rows, out=arguments.out, settings=harness.settings_of(arguments), measured=MEASURED
    )
    print(written.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
