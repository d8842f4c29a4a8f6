"""The published recipe: parameter-golf #549, its own script in this process, with hooks at the names its main() looks up.

Nothing of the script is copied here. The driver loads it, replaces a few texts (each must occur exactly once) and a few of
its functions, and calls main(). Results list what was replaced.
"""

import contextlib
import importlib.util
import io
import os
import statistics
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor

from peers.catalogue import GOLF_RECORD, PEERS, substitute

PEER = PEERS["golf"]
# The run command of the record's README. Late QAT is off: switching it on recompiles the model in mid-run.
RECORD = {
    "NUM_LAYERS": "11", "BIGRAM_VOCAB_SIZE": "1536", "XSA_LAST_N": "4", "SWA_ENABLED": "1", "SWA_EVERY": "50",
    "ROPE_DIMS": "16", "LN_SCALE": "1", "VE_ENABLED": "1", "VE_DIM": "128", "VE_LAYERS": "9,10", "TTT_ENABLED": "0",
    "MUON_WD": "0.04", "ADAM_WD": "0.04", "MATRIX_LR": "0.025", "SCALAR_LR": "0.025", "TIED_EMBED_LR": "0.035",
    "MUON_MOMENTUM": "0.99", "MUON_MOMENTUM_WARMUP_START": "0.92", "MUON_MOMENTUM_WARMUP_STEPS": "1500",
    "EVAL_STRIDE": "64", "LATE_QAT_THRESHOLD": "0", "RUN_ID": "peer",
}  # fmt: skip
# PyTorch's cuDNN attention where FlashAttention 3 is not installed: the fastest that PyTorch has for these shapes.
CUDNN = {"enable_cudnn_sdp(False)": "enable_cudnn_sdp(True)", "enable_flash_sdp(True)": "enable_flash_sdp(False)"}
ATTENTION_NOTE = "attention: PyTorch's cuDNN kernels instead of FlashAttention 3, which is not installed"
QAT_NOTE = "late QAT is off: switching it on recompiles the model in mid-run"
HAS_FLASH = importlib.util.find_spec("flash_attn_interface") is not None
CLIP = "torch.nn.utils.clip_grad_norm_(base_model.parameters(), args.grad_clip_norm)"


def describe(*differs: str) -> dict[str, Any]:
    """What a result says of this peer."""
    return PEER.describe(*([] if HAS_FLASH else [ATTENTION_NOTE]), QAT_NOTE, *differs)


def passes(count: int) -> dict[str, str]:
    """As many forward passes a step on one GPU, instead of 8."""
    return {"grad_accum_steps = 8 // world_size": f"grad_accum_steps = {count} // world_size"}


class Stop(Exception):
    """Ends main() from inside a hook."""


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """FlashAttention 3's call (batch, time, heads, width) by PyTorch's attention."""
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=True
    )
    return y.transpose(1, 2)


def load(changes: dict[str, str], settings: dict[str, str]) -> types.ModuleType:
    """The script as a module, main() not yet called. Its settings are environment variables, read while it loads."""
    path = PEER.path(GOLF_RECORD)
    source = substitute(path.read_text(encoding="utf-8"), changes)
    if not HAS_FLASH:
        stand_in = types.ModuleType("flash_attn_interface")
        stand_in.flash_attn_func = attend  # type: ignore[attr-defined]
        sys.modules["flash_attn_interface"] = stand_in
    module = types.ModuleType("published_recipe")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return module


class Tee(io.TextIOBase):
    """Writes to several streams."""

    def __init__(self, *streams: TextIO) -> None:
        self._streams = streams

    def write(self, text: str) -> int:
        for stream in self._streams:
            stream.write(text)
            stream.flush()
        return len(text)


def call_main(module: types.ModuleType) -> str:
    """Runs main() in an empty folder, because it writes files where it stands; returns what it printed."""
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.enter_context(_flags_restored())
        stack.enter_context(contextlib.redirect_stdout(Tee(sys.stdout, printed)))
        stack.enter_context(contextlib.suppress(Stop))
        module.main()
    return printed.getvalue()


