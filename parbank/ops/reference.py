"""The definition of every op in plain PyTorch: the specification for kernels, tests and benchmarks.

The definitions also run wherever Triton or a GPU is missing. Statistics (means of squares, log-sum-exp, tanh) are
computed in float32 whatever the input; float64 stays float64. Results have the input's dtype.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# On Hopper cuDNN's attention is the fastest of PyTorch's; the rest are for where it is missing (CPU, masks, other shapes).
ATTENTION_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Far below the mean square of any live activation, far above float32's rounding; keeps a zero row at zero.
NORM_EPS = 1e-6
# The floor of a value's squared length, so that a zero value does not divide by zero: the square of 1e-6, far below the length
# of any live value, far above the smallest float32.
VALUE_FLOOR = 1e-12


def rms_norm(x: Tensor, weight: Tensor | None = None, scale: float = 1.0, eps: float = NORM_EPS) -> Tensor:
    """scale * weight * x / sqrt(mean(x^2) + eps) over the last dimension."""
    wide = _wide(x)
    y = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps) * scale
    if weight is not None:
        y = y * weight
    return y.to(x.dtype)


def add_rms_norm(x: Tensor, y: Tensor, scale: float = 1.0, eps: float = NORM_EPS) -> tuple[Tensor, Tensor]:
    """The residual sum s = x + y and rms_norm(s, scale=scale): both are needed by a block."""
    total = (_wide(x) + _wide(y)).to(x.dtype)
    return total, rms_norm(total, scale=scale, eps=eps)


def mix_rms_norm(
    x: Tensor, x0: Tensor, a: Tensor, b: Tensor, scale: float = 1.0, eps: float = NORM_EPS
) -> tuple[Tensor, Tensor]:
    """The residual mix m = a*x + b*x0 (a, b per channel) and rms_norm(m, scale=scale): both are needed by a block."""
    mixed = (a * _wide(x) + b * _wide(x0)).to(x.dtype)
    return mixed, rms_norm(mixed, scale=scale, eps=eps)


def add_mix_rms_norm(
    x: Tensor,
    y: Tensor,
    x0: Tensor,
    a: Tensor,
    b: Tensor,
    skip: Tensor | None = None,
    gain: Tensor | None = None,
    scale: float = 1.0,
    eps: float = NORM_EPS,
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual sum s = x + y + gain*skip (gain per channel; skip may be left out), then `mix_rms_norm` of it with x0:
    the sum, its mix and its norm."""
    total = _wide(x) + _wide(y)
    if skip is not None and gain is not None:
        total = total + gain * _wide(skip)
    total = total.to(x.dtype)
    return total, *mix_rms_norm(total, x0, a, b, scale, eps)


def smear(x: Tensor, gate: Tensor, starts: Tensor) -> Tensor:
    """(1 - gate) * x + gate * (x one position earlier), gate per channel.

    x (B, T, width); starts (B, T), bool, marks positions with nothing before them; the first of a row never has anything.
    """
    wide = _wide(x)
    previous = F.pad(wide[:, :-1], (0, 0, 1, 0)) * ~starts[..., None]
    return ((1 - gate) * wide + gate * previous).to(x.dtype)


def leaky_relu_squared(x: Tensor, slope: float) -> Tensor:
    """LeakyReLU(x)^2: x^2 where x > 0, (slope*x)^2 elsewhere."""
    y = F.leaky_relu(_wide(x), slope)
    return (y * y).to(x.dtype)


def mlp(x: Tensor, w_up: Tensor, w_down: Tensor, slope: float) -> Tensor:
    """leaky_relu_squared(x W_up^T) W_down^T with w_up (hidden, width) and w_down (width, hidden); no biases."""
    return F.linear(leaky_relu_squared(F.linear(x, w_up), slope), w_down)


