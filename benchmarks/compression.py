"""A model as a compressor: identical bytes, size against score, the cost of segments, speed, and other compressors.

    parbank train --recipe demo --out runs/demo
    python benchmarks/compression.py runs/demo/model.pbk [--data stdlib] [--bytes 600_000] [--segments 16 64 256] [--claim NAME]

The text is the beginning of a validation text. Every number of segments is compressed, decompressed and compared. On two CPU
cores, with the demo's model and --claim compression_cpu, this takes about four minutes. On a GPU give more text and more
segments, e.g. --bytes 30_000_000 --segments 256 512 1024.

Bound of `file`: `score`, the score of the same segments by the model's own probabilities. `score of 1 segments` is that of the
whole text, with a full window of context everywhere. More numbers of segments are scored than coded, because scoring is quicker.
Other compressors get the whole text at once. `file with the model` adds the bytes of the artifact. Writes
benchmarks/results/compression, or the folder of --claim.
"""

import argparse
import ctypes
import ctypes.util
import functools
import lzma
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import harness  # noqa: E402

from parbank.artifact.load import LoadedModel, load_artifact  # noqa: E402
from parbank.data.shards import TokenSet  # noqa: E402
from parbank.data.validation import open_validation  # noqa: E402
from parbank.eval.compressor.proof import prove  # noqa: E402
from parbank.eval.methods import make_method  # noqa: E402
from parbank.runtime import Runtime, pick_device  # noqa: E402
from parbank.threads import use_threads  # noqa: E402

MEASURED = ("parbank/eval/compressor", "parbank/model", "benchmarks/compression.py")
SCORED = (1, 4, 16, 64, 256, 1024)
"""Numbers of segments whose cost is scored."""


def read_text(loaded: LoadedModel, spec: str, size: int) -> np.ndarray:
    """The first tokens of a validation text that stand for at most `size` bytes."""
    tokens = open_validation(spec, loaded.tokenizer).tokens
    found = tokens.read(0, len(tokens))
    before = np.concatenate([[loaded.tokenizer.bos_id], found[:-1]])
    ends = np.cumsum(loaded.tokenizer.count_bytes(found, before))
    return found[: max(2, int(np.searchsorted(ends, size, side="right")))]


def score_segments(loaded: LoadedModel, tokens: np.ndarray, segments: int) -> float:
    """The bits of the text in so many segments of equal length, each from a BOS on, as the compressor cuts it."""
    bos = np.array([loaded.tokenizer.bos_id], np.uint16)
    own = tokens[1:] if tokens[0] == bos[0] else tokens
    method = make_method("streaming", context=loaded.context)
    runtime = Runtime(device=loaded.model.token_embedding.weight.device)
    nats = 0.0
    for lane in np.array_split(own, segments):
        if len(lane):
            text = TokenSet([np.concatenate([bos, lane])])
            nats += float(method.score(loaded.model, text, runtime).nats.sum(dtype=np.float64))
    return nats / np.log(2)


def find_compressors() -> dict[str, Callable[[bytes], bytes]]:
    found: dict[str, Callable[[bytes], bytes]] = {
        "xz -9e": lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)
    }
    import zstandard

    found["zstd -19"] = zstandard.ZstdCompressor(level=19).compress
    if (brotli := find_brotli()) is None:
        print("note: brotli is not installed (pip install brotli); its rows are left out", file=sys.stderr)
    else:
        found["brotli -11"] = brotli
    return found


def find_brotli() -> Callable[[bytes], bytes] | None:
    """Brotli at quality 11 with its largest usual window: of the Python package, else of the system's library."""
    try:
        import brotli
    except ImportError:
        name = ctypes.util.find_library("brotlienc")
        return functools.partial(compress_by_library, ctypes.CDLL(name)) if name else None
    return lambda data: brotli.compress(data, quality=11, lgwin=24)


def compress_by_library(library: ctypes.CDLL, data: bytes) -> bytes:
    """The bytes that libbrotlienc makes of `data`; the same as the package's, which contains this library."""
    size = ctypes.c_size_t(len(data) + len(data) // 8 + 1024)
    out = ctypes.create_string_buffer(size.value)
    quality, window, generic = 11, 24, 0
    done = library.BrotliEncoderCompress(
        quality, window, generic, ctypes.c_size_t(len(data)), data, ctypes.byref(size), out
    )
    if not done:
        raise RuntimeError("libbrotlienc could not compress the text")
    return out.raw[: size.value]


def code(loaded: LoadedModel, tokens: np.ndarray, segments: int, size: int, model_bytes: int) -> list[harness.Row]:
    proof = prove(loaded, TokenSet([tokens]), segments=segments)
    provider = f"{segments} segments"
    values = {
        ("file", "bits/byte"): proof["file_bpb"],
        ("file with the model", "bits/byte"): 8 * (proof["file_bytes"] + model_bytes) / size,
        ("score", "bits/byte"): proof["score_bpb"],
        ("coded text above score", "%"): 100 * proof["above_score"],
        ("header and blocks", "bytes"): proof["file_bytes"] - proof["coded_bytes"],
        ("compress", "kB/s"): size / proof["compress_seconds"] / 1000,
        ("decompress", "kB/s"): size / proof["decompress_seconds"] / 1000,
        ("identical", "1 is yes"): float(proof["identical"]),
    }
    return [harness.Row(case, provider, value, unit) for (case, unit), value in values.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a .pbk file")
    parser.add_argument("--data", default="stdlib", help="a data spec; its validation text is compressed")
    parser.add_argument("--bytes", type=int, default=600_000, help="of text, at most")
    parser.add_argument("--segments", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--claim", default="compression", help="the result's folder")
    arguments = harness.start(parser)
    with use_threads(arguments.threads) as threads:
        loaded = load_artifact(arguments.model, pick_device(arguments.device))
        tokens = read_text(loaded, arguments.data, arguments.bytes)
        text, model_bytes = loaded.tokenizer.decode_bytes(tokens), arguments.model.stat().st_size
        rows: list[harness.Row] = []
        for name, compress in find_compressors().items():
            began = time.perf_counter()
            size, seconds = len(compress(text)), time.perf_counter() - began
            rows += [
                harness.Row("file", name, 8 * size / len(text), "bits/byte"),
                harness.Row("file with the model", name, 8 * size / len(text), "bits/byte"),
                harness.Row("compress", name, len(text) / seconds / 1000, "kB/s"),
            ]
        whole = score_segments(loaded, tokens, 1)
        for segments in SCORED:
            bits = whole if segments == 1 else score_segments(loaded, tokens, segments)
            note = f"{100 * (bits / whole - 1):.2f}% above one segment; {len(tokens) // segments:,} tokens each"
            rows.append(
                harness.Row(f"score of {segments} segments", "streaming", bits / len(text), "bits/byte", note=note)
            )
        for segments in arguments.segments:
            rows += code(loaded, tokens, segments, len(text), model_bytes)
            extra = {"text_bytes": len(text), "tokens": len(tokens), "model_bytes": model_bytes, "threads": threads}
            options = harness.settings_of(arguments)
            path = harness.write(
                arguments.claim, rows, out=arguments.out, settings=options, measured=MEASURED, extra=extra
            )
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    with torch.inference_mode():
        main()
