"""FlashAttention 3's two functions as definitions for the CPU, strict about what the library takes for granted."""

import math

import torch
from torch import Tensor

FORWARD = """fwd(Tensor q, Tensor k, Tensor v, Tensor(a!)? out=None, float? softmax_scale=None, bool is_causal=False,
    int num_splits=0)"""
BACKWARD = """bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq=None,
    Tensor(b!)? dk=None, Tensor(c!)? dv=None, float? softmax_scale=None, bool is_causal=False, bool deterministic=False)"""


def assert_addressable(*tensors: Tensor) -> None:
    """What the library takes for granted of all that it reads and writes through the copy engine."""
    for x in tensors:
        assert x.stride(-1) == 1
        assert x.data_ptr() % 16 == 0
        assert all(step * x.element_size() % 16 == 0 for step in x.stride()[:-1]), x.stride()


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """(B, heads, T, T) in float32, with nothing where a key is ahead of its query."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    ahead = torch.ones(q.shape[1], k.shape[1]).triu(1).bool()
    return torch.einsum("bihd,bjhd->bhij", q.float(), k.float()).mul(scale).masked_fill(ahead, -math.inf)


def forward(q, k, v, out=None, softmax_scale=None, is_causal=False, num_splits=0):
    assert is_causal
    assert num_splits == 1
    assert_addressable(q, k, v, out)
    s = scores(q, k, softmax_scale)
    y = torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v.float().repeat_interleave(q.shape[2] // v.shape[2], 2))
    out.copy_(y)
    return out, s.logsumexp(-1), torch.empty(0), torch.empty(0)


def backward(
    dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, deterministic=False
):
    assert is_causal
    assert_addressable(dout, q, k, v, out, dq, dk, dv)
    group = q.shape[2] // k.shape[2]
    p = (scores(q, k, softmax_scale) - softmax_lse[..., None]).exp()
    wide_k, wide_v = (x.float().repeat_interleave(group, 2) for x in (k, v))
    own = (dout.float() * out.float()).sum(-1).transpose(1, 2)[..., None]
    ds = p * (torch.einsum("bihd,bjhd->bhij", dout.float(), wide_v) - own) * softmax_scale
    dq.copy_(torch.einsum("bhij,bjhd->bihd", ds, wide_k))
    for target, x, y in ((dk, ds, q), (dv, p, dout)):
        whole = torch.einsum("bhij,bihd->bjhd", x, y.float())
        target.copy_(whole.view(*target.shape[:3], group, -1).sum(3))
    return dq, dk, dv
