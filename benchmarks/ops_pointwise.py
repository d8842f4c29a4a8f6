"""The ops that memory bounds: norms, the activation, the queries' and keys' norm with rotation, and exclusive attention. Cases for
ops.py and candidates for tune.py.

Everything is timed in a CUDA graph, forward and backward, so that no provider pays for its host code. Bounds count each
tensor that must be read or written once, at the rate of a copy.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from harness import Case, forward_backward
from torch import Tensor

from parbank import ops
from parbank.ops import configs, reference
from parbank.ops.activation import _leaky_relu_squared, _leaky_relu_squared_backward
from parbank.ops.exclusive import _remove_own_value, _remove_own_value_backward
from parbank.ops.mix import _mix_rms_norm, _mix_rms_norm_backward
from parbank.ops.norm import _add_rms_norm, _add_rms_norm_backward, _rms_norm, _rms_norm_backward
from parbank.ops.qkv import _split_qkv
from parbank.ops.rope import HeadFactors, rotate_one_back
from parbank.ops.smear import _smear, _smear_backward

DTYPE = torch.bfloat16
TOKENS = 98304  # 48 sequences of 2048: a micro-batch of the golf recipe on one GPU
SLOPE = 0.5

Function = Callable[..., Any]
Build = Callable[[], Callable[[], Any]]


def both_ways(
    op: str,
    label: str,
    functions: tuple[Function, Function],
    inputs: Callable[[], list[Tensor]],
    bytes_: tuple[float, float],
    flops: tuple[float, float] = (0.0, 0.0),
    more: dict[str, Function] | None = None,
) -> Iterator[Case]:
    """Forward, and forward with backward, for (ours, the reference), with the bytes and FLOP of both."""
    ours, theirs = functions
    providers: dict[str, Callable[[], Function]] = {
        "eager": lambda: theirs,
        "compile": lambda: torch.compile(theirs, fullgraph=True),
        "ours": lambda: ours,
    }
    providers |= {name: lambda function=function: function for name, function in (more or {}).items()}

    def bind(make: Callable[[], Function]) -> Callable[[], Any]:
        function, made = make(), inputs()
        return lambda: function(*made)

    def forward(make: Callable[[], Function]) -> Build:
        return lambda: bind(make)

    def both(make: Callable[[], Function]) -> Build:
        return lambda: forward_backward(make(), inputs())

    for index, (word, wrap) in enumerate((("forward", forward), ("forward+backward", both))):
        built = {name: wrap(make) for name, make in providers.items()}
        yield Case(op, f"{op} {label} {word}", built, flops=flops[index], bytes=bytes_[index], graph=True)


def random(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def angles(time: int, half: int) -> tuple[Tensor, Tensor]:
    turns = torch.arange(time, device="cuda")[:, None] / 10000 ** (torch.arange(half, device="cuda") / half)
    return turns.cos(), turns.sin()


def add_mix_inputs(skipped: bool) -> list[Tensor]:
    """x, y, x0, a, b, and the skip with its gain."""
    x, y, x0 = (random(TOKENS, 512) for _ in range(3))
    a, b, gain = random(3, 512, dtype=torch.float32)
    return [x, y, x0, a, b, *([random(TOKENS, 512), gain] if skipped else [])]


def cases(quick: bool) -> Iterator[Case]:
    for width in (512, 1536):
        size = TOKENS * width * 2
        label = f"({TOKENS}, {width})"
        yield from both_ways(
            "rms_norm",
            label,
            (ops.rms_norm, reference.rms_norm),
            lambda width=width: [random(TOKENS, width)],
            (2 * size, 5 * size),
        )
        yield from both_ways(
            "leaky_relu_squared",
            label,
            (lambda x: ops.leaky_relu_squared(x, SLOPE), lambda x: reference.leaky_relu_squared(x, SLOPE)),
            lambda width=width: [random(TOKENS, width)],
            (2 * size, 5 * size),
        )
    size = TOKENS * 512 * 2
    yield from both_ways(
        "rms_norm",
        f"({TOKENS}, 512) with weight",
        (ops.rms_norm, reference.rms_norm),
        lambda: [random(TOKENS, 512), random(512, dtype=torch.float32)],
        (2 * size, 5 * size),
    )
    yield from both_ways(
        "add_rms_norm",
        f"({TOKENS}, 512)",
        (ops.add_rms_norm, reference.add_rms_norm),
        lambda: [random(TOKENS, 512), random(TOKENS, 512)],
        (4 * size, 8 * size),
    )
    yield from both_ways(
        "mix_rms_norm",
        f"({TOKENS}, 512)",
        (ops.mix_rms_norm, reference.mix_rms_norm),
        lambda: [random(TOKENS, 512), random(TOKENS, 512), *(random(512, dtype=torch.float32) for _ in range(2))],
        (4 * size, 10 * size),
    )
    # Forward reads x, y, x0 and writes sum, mix and norm; backward reads three gradients, sum and x0 and writes two. A skip is
    # read once more each way, and its gradient written.
    for skipped, forward, back in ((False, 6, 7), (True, 7, 9)):
        yield from both_ways(
            "add_mix_rms_norm",
            f"({TOKENS}, 512)" + (" with skip" if skipped else ""),
            (ops.add_mix_rms_norm, reference.add_mix_rms_norm),
            lambda skipped=skipped: add_mix_inputs(skipped),
            (forward * size, (forward + back) * size),
        )
    starts = torch.arange(2048, device="cuda").eq(0).expand(48, 2048)
    yield from both_ways(
        "smear",
        "(48, 2048, 512)",
        (lambda x, gate: ops.smear(x, gate, starts), lambda x, gate: reference.smear(x, gate, starts)),
        lambda: [random(48, 2048, 512), random(512, dtype=torch.float32).sigmoid()],
        (2 * size, 5 * size),
    )
    cos, sin = angles(2048, 8)
    yield from both_ways(
        "qk_norm_rope",
        "(48, 2048, 8 + 4, 64), 16 rotated",
        (
            lambda q, k, gain: ops.qk_norm_rope(q, k, gain, cos, sin),
            lambda q, k, gain: reference.qk_norm_rope(q, k, gain, cos, sin),
        ),
        lambda: [random(48, 2048, 8, 64), random(48, 2048, 4, 64), random(8, dtype=torch.float32)],
        (3 * size, 7.5 * size),
    )
    # Values and their gradient are half as large as the rest.
    yield from both_ways(
        "remove_own_value",
        "(48, 2048, 8 / 4 heads of 64)",
        (ops.remove_own_value, reference.remove_own_value),
        lambda: [random(48, 2048, 8, 64), random(48, 2048, 4, 64)],
        (2.5 * size, 6.5 * size),
    )
    product = 2.0 * TOKENS * 512 * 1024
    yield from both_ways(
        "qkv_norm_rope",
        "(48, 2048, 512 -> (8 + 4 + 4) x 64)",
        (
            lambda x, q, k, v, gain: ops.qkv_norm_rope(x, q, k, v, 8, gain, cos, sin),
            lambda x, q, k, v, gain: reference.qkv_norm_rope(x, q, k, v, 8, gain, cos, sin),
        ),
        lambda: [
            random(48, 2048, 512),
            *(random(n, 512) / 512**0.5 for n in (512, 256, 256)),
            random(8, dtype=torch.float32),
        ],
        (0.0, 0.0),
        (product, 3 * product),
    )


# --- candidates ------------------------------------------------------------------------------------------------------


def launches(**choices: Sequence[int]) -> list[configs.Launch]:
    """Every combination of the choices; `warps` is the number of warps, the others are constants of the kernel."""
    found: list[dict[str, int]] = [{}]
    for name, values in choices.items():
        found = [{**one, name: value} for one in found for value in values]
    return [configs.Launch({k: v for k, v in one.items() if k != "warps"}, one["warps"], 1) for one in found]


def tunables() -> list[Any]:
    from tune import Tunable

    def norm(width: int) -> Build:
        def build() -> Callable[[], Any]:
            x = random(TOKENS, width)
            return lambda: _rms_norm(x, None, 1.0, 1e-6)

        return build

    def norm_back(width: int, weighted: bool) -> Build:
        def build() -> Callable[[], Any]:
            dy, x, inverse = random(TOKENS, width), random(TOKENS, width), random(TOKENS, dtype=torch.float32)
            weight = random(width, dtype=torch.float32) if weighted else None
            return lambda: _rms_norm_backward(dy, x, weight, inverse, 1.0)

        return build

    def mix() -> Callable[[], Any]:
        x, x0, a, b = random(TOKENS, 512), random(TOKENS, 512), *random(2, 512, dtype=torch.float32)
        return lambda: _mix_rms_norm(x, None, None, x0, None, a, b, 1.0, 1e-6, False)

    def add_mix(skipped: bool) -> Build:
        def build() -> Callable[[], Any]:
            x, y, x0, a, b, *rest = add_mix_inputs(skipped)
            skip, gain = rest or (None, None)
            return lambda: _mix_rms_norm(x, y, skip, x0, gain, a, b, 1.0, 1e-6, False)

        return build

    def mix_back(reached: bool, skipped: bool) -> Build:
        def build() -> Callable[[], Any]:
            total, x0, dm, dy, more = (random(TOKENS, 512) for _ in range(5))
            a, b, gain = random(3, 512, dtype=torch.float32)
            inverse = random(TOKENS, dtype=torch.float32)
            dtotal, skip = more if reached else None, more if skipped else None
            of_skip = gain if skipped else None
            return lambda: _mix_rms_norm_backward(dtotal, dm, dy, total, skip, x0, of_skip, a, b, inverse, 1.0, False)

        return build

    def smear(back: bool) -> Build:
        def build() -> Callable[[], Any]:
            dy, x, gate = random(48, 2048, 512), random(48, 2048, 512), random(512, dtype=torch.float32).sigmoid()
            starts = torch.zeros(48, 2048, dtype=torch.bool, device="cuda")
            return lambda: _smear_backward(dy, x, gate, starts) if back else _smear(x, gate, starts)

        return build

    def act() -> Callable[[], Any]:
        x = random(TOKENS, 1536)
        return lambda: _leaky_relu_squared(x, SLOPE)

    def act_back() -> Callable[[], Any]:
        dy, x = random(TOKENS, 1536), random(TOKENS, 1536)
        return lambda: _leaky_relu_squared_backward(dy, x, SLOPE)

    def add() -> Callable[[], Any]:
        x, y = random(TOKENS, 512), random(TOKENS, 512)
        return lambda: _add_rms_norm(x, y, 1.0, 1e-6)

    def add_back() -> Callable[[], Any]:
        dtotal, dnormed, total = (random(TOKENS, 512) for _ in range(3))
        inverse = random(TOKENS, dtype=torch.float32)
        return lambda: _add_rms_norm_backward(dtotal, dnormed, total, inverse, 1.0)

    def rope() -> Callable[[], Any]:
        row, gain, inverse = (
            random(48, 2048, 1024),
            random(8, dtype=torch.float32),
            random(48, 2048, dtype=torch.float32),
        )
        cos, sin = angles(2048, 8)
        return lambda: _split_qkv(row, 8, 4, gain, cos, sin, inverse, None, 1.0, 1e-6)

    def rope_back(parts: int) -> Build:
        """Of the queries; or, where attention has left them in parts, of keys and values."""

        def build() -> Callable[[], Any]:
            row, gain, inverse = (
                random(48, 2048, 16, 64),
                random(8, dtype=torch.float32),
                random(48, 2048, dtype=torch.float32),
            )
            (cos, sin), back, factors = angles(2048, 8), random(48, 2048, 16, 64), HeadFactors(inverse, 1.0)
            if parts == 1:
                dq, x, dx = random(1, 48, 2048, 8, 64), row[:, :, :8], back[:, :, :8]
                return lambda: (rotate_one_back(dq, x, dx, gain, cos, sin, 1e-6, factors=factors), dx)
            (dk, dv), x, dx = (random(parts, 48, 2048, 4, 64) for _ in range(2)), row[:, :, 8:], back[:, :, 8:]
            return lambda: (rotate_one_back(dk, x, dx, None, cos, sin, 1e-6, dv, None, factors), dx)

        return build

    def exclusive() -> Callable[[], Any]:
        y, v = random(48, 2048, 8, 64), random(48, 2048, 4, 64)
        return lambda: _remove_own_value(y, v)

    def exclusive_back() -> Callable[[], Any]:
        dz, y, v = random(48, 2048, 8, 64), random(48, 2048, 8, 64), random(48, 2048, 4, 64)
        return lambda: _remove_own_value_backward(dz, y, v, True, True)

    def tunable(op: str, candidates: list[configs.Launch], case: str, build: Build, bytes_: float) -> Any:
        return Tunable(op, candidates, {case: build}, bytes={case: bytes_})

    size = TOKENS * 512 * 2.0
    found = []
    for width, block, rows in ((512, 512, (1, 2, 4, 8, 16)), (1536, 2048, (1, 2, 4))):
        forward = launches(BLOCK_ROWS=rows, BLOCK=(block,), warps=(1, 2, 4, 8))
        plain = launches(BLOCK_ROWS=rows, BLOCK=(block,), PER_SM=(1,), STAGES=(1,), warps=(1, 2, 4, 8))
        summed = launches(BLOCK_ROWS=rows[:3], BLOCK=(block,), PER_SM=(2, 4, 8), STAGES=(1, 3), warps=(4, 8))
        scale = width / 512 * size
        found.append(tunable("rms_norm", forward, str(width), norm(width), 2 * scale))
        found.append(tunable("rms_norm_backward", plain, f"{width} plain", norm_back(width, False), 3 * scale))
        found.append(tunable("rms_norm_backward", summed, f"{width} weighted", norm_back(width, True), 3 * scale))
    forward = launches(BLOCK_ROWS=(1, 2, 4, 8), BLOCK=(512,), warps=(1, 2, 4, 8))
    # eight rows with a skip are more than a warp holds
    held = [x for x in forward if x.blocks["BLOCK_ROWS"] < 8 * x.num_warps]
    plain = launches(BLOCK_ROWS=(1, 2, 4, 8), BLOCK=(512,), PER_SM=(1,), STAGES=(1,), warps=(1, 2, 4, 8))
    summed = launches(BLOCK_ROWS=(1, 2, 4), BLOCK=(512,), PER_SM=(2, 3, 4, 8), STAGES=(2, 3), warps=(4, 8))
    at_once = launches(BLOCK_ROWS=(1, 2, 4), BLOCK=(512,), PER_SM=(2, 3, 4, 8), STAGES=(1,), warps=(4, 8))
    blocks = launches(BLOCK=(1024, 2048, 4096, 8192), warps=(2, 4, 8))
    turned = launches(TILE=(512, 1024, 2048, 4096), warps=(1, 2, 4, 8))
    # 8 to 32 elements a thread
    projected = [x for x in turned if 256 <= x.blocks["TILE"] // x.num_warps <= 1024]
    back = launches(TILE=(512, 1024, 2048, 4096), PER_SM=(4, 5, 8, 9, 10, 12, 16, 18, 20, 24), warps=(2, 4, 8))
    resident = [x for x in back if x.blocks["PER_SM"] * x.num_warps in (32, 36, 40, 48, 64)]
    return [
        *found,
        tunable("add_rms_norm", forward, "512", add, 4 * size),
        tunable("add_rms_norm_backward", plain, "512", add_back, 4 * size),
        tunable("mix_rms_norm", forward, "512", mix, 4 * size),
        tunable("add_mix_rms_norm", held, "512", add_mix(False), 6 * size),
        tunable("add_mix_rms_norm", held, "512 with skip", add_mix(True), 7 * size),
        # as in the model: the sums of the first half also feed a skip, those of the second are fed by one
        tunable("mix_rms_norm_backward", summed, "512", mix_back(False, False), 6 * size),
        tunable("mix_rms_norm_backward", summed, "512, sum used", mix_back(True, False), 7 * size),
        tunable("skip_mix_rms_norm_backward", summed, "512", mix_back(False, True), 8 * size),
        tunable("smear", forward, "512", smear(False), 2 * size),
        tunable("smear_backward", at_once + summed, "512", smear(True), 3 * size),
        tunable("leaky_relu_squared", blocks, "1536", act, 6 * size),
        tunable("leaky_relu_squared_backward", blocks, "1536", act_back, 9 * size),
        tunable("qk_norm_rope", turned, "golf, values passed on", rope, 4 * size),
        tunable("qk_norm_rope_backward", resident, "golf, queries", rope_back(1), 3 * size),
        tunable(
            "qk_norm_rope_parts_backward", resident, "golf, keys and values in two parts", rope_back(2), 3.5 * size
        ),
        tunable("remove_own_value", projected, "golf", exclusive, 2.5 * size),
        tunable("remove_own_value_backward", projected, "golf", exclusive_back, 4 * size),
    ]
