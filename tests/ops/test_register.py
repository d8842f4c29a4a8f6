"""Every operator refuses or has a derivative, and none imports the compiler before something compiles."""

import os
import subprocess
import sys

import pytest
import torch

import parbank.ops.flash
import parbank.ops.window_attention  # noqa: F401 (registers its operator)


def test_no_operator_drops_a_gradient_in_silence() -> None:
    names = [schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("parbank::")]
    assert len(names) >= 35
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert [name for name in names if not has_kernel(name, "Autograd")] == []
    assert [name for name in names if not has_kernel(name, "Meta")] == [], "a compiler asks for shapes"


def test_the_compiler_is_imported_where_something_compiles_alone() -> None:
    """The import takes seconds. Once it is there, the same operators work in a compiled function, and stay one call in it."""
    pytest.importorskip("triton")
    code = """
import sys, torch
from parbank import ops
from parbank.ops import backend
with backend.use_backend("triton"):
    x = torch.randn(4, 64, requires_grad=True)
    ops.leaky_relu_squared(x, 0.5).sum().backward()
    ops.rms_norm(x).sum().backward()
    loaded = [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]
    assert not loaded, loaded
    before, x.grad = x.grad, None
    graphs = []
    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward
    compiled = torch.compile(lambda x: ops.leaky_relu_squared(x, 0.5) + ops.rms_norm(x), backend=keep, fullgraph=True)
    compiled(x).sum().backward()
    torch.testing.assert_close(x.grad, before)
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if "parbank" in str(node.target)]
    assert called == ["parbank.leaky_relu_squared.default", "parbank.rms_norm.default"], called
"""
    interpreted = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=interpreted)


def test_a_function_that_does_not_compile_whole_calls_operators_as_they_are() -> None:
    """Its operators run while the compiler watches. It would trace what calls each of them, once for each operator and shape."""
    pytest.importorskip("triton")
    code = """
import torch
from parbank import ops
from parbank.ops import backend
from torch._dynamo.utils import counters
def break_in_a_loop(x):
    for _ in range(2):
        torch._dynamo.graph_break()
        x = torch.ops.parbank.leaky_relu_squared(x, 0.5) + torch.ops.parbank.xxt(x) @ x
    return x
x = torch.randn(4, 64)
with backend.use_backend("triton"):
    expected = break_in_a_loop(x)
    torch.testing.assert_close(torch.compile(break_in_a_loop, backend="eager")(x), expected)
traced = [reason for reason in counters["graph_break"] if "disable" in reason]
assert not traced, traced
"""
    interpreted = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=interpreted)


def test_operators_run_while_another_thread_imports_the_compiler() -> None:
    """Here an import that holds the lock of another module of the compiler would leave it half imported."""
    code = """
import threading, torch
from torch import Tensor
from parbank.ops.register import operator
@operator("twice_for_a_test")
def twice(x: Tensor) -> Tensor:
    return 2 * x
start = threading.Thread(target=lambda: __import__("torch._dynamo"))
start.start()
faults = []
def call():
    try:
        while start.is_alive():
            assert twice(torch.ones(3)).sum() == 6
    except Exception as fault:
        faults.append(fault)
threads = [threading.Thread(target=call) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in (start, *threads)]
assert not faults, faults
torch._dynamo.exc, torch._dynamo.decorators.skip, torch._dynamo.disable
assert twice(torch.ones(3)).sum() == 6
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
