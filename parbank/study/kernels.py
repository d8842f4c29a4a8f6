"""Published claims about kernels, each as a pair of calls: the challenger, and the code that it would replace.

A docstring says what is claimed, where, and with which number. Sizes are those of one micro-batch of the golf model.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parbank import ops
from parbank.errors import DeviceError
from parbank.ops import fp8, reference

SLOPE = 0.5
Call = Callable[[], Any]


@dataclass(frozen=True)
class Bench:
    """Makes inputs: random numbers of a seed, never zeros."""

    device: torch.device
    seed: int

    @property
    def tokens(self) -> int:
        return 98_304 if self.device.type == "cuda" else 256

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def random(self, *shape: int, number: int = 0) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(1000 * self.seed + number)
        return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)

    def need_cuda(self, subject: str) -> None:
        if self.device.type != "cuda":
            raise DeviceError(f"{subject} needs an NVIDIA GPU, and this study runs on {self.device.type}")

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function compiled by Inductor on a GPU, and unchanged on a CPU."""
        return torch.compile(function, dynamic=False) if self.device.type == "cuda" else function


Pair = Callable[[Bench], tuple[Call, Call]]
KERNELS: dict[str, Pair] = {}
PORTABLE = {"one-qkv-product"}
"""Pairs that are the same comparison on a CPU. The other ops fall back to PyTorch there: on both sides, or on the wrong one."""


def kernel(function: Pair) -> Pair:
    """Registers a pair under the function's name, with dashes."""
    KERNELS[function.__name__.replace("_", "-")] = function
    return function


def both_ways(bench: Bench, function: Callable[..., Tensor], inputs: list[Tensor]) -> Call:
    """Forward and backward, with a random gradient of the output, the same for both calls of a pair."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    grad = bench.random(*function(*leaves).shape, number=99)
    return lambda: torch.autograd.grad(function(*leaves), leaves, grad)


def _mlp_inputs(bench: Bench) -> list[Tensor]:
    up, down = bench.random(1536, 512, number=1) / 512**0.5, bench.random(512, 1536, number=2) / 1536**0.5
    return [bench.random(bench.tokens, 512), up, down]


def _fused_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return ops.mlp(x, up, down, SLOPE)


def _plain_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return reference.mlp(x, up, down, SLOPE)


@kernel
def own_product(bench: Bench) -> tuple[Call, Call]:
    """The MLP's first product by a hand-written GEMM in Triton, in place of cuBLAS: 2.5 times slower (parameter-golf #670)."""
    bench.need_cuda("a hand-written GEMM")
    from parbank.study.gemm import product

    x, weight, _ = _mlp_inputs(bench)
    return lambda: product(x, weight), lambda: F.linear(x, weight)


@kernel
def own_symmetric_product(bench: Bench) -> tuple[Call, Call]:
    """X X^T by a hand-written kernel that computes half the tiles, in place of cuBLAS: up to 1.5 times as fast (modded-nanogpt
    #109)."""
    x = bench.random(22, 512, 512)
    return lambda: ops.xxt(x), lambda: torch.bmm(x, x.mT)


@kernel
def fused_mlp_forward(bench: Bench) -> tuple[Call, Call]:
    """GEMM and activation in one kernel, forward only: 1.82 times as fast (parameter-golf #670)."""
    inputs, compiled = _mlp_inputs(bench), bench.compile(_plain_mlp)
    return lambda: _fused_mlp(*inputs), lambda: compiled(*inputs)


@kernel
def fused_mlp_both_ways(bench: Bench) -> tuple[Call, Call]:
    """GEMM and activation in one kernel, forward and backward: 2.7 times slower (parameter-golf #670); faster, 3% of the
    step, where both directions are ops that the compiler knows (#1105)."""
    inputs = _mlp_inputs(bench)
    return both_ways(bench, _fused_mlp, inputs), both_ways(bench, bench.compile(_plain_mlp), inputs)


@kernel
def activation_as_triton_op(bench: Bench) -> tuple[Call, Call]:
    """The activation's kernel registered by torch.library.triton_op in place of custom_op, in a compiled function; Inductor
    may then plan its memory. No number."""
    bench.need_cuda("triton_op")
    op, x = _triton_op(), bench.random(bench.tokens, 1536)
    challenger = bench.compile(lambda x: op(0.5 * x) + x)
    incumbent = bench.compile(lambda x: ops.leaky_relu_squared(0.5 * x, SLOPE) + x)
    return lambda: challenger(x), lambda: incumbent(x)


