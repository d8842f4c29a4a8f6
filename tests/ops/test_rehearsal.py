"""A rehearsal compiles what work would launch, all together, and launches nothing."""

import pytest
import torch

from parbank.ops import backend
from parbank.ops.rehearsal import can_rehearse, rehearsal
from parbank.ops.sums import _sum_lines_kernel, sum_lines


def test_there_is_nothing_to_rehearse_where_kernels_are_interpreted_or_missing(monkeypatch):
    assert can_rehearse() == (backend.HAS_TRITON and not backend.INTERPRETED)
    monkeypatch.setattr(backend, "HAS_TRITON", False)
    assert not can_rehearse()


def test_the_parts_of_triton_it_uses_are_there():
    """Without a GPU nothing here can run; a new Triton that moved them must not go unnoticed."""
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    assert callable(JITFunction.run)
    assert isinstance(CompiledKernel.run, property)
    assert callable(AsyncCompileMode.submit)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_kernels_are_ready_afterwards_and_were_not_launched(name):
    device = torch.device(name)
    partial = torch.randn(2, 50, 48, device=device)
    with torch.cuda.device(device):
        _sum_lines_kernel.device_caches.clear()
        with rehearsal(device):
            empty = sum_lines(partial)
        kernels = list(_sum_lines_kernel.device_caches[torch.cuda.current_device()][0].values())
    assert empty.shape == (2, 48)
    assert len(kernels) == 1
    assert all(kernel.module is not None for kernel in kernels), "loaded, not only compiled"
    torch.testing.assert_close(sum_lines(partial), partial.sum(1))


@pytest.mark.gpu
def test_an_error_inside_leaves_launches_as_they_were(device):
    with pytest.raises(ValueError, match="ours"), rehearsal(device):
        raise ValueError("ours")
    partial = torch.randn(1, 20, 16, device=device)
    torch.testing.assert_close(sum_lines(partial), partial.sum(1))