def softcap_cross_entropy(
    logits: Tensor, targets: Tensor, cap: float = 0.0, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """Cross-entropy of cap*tanh(logits/cap) (cap 0: of the logits as they are) in float32. reduction: mean, sum or none.

    logits (..., V), targets (...). "none" keeps the shape of the targets, with zeros where a target is ignored.
    """
    wide = _wide(logits)
    if cap:
        wide = cap * torch.tanh(wide / cap)
    rows = wide.reshape(-1, wide.shape[-1])
    losses = F.cross_entropy(rows, targets.flatten(), ignore_index=ignore_index, reduction=reduction)
    return losses.view(targets.shape) if reduction == "none" else losses


def linear_softcap_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, cap: float = 0.0, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """softcap_cross_entropy(x W^T, targets): the head product and the loss as one op."""
    return softcap_cross_entropy(F.linear(x, weight), targets, cap, ignore_index, reduction)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first 2*cos.shape[-1] channels of x (..., T, H, D); the others pass through.

    Channel i is paired with channel i + half; cos and sin are (T, half).
    """
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat([first * cos + second * sin, second * cos - first * sin, rest], dim=-1)


def qk_norm_rope(
    q: Tensor, k: Tensor, gain: Tensor | None, cos: Tensor, sin: Tensor, eps: float = NORM_EPS
) -> tuple[Tensor, Tensor]:
    """RMS norm over each head's channels, partial rotation, and a gain per query head, in float32 throughout.

    q (B, T, H, D), k (B, T, KV, D), gain (H,), cos and sin (T, rope_dims / 2).
    """
    new_q = rotate(rms_norm(_wide(q), eps=eps), cos, sin)
    new_k = rotate(rms_norm(_wide(k), eps=eps), cos, sin)
    if gain is not None:
        new_q = new_q * gain[:, None]
    return new_q.to(q.dtype), new_k.to(k.dtype)


def qkv_norm_rope(
    x: Tensor,
    w_query: Tensor,
    w_key: Tensor,
    w_value: Tensor,
    heads: int,
    gain: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float = NORM_EPS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of x (B, T, width): three products, then `qk_norm_rope` on the first two."""
    width = w_query.shape[0] // heads
    q, k, v = (F.linear(x, w).unflatten(-1, (-1, width)) for w in (w_query, w_key, w_value))
    return *qk_norm_rope(q, k, gain, cos, sin, eps), v


@dataclass(frozen=True)
class BlockInput:
    """How the stream of a block follows from its input x, and which outputs are wanted."""

    mix: tuple[Tensor, Tensor, Tensor] | None = None
    """x0 and, per channel, a and b: the stream is a*x + b*x0. Without it, it is x."""
    skip: tuple[Tensor, Tensor] | None = None
    """A tensor and its gain per channel, added to x first."""
    extra: Tensor | None = None
    """Added to the values, (B, T, KV, D)."""
    scale: float = 1.0
    """A factor on the norm."""
    eps: float = NORM_EPS
    return_x: bool = True
    """Return x for later readers (the other end of a skip), so that one pass sums its gradients. Turn it off where x has no other
    reader: the compiler would write zeros for an unused output's gradient."""


PLAIN = BlockInput()


def stream_qkv(
    x: Tensor,
    w_query: Tensor,
    w_key: Tensor,
    w_value: Tensor,
    heads: int,
    gain: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    block_input: BlockInput = PLAIN,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, the stream m = a*(x + gain*skip) + b*x0, and the queries, keys and values of m's norm."""
    wide = _wide(x)
    if block_input.skip is not None:
        wide = wide + block_input.skip[1] * _wide(block_input.skip[0])
    if block_input.mix is not None:
        x0, a, b = block_input.mix
        wide = a * wide + b * _wide(x0)
    m = wide.to(x.dtype)
    normed = rms_norm(m, scale=block_input.scale, eps=block_input.eps)
    q, k, v = qkv_norm_rope(normed, w_query, w_key, w_value, heads, gain, cos, sin, block_input.eps)
    return x, m, q, k, v if block_input.extra is None else v + block_input.extra


def stream_attention(
    x: Tensor,
    w_query: Tensor,
    w_key: Tensor,
    w_value: Tensor,
    heads: int,
    gain: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    block_input: BlockInput = PLAIN,
    with_values: bool = True,
    lengths: Tensor | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """x, m, the attention output of `stream_qkv`'s queries, and its values."""
    _, m, q, k, v = stream_qkv(x, w_query, w_key, w_value, heads, gain, cos, sin, block_input)
    return x, m, causal_attention(q, k, v, lengths, window), v if with_values else None


def fan_out(x: Tensor, copies: int) -> tuple[Tensor, ...]:
    """x, `copies` times."""
    return (x,) * copies


def add_linear(c: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """c + x W^T."""
    return c + F.linear(x, w)


def residual_mlp(
    x: Tensor, w_up: Tensor, w_down: Tensor, slope: float, scale: float = 1.0, eps: float = NORM_EPS
) -> Tensor:
    """x + mlp(scale * rms_norm(x))."""
    return x + mlp(rms_norm(x, scale=scale, eps=eps), w_up, w_down, slope)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, window: int = 0) -> Tensor:
    """`attention` where a query sees the keys up to its own, of its document (`lengths`: their cumulative lengths over all
    B T tokens) and of the last `window`; 0 is no limit."""
    if lengths is None and not window:
        return attention(q, k, v)
    batch, length = q.shape[:2]
    document = None
    if lengths is not None:
        place = torch.arange(batch * length, dtype=lengths.dtype, device=q.device)
        document = torch.searchsorted(lengths[1:], place, right=True).view(batch, length)
    return attention(q, k, v, causal_mask(length, q.device, document, window))


def causal_mask(length: int, device: torch.device, document: Tensor | None = None, window: int = 0) -> Tensor:
    """(B, 1, T, T), or (T, T) without documents: true where a query sees a key up to its own, of the same number in
    `document` (B, T), and of the last `window`; 0 is no limit."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    if window:
        seen = seen.triu(1 - window)
    return seen if document is None else ((document[:, :, None] == document[:, None, :]) & seen)[:, None]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax attention over (B, T, heads, D) with grouped keys and values: causal, or as the mask says."""
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        # PyTorch's attention for CPUs takes longer in bfloat16 than in float32 (docs/log/cpu.md).
        with torch.autocast("cpu", enabled=False):
            return _attention(q.float(), k.float(), v.float(), mask).to(q.dtype)
    return _attention(q, k, v, mask)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    with sdpa_kernel(ATTENTION_BACKENDS, set_priority=True):
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return y.transpose(1, 2)


def remove_own_value(y: Tensor, v: Tensor) -> Tensor:
    """y - (y.v / v.v) v per token and head: exclusive self-attention removes the component along a token's own value.

    y (B, T, heads, D), v (B, T, kv_heads, D); heads are grouped as in attention, and v is never repeated. A zero
    value removes nothing.
    """
    grouped = _wide(y).unflatten(2, (v.shape[2], y.shape[2] // v.shape[2]))
    own = _wide(v)[:, :, :, None]
    along = (grouped * own).sum(-1, keepdim=True) / own.square().sum(-1, keepdim=True).clamp(min=VALUE_FLOOR)
    return (grouped - along * own).flatten(2, 3).to(y.dtype)


def window_attention(
    q: Tensor, past_k: Tensor, past_v: Tensor, k: Tensor, v: Tensor, low: Tensor, window: int
) -> Tensor:
    """Softmax attention of q (B, T, heads, D) over keys past_k (B, P, kv_heads, D), then k (B, T, kv_heads, D), values
    likewise. Query i sees the `window` keys up to its own, key P + i, but no key before low[i] except its own.

    Block by block of queries under an explicit mask, so that memory stays bounded for any length.
    """
    length, carried = q.shape[1], past_k.shape[1]
    keys, values = torch.cat([past_k, k], dim=1), torch.cat([past_v, v], dim=1)
    step = max(64, math.ceil(window / 4))  # a block looks at window + step keys, so a quarter more work than needed
    parts = []
    for a in range(0, length, step):
        b = min(length, a + step)
        first, last = max(0, carried + a - window + 1), carried + b
        key = torch.arange(first, last, device=q.device)
        own = torch.arange(carried + a, carried + b, device=q.device)[:, None]
        seen = (key <= own) & (key > own - window) & (key >= low[a:b, None].clamp(max=own))
        part = F.scaled_dot_product_attention(
            q[:, a:b].transpose(1, 2),
            keys[:, first:last].transpose(1, 2),
            values[:, first:last].transpose(1, 2),
            attn_mask=seen,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        parts.append(part.transpose(1, 2))
    return torch.cat(parts, dim=1) if parts else torch.empty_like(q)


def xxt(x: Tensor) -> Tensor:
    """X X^T over (..., m, k): symmetric."""
    return x @ x.mT


def ba_plus_caa(a: Tensor, b: float, c: float) -> Tensor:
    """b A + c A A over (..., m, m) for symmetric A: symmetric."""
    return b * a + c * (a @ a)


def symmetric_product(a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """alpha A B + beta C over (..., m, m) for symmetric A and B that commute, and symmetric C: symmetric."""
    product = alpha * (a @ b)
    return product if c is None else product + beta * c


def ax_plus_bx(x: Tensor, b: Tensor, a: float) -> Tensor:
    """a X + B X over X (..., m, n) and B (..., m, m)."""
    return a * x + b @ x


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
