"""The model over many texts side by side, one token of each at a time.

`Stream` reads one text, many tokens together. A decoder cannot: it knows a token only after it has the probabilities
that the tokens before it give. So many texts, the lanes, go through the model together, one token of each a step. Every
step has the same shapes and runs the same kernels in the same order. That makes its results equal to the last bit
whenever the same tokens are read again by the same program on the same machine.

All lanes begin together, so a step has one position. In every layer a lane keeps the keys and values of its last `window`
tokens in a ring.
"""

import math
from functools import partial

import torch
from torch import Tensor

from parbank import ops
from parbank.model.attention import Context
from parbank.model.gpt import GPT
from parbank.model.stream import BEFORE, _rotations


class Lanes:
    """A model that reads `lanes` texts. Use it inside `torch.inference_mode` and, on a GPU, inside autocast."""

    def __init__(self, model: GPT, window: int, lanes: int) -> None:
        c, device = model.config, model.token_embedding.weight.device
        self.model, self.window, self.lanes = model, window, lanes
        self._dtype = model._compute_dtype(device)
        ring = (c.layers, lanes, c.kv_heads, window, c.head_width)
        self._keys, self._values = (torch.zeros(ring, dtype=self._dtype, device=device) for _ in range(2))
        self._slots = torch.arange(window, device=device)
        self._place = torch.zeros((), dtype=torch.long, device=device)  # of the next token, in every lane
        self._seen = torch.zeros(lanes, dtype=torch.long, device=device)  # tokens before it that a lane may see
        self._recent = torch.zeros(lanes, BEFORE + 1, dtype=torch.long, device=device)
        self._matrices = model.matrices(torch.empty(0, dtype=self._dtype, device=device))

    def restart(self) -> None:
        """Begins new texts. The rings keep old keys, which no token of the new texts sees."""
        self._place.zero_()
        self._seen.zero_()

    def read(self, ids: Tensor) -> Tensor:
        """Reads the next token of every lane, (lanes,) int64. Returns the logits of the token after it, (lanes,
        vocabulary) float32. All state stays in place, so that a step can be recorded as a CUDA graph."""
        model, c = self.model, self.model.config
        self._recent.copy_(torch.cat([self._recent[:, 1:], ids[:, None]], dim=1))
        x, extras = self._embed(ids)
        cos, sin = _rotations(self._place, 1, c.rope_dims, c.rope_base)
        ago = (self._place - self._slots) % self.window  # the age of the token in each slot: zero is this token
        context = Context(cos, sin, attend=partial(self._attend, ago))
        x = model.run_blocks(x, extras, context, self._matrices)
        self._place += 1
        self._seen += 1
        return model.read_out(ops.rms_norm(x), None)[:, 0]

    def _embed(self, ids: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """The input of the first block, (lanes, 1, width), and the additions to the values by layer."""
        model, c = self.model, self.model.config
        if c.isolate_documents:
            self._seen.masked_fill_(ids == c.bos_id, 0)
        back = torch.arange(BEFORE, -1, -1, device=ids.device)
        starts = back == self._seen[:, None]  # smear reads one token back, and that token's bigram one more
        x = model.embed(self._recent, starts, self._dtype)[:, BEFORE:]
        return x, {} if model.value_embedding is None else model.value_embedding(ids[:, None], self._dtype)

    def _attend(self, ago: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Softmax attention of q (lanes, 1, heads, D) over the ring of a layer, after k and v are written to it. `ago` is the
        age of the token in each slot."""
        visible = (ago <= self._seen[:, None]) & (ago < (self.model.config.window_of(layer) or self.window))
        keys, values = self._keys[layer], self._values[layer]
        slot = (self._place % self.window)[None]
        keys.index_copy_(2, slot, k.transpose(1, 2))
        values.index_copy_(2, slot, v.transpose(1, 2))
        # Two batched products: on a CPU they take half the time of scaled_dot_product_attention with one query.
        mine = q[:, 0].unflatten(1, (keys.shape[1], -1)) / math.sqrt(q.shape[-1])  # (lanes, kv_heads, group, D)
        scores = torch.matmul(mine, keys.mT).float().masked_fill_(~visible[:, None, None], -math.inf)
        y = torch.matmul(scores.softmax(-1).to(v.dtype), values)
        return y.flatten(1, 2)[:, None]