@functools.cache
def _triton_op() -> Callable[[Tensor], Tensor]:
    """Once a process: PyTorch keeps the name."""
    from parbank.ops.activation import _leaky_forward_kernel
    from parbank.ops.backend import triton

    def launch(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        grid = (triton.cdiv(x.numel(), 1024),)
        torch.library.wrap_triton(_leaky_forward_kernel)[grid](x, y, x.numel(), SLOPE, BLOCK=1024)
        return y

    return torch.library.triton_op("parbank_study::leaky_relu_squared", launch, mutates_args=())


# Eight bfloat16 numbers a thread, in one 16-byte load and store. A bfloat16 is the upper half of a float.
CUDA_SOURCE = f"""
extern "C" __global__ void leaky_relu_squared(const uint4* x, uint4* y, int count) {{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    uint4 four = x[i];
    unsigned int* words = (unsigned int*)&four;
    for (int w = 0; w < 4; ++w) {{
        unsigned int out = 0;
        for (int half = 0; half < 2; ++half) {{
            float v = __uint_as_float(half ? words[w] & 0xffff0000u : words[w] << 16);
            v = v > 0.0f ? v : v * {SLOPE}f;
            unsigned int bits = __float_as_uint(v * v);
            bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest even
            out |= bits << (16 * half);
        }}
        words[w] = out;
    }}
    y[i] = four;
}}
"""


@kernel
def activation_in_cuda(bench: Bench) -> tuple[Call, Call]:
    """The activation in CUDA C++, compiled at run time, in place of the Triton kernel: 6% slower (parameter-golf #670)."""
    bench.need_cuda("a kernel in CUDA C++")
    run = torch.cuda._compile_kernel(CUDA_SOURCE, "leaky_relu_squared")
    x = bench.random(bench.tokens, 1536)
    y, count = torch.empty_like(x), x.numel() // 8
    arguments = {"grid": (-(-count // 256), 1, 1), "block": (256, 1, 1), "args": [x, y, count]}

    def challenger() -> Tensor:
        run(**arguments)
        return y

    return challenger, lambda: ops.leaky_relu_squared(x, SLOPE)


@kernel
def norm_with_residual(bench: Bench) -> tuple[Call, Call]:
    """Residual addition and RMSNorm in one kernel each way, in place of two: a tie (parameter-golf #670)."""
    inputs = [bench.random(bench.tokens, 512, number=n) for n in range(2)]

    def fused(x: Tensor, y: Tensor) -> Tensor:
        total, normed = ops.add_rms_norm(x, y)
        return total + normed  # both outputs are used, as a block does

    def apart(x: Tensor, y: Tensor) -> Tensor:
        total = x + y
        return total + ops.rms_norm(total)

    return both_ways(bench, fused, inputs), both_ways(bench, apart, inputs)


@kernel
def fp8_mlp(bench: Bench) -> tuple[Call, Call]:
    """The MLP's products in FP8 with all rounding, forward and backward, in place of bfloat16: no gain at K=512
    (parameter-golf #670)."""
    bench.need_cuda("FP8")
    inputs = _mlp_inputs(bench)
    eight = bench.compile(lambda x, up, down: fp8.mlp(x, up, down, SLOPE))
    return both_ways(bench, eight, inputs), both_ways(bench, _fused_mlp, inputs)


@kernel
def one_qkv_product(bench: Bench) -> tuple[Call, Call]:
    """One product for Q, K and V with a split after it, in place of three: 3 to 17% slower (parameter-golf #670)."""
    x, weights = bench.random(bench.tokens, 512), [bench.random(n, 512, number=n) for n in (512, 256, 256)]
    whole = torch.cat(weights)

    def challenger() -> list[Tensor]:
        return [part.contiguous() for part in F.linear(x, whole).split([512, 256, 256], dim=-1)]

    return challenger, lambda: [F.linear(x, weight) for weight in weights]


def claim_of(name: str) -> str:
    return " ".join((KERNELS[name].__doc__ or "").split())
