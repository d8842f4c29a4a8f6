"""FlashAttention 3's two functions as definitions for the CPU, strict about what the library takes for granted."""

import math

import torch
from torch import Tensor

LIMITS = """*, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None,
    float? softmax_scale=None, bool is_causal=False, int window_size_left=-1"""
FORWARD = f"fwd(Tensor q, Tensor k, Tensor v, Tensor(a!)? out=None, {LIMITS}, int num_splits=0)"
BACKWARD = f"""bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq=None,
    Tensor(b!)? dk=None, Tensor(c!)? dv=None, {LIMITS}, bool deterministic=False)"""


def assert_addressable(*tensors: Tensor) -> None:
    """What the library takes for granted of all that it reads and writes through the copy engine."""
    for x in tensors:
        assert x.stride(-1) == 1
        assert x.data_ptr() % 16 == 0
        assert all(step * x.element_size() % 16 == 0 for step in x.stride()[:-1]), x.stride()


def scores(
    q: Tensor,
    k: Tensor,
    softmax_scale: float,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool = True,
    window_size_left: int = -1,
) -> Tensor:
    """(B, heads, T, T) in float32, with nothing where a query does not see a key."""
    assert is_causal
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    ahead = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None]
    hidden = (ahead > 0) | ((ahead < -window_size_left) if window_size_left >= 0 else ahead > 0)
    if cu_seqlens_q is not None:
        sizes = cu_seqlens_q.diff()
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert cu_seqlens_q[0] == 0
        assert cu_seqlens_q[-1] == q.shape[1]
        assert 0 <= sizes.min() <= sizes.max() <= max_seqlen_q == max_seqlen_k
        document = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        hidden = hidden | (document != document[:, None])
    return torch.einsum("bihd,bjhd->bhij", q.float(), k.float()).mul(softmax_scale).masked_fill(hidden, -math.inf)


def forward(q, k, v, out=None, *, num_splits=0, **limits):
    assert num_splits == 1
    assert_addressable(q, k, v, out)
    one_row = limits.get("cu_seqlens_q") is not None  # (tokens, heads, D): a batch of one row
    if one_row:
        q, k, v = q[None], k[None], v[None]
    s = scores(q, k, **limits)
    y = torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v.float().repeat_interleave(q.shape[2] // v.shape[2], 2))
    out.copy_(y[0] if one_row else y)
    lse = s.logsumexp(-1)
    return out, lse[0] if one_row else lse, torch.empty(0), torch.empty(0)


def backward(dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None, *, deterministic=False, **limits):
    assert_addressable(dout, q, k, v, out, dq, dk, dv)
    results = dq, dk, dv
    if limits.get("cu_seqlens_q") is not None:
        dout, q, k, v, out, softmax_lse, dq, dk, dv = (x[None] for x in (dout, q, k, v, out, softmax_lse, dq, dk, dv))
    group = q.shape[2] // k.shape[2]
    p = (scores(q, k, **limits) - softmax_lse[..., None]).exp()
    wide_k, wide_v = (x.float().repeat_interleave(group, 2) for x in (k, v))
    own = (dout.float() * out.float()).sum(-1).transpose(1, 2)[..., None]
    ds = p * (torch.einsum("bihd,bjhd->bhij", dout.float(), wide_v) - own) * limits["softmax_scale"]
    dq.copy_(torch.einsum("bhij,bjhd->bihd", ds, wide_k))
    for target, x, y in ((dk, ds, q), (dv, p, dout)):
        whole = torch.einsum("bhij,bihd->bjhd", x, y.float())
        target.copy_(whole.view(*target.shape[:3], group, -1).sum(3))
    return results
