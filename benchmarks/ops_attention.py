"""Causal attention, and attention over a running window: cases for ops.py and candidates for tune.py.

Causal attention is one layer of golf at 48 texts of 2,048 tokens: cuDNN's, and FlashAttention 3's as `ours` where it is installed
(elsewhere both are the same). The bound counts the pairs of a query and a key that a causal mask leaves.

Window attention is a segment of 65,536 tokens of the golf model, every query over 2,048 keys. Beside it: FlashAttention 2 in its
varlen form with a left window, which reads its keys from one tensor, with and without the copy that joins them. cuDNN has no
window; causal attention over 16 texts of 4,096 has as many pairs of a query and a key, so its time compares.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Case
from ops_pointwise import both_ways, random
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from parbank.ops import causal_attention, configs, reference
from parbank.ops.window_attention import _window_attention, launch_config

TOKENS, WINDOW, HEADS, KV_HEADS, WIDTH = 65_536, 2048, 8, 4, 64
FLOPS = 4.0 * TOKENS * WINDOW * HEADS * WIDTH


def inputs(width: int = WIDTH) -> list[Tensor]:
    """q, the carried keys and values, the own ones, and `low` as in the middle of a text."""
    past = [random(1, WINDOW - 1, KV_HEADS, width) for _ in range(2)]
    own = [random(1, TOKENS, KV_HEADS, width) for _ in range(2)]
    return [random(1, TOKENS, HEADS, width), *past, *own, torch.zeros(TOKENS, dtype=torch.int64, device="cuda")]


def ours(width: int = WIDTH) -> Callable[[], Any]:
    tensors = inputs(width)
    return lambda: _window_attention(*tensors, WINDOW)


def documents() -> Callable[[], Any]:
    """Documents of some 1,000 tokens, isolated: half the pairs, and a start inside every fifth tile or so."""
    tensors = inputs()
    starts = torch.arange(0, TOKENS, 997, device="cuda")
    which = torch.bucketize(torch.arange(TOKENS, device="cuda"), starts, right=True) - 1
    tensors[5] = starts[which] + WINDOW - 1
    return lambda: _window_attention(*tensors, WINDOW)


def flash(joined: bool) -> Callable[[], Callable[[], Any]]:
    def build() -> Callable[[], Any]:
        q, past_k, past_v, k, v, _ = inputs()
        runs = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (TOKENS, TOKENS + WINDOW - 1)]
        once = torch.cat([past_k, k], 1), torch.cat([past_v, v], 1)

        def call() -> Any:
            keys, values = once if joined else (torch.cat([past_k, k], 1), torch.cat([past_v, v], 1))
            return torch.ops.aten._flash_attention_forward(
                q[0], keys[0], values[0], *runs, TOKENS, TOKENS + WINDOW - 1, 0.0, False, False,
                window_size_left=WINDOW - 1, window_size_right=0,
            )  # fmt: skip

        return call

    return build


def cudnn() -> Callable[[], Any]:
    texts = TOKENS // (2 * WINDOW)
    q, k, v = (random(texts, 2 * WINDOW, n, WIDTH).transpose(1, 2) for n in (HEADS, KV_HEADS, KV_HEADS))

    def call() -> Any:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return call


def texts() -> list[Tensor]:
    return [random(48, 2048, n, WIDTH) for n in (HEADS, KV_HEADS, KV_HEADS)]


def cases(quick: bool) -> Iterator[Case]:
    causal = 2.0 * 48 * 2048**2 * HEADS * WIDTH  # two products, half of the pairs; backward five
    yield from both_ways(
        "causal_attention",
        f"(48, 2048, {HEADS} / {KV_HEADS} heads of {WIDTH})",
        (causal_attention, reference.attention),
        texts,
        (0.0, 0.0),
        (causal, 3.5 * causal),
    )
    label = f"window_attention ({TOKENS}, {HEADS} / {KV_HEADS} heads of {WIDTH}), window {WINDOW}"
    providers = {
        "flash 2": flash(joined=True),
        "flash 2 and the joining": flash(joined=False),
        "cudnn, causal, as many pairs": cudnn,
        "ours": ours,
    }
    yield Case("window_attention", label, providers, flops=FLOPS, graph=True)
    # a token of a document of 997 sees 499 on average
    yield Case("window_attention", f"{label}, documents of 997", {"ours": documents}, flops=FLOPS / 4, graph=True)


def candidates() -> list[configs.Launch]:
    make = launch_config
    found = []
    for stack in (True, False):
        for tma in (True, False):
            flags = {"stack": stack, "tma": tma}
            found += [make(128, 64, 8, stages, **flags) for stages in (2, 3, 4)]
            found += [make(128, 64, 4, stages, **flags) for stages in (2, 3)]
            found += [make(128, 128, 8, 2, **flags), make(64, 128, 4, 2, **flags), make(64, 64, 4, 2, **flags)]
        # so many registers that two programs of 8 warps, or three of 4, share a multiprocessor; and wider tiles
        flags = {"stack": stack, "tma": True}
        found += [make(128, 64, 8, 3, **flags, maxnreg=128), make(64, 128, 4, 2, **flags, maxnreg=168)]
        found += [make(128, 128, 8, 3, **flags), make(128, 128, 4, 2, **flags), make(128, 32, 8, 4, **flags)]
        found += [make(256, 64, 8, stages, **flags) for stages in (2, 3)]
    return found


def wide_candidates() -> list[configs.Launch]:
    """For heads of 128 channels, whose output takes twice the registers: of the above, those that do not spill on 9.0."""
    make = launch_config
    found = []
    for stack in (True, False):
        flags = {"stack": stack, "tma": True}
        found += [make(128, 64, 8, stages, **flags) for stages in (2, 3, 4)]
        found += [make(128, 128, 8, stages, **flags) for stages in (2, 3)]
        found += [make(64, 128, 4, 2, **flags), make(64, 64, 4, 2, **flags), make(128, 32, 8, 4, **flags)]
        found += [make(128, 64, 8, 3, **flags, maxnreg=128)]
        found += [make(128, 64, 8, 3, stack=stack), make(128, 128, 8, 2, stack=stack)]
    return found


def tunables() -> list[Any]:
    from tune import Tunable

    golf, wide = "golf", "heads of 128"
    return [
        Tunable("window_attention", candidates(), {golf: ours}, calls=2, flops={golf: FLOPS}),
        Tunable("window_attention", wide_candidates(), {wide: lambda: ours(128)}, calls=2, flops={wide: 2 * FLOPS}),
    ]
