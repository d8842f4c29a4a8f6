"""Softcapped cross-entropy, from logits and together with the head product: cases for ops.py, candidates for tune.py.

The names of the fused cases carry the peak memory of one forward and backward beyond inputs, in MB. From logits, the bound
counts each tensor once at the rate of a copy; together with the head, the FLOP of its products.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from harness import Case, forward_backward
from ops_pointwise import both_ways, launches, random
from torch import Tensor

from parbank import ops
from parbank.ops import configs, reference
from parbank.ops.linear_loss import _lose_in_place, _loss_sum
from parbank.ops.loss import _softcap_cross_entropy, _softcap_cross_entropy_backward

CAP = 30.0
WIDTH = 512
SIZES = [(98304, 1024), (49152, 8192)]


def logit_inputs(rows: int, vocab: int, spread: float) -> Callable[[], list[Tensor]]:
    return lambda: [random(rows, vocab) * spread, torch.randint(vocab, (rows,), device="cuda")]


def head_inputs(rows: int, vocab: int) -> Callable[[], list[Tensor]]:
    return lambda: [
        random(rows, WIDTH),
        random(vocab, WIDTH) * (2 / WIDTH**0.5),
        torch.randint(vocab, (rows,), device="cuda"),
    ]


def product_then_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Our loss over logits that PyTorch's product makes: what fusing the two is held against."""
    return ops.softcap_cross_entropy(F.linear(x, weight), targets, CAP)


def cases(quick: bool) -> Iterator[Case]:
    for rows, vocab in SIZES:
        for spread, word in ((2.0, ""), (15.0, ", logits beyond the cap")):
            yield from both_ways(
                "softcap_cross_entropy",
                f"({rows}, {vocab}){word}",
                (
                    lambda x, t: ops.softcap_cross_entropy(x, t, CAP),
                    lambda x, t: reference.softcap_cross_entropy(x, t, CAP),
                ),
                logit_inputs(rows, vocab, spread),
                (2.0 * rows * vocab, 6.0 * rows * vocab),
            )
    for rows, vocab in SIZES:
        functions = (
            lambda x, w, t: ops.linear_softcap_cross_entropy(x, w, t, CAP),
            lambda x, w, t: reference.linear_softcap_cross_entropy(x, w, t, CAP),
        )
        product = 2.0 * rows * vocab * WIDTH
        made = head_inputs(rows, vocab)
        ours, loose = (peak_megabytes(function, made) for function in (functions[0], product_then_loss))
        yield from both_ways(
            "linear_softcap_cross_entropy",
            f"({rows}, {WIDTH} -> {vocab}), peak ours {ours:.0f}, product + ours {loose:.0f} MB",
            functions,
            made,
            (0.0, 0.0),
            (product, 3 * product),
            {"product + ours": product_then_loss},
        )


def peak_megabytes(function: Callable[..., Any], inputs: Callable[[], list[Tensor]]) -> float:
    call = forward_backward(function, inputs())
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


# --- candidates ------------------------------------------------------------------------------------------------------


def tunables() -> list[Any]:
    from tune import Tunable

    def forward(rows: int, vocab: int) -> Callable[[], Callable[[], Any]]:
        def build() -> Callable[[], Any]:
            logits, targets = logit_inputs(rows, vocab, 2.0)()
            return lambda: _softcap_cross_entropy(logits, targets, CAP, -100)

        return build

    def backward(rows: int, vocab: int) -> Callable[[], Callable[[], Any]]:
        def build() -> Callable[[], Any]:
            logits, targets = logit_inputs(rows, vocab, 2.0)()
            sums = _softcap_cross_entropy(logits, targets, CAP, -100)[1]
            grad = torch.full((rows,), 1 / rows, device="cuda")
            return lambda: _softcap_cross_entropy_backward(grad, logits, targets, sums, CAP, -100)

        return build

    def in_place(rows: int, vocab: int) -> Callable[[], Callable[[], Any]]:
        def build() -> Callable[[], Any]:
            logits, targets = logit_inputs(rows, vocab, 2.0)()
            losses, share = torch.empty(rows, device="cuda"), torch.ones((), device="cuda")
            return lambda: _lose_in_place(logits, targets, losses, share, CAP, -100)

        return build

    def head(rows: int, vocab: int) -> Callable[[], Callable[[], Any]]:
        def build() -> Callable[[], Any]:
            x, w, targets = head_inputs(rows, vocab)()
            share = torch.ones((), device="cuda")
            return lambda: _loss_sum(x, w, targets, share, CAP, -100, True, True)

        return build

    found = []
    for rows, vocab in SIZES:
        case, size = f"{rows} x {vocab}", 2.0 * rows * vocab
        held = (
            launches(BLOCK_ROWS=(1, 2, 4), BLOCK=(512, 1024), warps=(1, 2, 4))
            if vocab == 1024
            else launches(BLOCK_ROWS=(1,), BLOCK=(2048, 4096, 8192), warps=(4, 8, 16, 32))
        )
        tiles = launches(BLOCK_ROWS=(1, 2, 4), BLOCK=(512, 1024), warps=(1, 2, 4))
        if vocab > 1024:
            tiles += launches(BLOCK_ROWS=(1, 2), BLOCK=(2048, 4096), warps=(4, 8))
        else:  # of 64 registers a multiprocessor holds the most programs of one warp it can, 32
            held += [configs.Launch({"BLOCK_ROWS": 1, "BLOCK": 1024}, 1, 1, {"maxnreg": 64})]
            tiles += [configs.Launch({"BLOCK_ROWS": 1, "BLOCK": 1024}, 1, 1, {"maxnreg": 64})]
        chunk = (1 << 24) // vocab
        chunks = [configs.Launch({"CHUNK": 1 << power}) for power in range(22, 28)]
        found += [
            Tunable("softcap_cross_entropy", held, {case: forward(rows, vocab)}, bytes={case: size}),
            Tunable("softcap_cross_entropy_backward", tiles, {case: backward(rows, vocab)}, bytes={case: 2 * size}),
            Tunable(
                "softcap_loss_and_gradient", held, {case: in_place(chunk, vocab)}, bytes={case: 4.0 * chunk * vocab}
            ),
            Tunable(
                "linear_softcap_cross_entropy",
                chunks,
                {case: head(rows, vocab)},
                calls=1,
                flops={case: 6.0 * rows * vocab * WIDTH},
            ),
        ]
    return found