@contextlib.contextmanager
def _flags_restored() -> Iterator[None]:
    """main() chooses attention kernels and TF32 for the whole process."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    kinds = ("cudnn", "flash", "mem_efficient", "math")
    before = {kind: getattr(cuda, f"{kind}_sdp_enabled")() for kind in kinds}
    tf32 = (cuda.matmul.allow_tf32, cudnn.allow_tf32)
    try:
        yield
    finally:
        for kind, enabled in before.items():
            getattr(cuda, f"enable_{kind}_sdp")(enabled)
        cuda.matmul.allow_tf32, cudnn.allow_tf32 = tf32


@dataclass
class StepTimes:
    """Milliseconds on the device, a list each, in the order of the steps."""

    passes: list[float] = field(default_factory=list)
    """Forward and backward of one micro-batch."""
    sections: list[float] = field(default_factory=list)
    """From clipping to the next step's first batch: clip, AdamW, Muon, clearing gradients, EMA."""
    peak_bytes: int = 0

    def medians(self, part: slice) -> tuple[float, float]:
        return statistics.median(self.passes[part]), statistics.median(self.sections[part])


def time_steps(tokens: int, length: int, steps: int, vocab: int = 1024) -> StepTimes:
    """The script's own loop on random tokens, one micro-batch a step, with events at its batches and at its clipping.

    Steps are queued without a pause, as in training; nothing waits until the last one.
    """
    settings = {
        **RECORD, "TRAIN_BATCH_TOKENS": str(tokens), "TRAIN_SEQ_LEN": str(length), "EVAL_SEQ_LEN": str(length),
        "VOCAB_SIZE": str(vocab), "ITERATIONS": str(steps), "MAX_WALLCLOCK_SECONDS": "0", "WARMUP_STEPS": "4",
        "VAL_LOSS_EVERY": "0", "TRAIN_LOG_EVERY": "0", "TOKENIZER_PATH": "none.model", "WARMDOWN_ITERS": "0",
    }  # fmt: skip
    module = load({**CUDNN, **passes(1), CLIP: CLIP.replace("torch.nn.utils.clip_grad_norm_", "clip_hook")}, settings)
    starts: list[torch.cuda.Event] = []
    clips: list[torch.cuda.Event] = []
    x, y = (torch.randint(0, vocab, (tokens // length, length), device="cuda") for _ in range(2))

    def mark(events: list[torch.cuda.Event]) -> None:
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()

    class RandomLoader:
        """main() makes one for its warm-up and a new one for training, whose events are those that count."""

        def __init__(self, *_: Any) -> None:
            starts.clear()
            clips.clear()

        def next_batch(self, *_: Any) -> tuple[Tensor, Tensor]:
            mark(starts)
            return x, y

    def clip(*arguments: Any, **more: Any) -> Tensor:
        mark(clips)
        return torch.nn.utils.clip_grad_norm_(*arguments, **more)

    def stop(*_: Any, **__: Any) -> tuple[float, float]:
        mark(starts)  # the end of the last step's section
        raise Stop

    _replace_data(module, vocab)
    module.DistributedTokenLoader = RandomLoader  # type: ignore[attr-defined]
    module.eval_val = stop  # type: ignore[attr-defined]
    module.clip_hook = clip  # type: ignore[attr-defined]
    torch.cuda.reset_peak_memory_stats()
    call_main(module)
    torch.cuda.synchronize()
    times = StepTimes(peak_bytes=torch.cuda.max_memory_allocated())
    times.passes = [start.elapsed_time(end) for start, end in zip(starts, clips)]
    times.sections = [clip.elapsed_time(start) for clip, start in zip(clips, starts[1:])]
    return times


def _replace_data(module: types.ModuleType, vocab: int) -> None:
    """No files: a vocabulary of this size and validation tokens that nobody reads."""
    sentencepiece = types.SimpleNamespace(
        SentencePieceProcessor=lambda **_: types.SimpleNamespace(vocab_size=lambda: vocab)
    )
    module.spm = sentencepiece  # type: ignore[attr-defined]
    module.load_validation_tokens = lambda *_: torch.zeros(2, dtype=torch.int64)  # type: ignore[attr-defined]
    module.build_sentencepiece_luts = lambda *_: (torch.zeros(1),) * 3  # type: ignore[attr-defined]
