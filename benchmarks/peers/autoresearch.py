"""karpathy/autoresearch's train.py on our tokens: the plain alternative, 630 lines of PyTorch, in the same time.

    python benchmarks/peers/autoresearch.py --data SPEC [--seconds 120] [--vocab 8192] [--batch 262144] [--seed 7] [--out DIR]

The script trains when it is imported and takes data, tokenizer and score from a module `prepare`; this driver is that
module. Nothing is packed and no cap holds: its weights take 200 MB. Writes benchmarks/results/peer_autoresearch: bits per byte
and tokens per second. Bound: none.
"""

import argparse
import contextlib
import io
import math
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import harness  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from parbank.data.dataset import Dataset, open_dataset  # noqa: E402
from peers import golf, tokens  # noqa: E402
from peers.catalogue import PEERS, substitute  # noqa: E402

PEER = PEERS["autoresearch"]
LENGTH, ROWS = 2048, 128  # its own
MEASURED = ("benchmarks/peers", "parbank/data")


def prepare_module(dataset: Dataset, seconds: float, batch_rows: int, seed: int) -> types.ModuleType:
    """What train.py imports from its own prepare.py."""
    device = torch.device("cuda")

    class Tokenizer:
        @classmethod
        def from_directory(cls) -> "Tokenizer":
            return cls()

        def get_vocab_size(self) -> int:
            return dataset.tokenizer.vocab_size

    def make_dataloader(tokenizer: Any, rows: int, length: int, split: str) -> Iterator[tuple[Tensor, Tensor, int]]:
        windows = tokens.Windows(dataset, length=length, batch_rows=batch_rows, rows=rows, seed=seed, device=device)
        done = 0
        while True:
            x, y = windows.next()
            done += rows * length
            yield x, y, 1 + done // len(dataset.train)

    def evaluate_bpb(model: Any, tokenizer: Any, rows: int) -> float:
        def total_nats(x: Tensor, y: Tensor) -> Tensor:
            return model(x, y, reduction="none").sum()  # ignored targets cost nothing

        return tokens.score_chunked(total_nats, dataset, length=LENGTH, rows=rows, ignored=-1, device=device).bpb

    module = types.ModuleType("prepare")
    module.__dict__.update(
        MAX_SEQ_LEN=LENGTH,
        TIME_BUDGET=seconds,
        Tokenizer=Tokenizer,
        make_dataloader=make_dataloader,
        evaluate_bpb=evaluate_bpb,
    )
    return module


def kernels_module() -> types.ModuleType:
    """What train.py imports to get FlashAttention 3: PyTorch's attention behind the same call."""

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
        assert window_size[0] >= q.shape[1], "PyTorch's cuDNN attention has no window: the pattern must be L"
        return golf.attend(q, k, v, causal)

    interface = types.SimpleNamespace(flash_attn_func=flash_attn_func)
    module = types.ModuleType("kernels")
    module.__dict__.update(get_kernel=lambda repository: types.SimpleNamespace(flash_attn_interface=interface))
    return module


def run_script(source: str, path: Path) -> str:
    """Trains; returns what the script printed."""
    module = types.ModuleType("autoresearch_train")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    printed = io.StringIO()
    with contextlib.redirect_stdout(golf.Tee(sys.stdout, printed)):
        exec(compile(source, str(path), "exec"), module.__dict__)
    return printed.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2**18, help="tokens a step; the script's own are 2**19, for 300 s")
    parser.add_argument("--seed", type=int, default=7)
    arguments = harness.start(parser)
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, and torch sees none")
    path = PEER.path("train.py")
    source = substitute(
        path.read_text(encoding="utf-8"),
        {
            "TOTAL_BATCH_SIZE = 2**19": f"TOTAL_BATCH_SIZE = {arguments.batch}",
            'WINDOW_PATTERN = "SSSL"': 'WINDOW_PATTERN = "L"',
        },
    )
    dataset = open_dataset(arguments.data, vocab_size=arguments.vocab)
    sys.modules["prepare"] = prepare_module(dataset, arguments.seconds, arguments.batch // LENGTH, arguments.seed)
    sys.modules["kernels"] = kernels_module()
    for kind in ("flash", "mem_efficient", "math"):  # cuDNN's kernels, the fastest PyTorch has for these shapes
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    log = run_script(source, path)

    def find(name: str) -> float:
        found = re.search(rf"^{name}:\s+([\d.]+)", log, re.MULTILINE)
        return float(found.group(1)) if found else math.nan

    name, steps = "autoresearch", find("num_steps")
    # Its clock starts after 11 steps, so that compiling is outside.
    rate = (steps - 11) * arguments.batch / find("training_seconds")
    rows = [
        harness.Row("bits per byte, before packing", name, find("val_bpb"), "bits/byte", note="no cap, nothing packed"),
        harness.Row("tokens per second", name, rate, "tokens/s"),
        harness.Row("steps", name, steps, "steps"),
        harness.Row("training", name, find("training_seconds"), "s", note="the first 11 steps are outside its clock"),
        harness.Row("parameters", name, 1e6 * find("num_params_M"), "parameters"),
        harness.Row("peak memory", name, find("peak_vram_mb") / 1024, "GiB"),
    ]
    peer = PEER.describe(
        golf.ATTENTION_NOTE,
        'windows: the pattern "L" (full attention in every layer) instead of "SSSL", as its README advises where banded '
        "attention is slow; cuDNN has none",
        f"tokens: our tokenizer's {arguments.vocab:,}, in our shuffled windows, by a loader of ours",
        "score: our chunked one, over every validation token, bytes counted by our tokenizer",
        f"{arguments.batch:,} tokens a step; its own are 524,288 for 300 s",
        f"{arguments.seconds:g} s; its own are 300 s",
    )
    path = harness.write(
        "peer_autoresearch",
        rows,
        out=arguments.out,
        settings=harness.settings_of(arguments),
        seeds=[arguments.seed, 42],
        measured=MEASURED,
        peers=[peer],
    )
    (path.parent / "log.txt").write_text(log.replace("\r", "\n"), encoding="utf-8")
    print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
