"""The fused kernels: equal to their plain definition in the interpreter, and built for real architectures."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parbank.ops.backend import HAS_TRITON, INTERPRETED, use_backend
from parbank.optim import ParallelMuon
from parbank.optim.graph import GraphedStep

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")

# One batch of both orientations and several parameters; sides below, at and above a tile, aligned and not.
SHAPES = ((16, 24), (24, 16), (3, 16, 24), (2, 80, 70), (70, 80), (64, 128), (2, 128, 64), (96, 24))


def _train(backend: str, dtype: torch.dtype, options: dict[str, Any]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)  # no update is so near to zero that caution hangs on its last bit
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    spare = nn.Parameter(torch.randn(5, generator=generator))
    groups = [
        {"params": params[:4], "lr": 0.05},
        {"params": params[4:-1], "lr": 0.02, "weight_decay": 0.3, "lr_scale": "rms"},
        {"params": params[-1:], "split_sizes": (40, 40, 16)},  # the last block joins the batch of the first shapes
    ]
    with use_backend(backend):
        optimizer = ParallelMuon(
            [*groups, {"params": [spare], "algorithm": "adamw"}],
            weight_decay=0.1,
            max_norm=1.0,
            method="plain",
            **options,
        )
        for step in range(3):
            for param in [*params, spare]:
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            if step == 1:
                spare.grad[0] = float("nan")  # skipped: nothing may move
            if step == 2:
                params[1].grad = None
            optimizer.step()
    assert optimizer.skipped_in_a_row == 0
    values = [value for param in params for value in optimizer.state[param].values()]
    return [param.detach() for param in params] + values


@pytest.mark.skipif(not INTERPRETED, reason="interprets the kernels; set TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"nesterov": False, "cautious": True}, {"normuon": True, "cautious": True}])
def test_equal_their_definition(dtype: torch.dtype, options: dict[str, Any]) -> None:
    expected = _train("reference", dtype, options)
    found = _train("triton", dtype, options)
    for number, (a, b) in enumerate(zip(found, expected)):
        if a.dtype == torch.int16:  # the remainder of a master that may differ in its last bits
            continue
        torch.testing.assert_close(a, b, rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-5, atol=1e-6, msg=str(number))


HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.skipif(not INTERPRETED, reason="interprets the kernels; set TRITON_INTERPRET=1")
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.bfloat16), HALVES, (torch.float16,) * 2, (torch.float64,) * 2, (torch.bfloat16,) * 2],
)
def test_gradients_of_another_dtype(dtypes: tuple[torch.dtype, ...], staged: bool) -> None:
    """`param.grad_dtype` allows it. One launch reads all gradients of a batch in one dtype."""

    def train(backend: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(8, 8, generator=generator)) for _ in dtypes]
        optimizer = ParallelMuon(params, method="plain", cuda_graph="auto" if staged else False)
        if staged:  # as if on the way to a capture
            optimizer._graph = GraphedStep(optimizer, required=False, capture=_Again)
        for _ in range(4):
            for param, dtype in zip(params, dtypes):
                param.grad_dtype = dtype
                grad = torch.randn(8, 8, generator=generator).to(dtype)
                param.grad = grad if param.grad is None else param.grad.copy_(grad)
            with use_backend(backend):
                optimizer.step()
        return [param.detach() for param in params]

    for a, b in zip(train("triton"), train("reference")):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class _Again:
    """In place of a CUDA graph: does the work over again."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


@pytest.mark.slow
def test_compile_for_real_architectures() -> None:
    """In a process of its own: here kernels are interpreted, and Triton decides that once. Spills would show in the metadata."""
    script = """
        import triton, triton.language as tl
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from parbank.optim import kernels as k

        def build(kernel, signature, constants):
            source = ASTSource(
                fn=kernel,
                signature={**signature, **dict.fromkeys(constants, "constexpr")},
                constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
            )
            for capability in (80, 89, 90, 100, 120):
                built = triton.compile(source, target=GPUTarget("cuda", capability, 32))
                assert len(built.asm["cubin"]) > 0
                if constants.get("ALIGNED"):
                    assert "ld.global.v4" in built.asm["ptx"], f"{kernel.__name__} must read 16 bytes at a time"

        base = {"table": "*i64", "owner": "*i32", "hyper": "*fp32", "active": "*fp32", "control": "*fp32"}
        for aligned in (True, False):
            before = {"WIDTH": 4, "MOMENTUM": 1, "NESTEROV": True, "GRAD": tl.float32, "BLOCK": k.TILE, "ALIGNED": aligned}
            after = {"WIDTH": 4, "LR": 0, "DECAY": 2, "CAUTIOUS": True, "LOW_BITS": aligned, "BLOCK": k.TILE, "ALIGNED": aligned}
            build(k._muon_momentum_kernel, {**base, "squares": "*fp32"}, before)
            build(k._muon_normalize_kernel, {**base, "inverse": "*fp32", "out": "*fp16"}, before)
            build(k._muon_apply_kernel, {**base, "scales": "*fp32", "updates": "*fp16"}, after)
        norms = {"squares": "*fp32", "inverse": "*fp32", "per_block": "i32"}
        build(k._muon_inverse_norm_kernel, norms, {"EPS": 1e-20, "BLOCK": 256})
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**environment, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
