"""Calibration: second moments of every weight matrix's inputs and gradients, measured on training text. Quantisation
minimises the error that they predict.

Let L be the loss summed over tokens, y_t = W x_t the outputs of one matrix and d_t = dL/dy_t. A perturbation D of W
moves y_t by D x_t. At a trained minimum the first-order term vanishes. With the Fisher matrix for the Hessian, and
independent gradients of different tokens,

    L(W + D) - L(W)  ~  1/2 sum_t (d_t . D x_t)^2.

Kronecker-factored (K-FAC, Martens and Grosse 2015: a token's gradient taken as independent of its input) and without
the gradients' cross terms between outputs, this is per token

    1/2 sum_r g_r D_r H D_r^T,      H = mean_t x_t x_t^T,      g_r = mean_t d_tr^2,

in nats. `Calibration` holds H and g in this normalisation, so that one multiplier compares all tensors of a model.

A lookup y_t = E[id_t] has one input per row, and row v occurs in the share f_v of the tokens: 1/2 sum_v f_v D_v
diag(c) D_v^T with c_k = mean_t d_tk^2. A tied table is read as a table and as the head, and a row's two matrices add:
f_v diag(c) + g_v H. Both f_v and g_v follow the token's frequency, so all rows share rho diag(c) + H, with rho the
ratio of their sums, and a row's weight keeps the trace of its own sum.

A head makes logits: the gradient of a token's logits is below zero for one of them at most, the token that came. So a head shows
itself. Its d_tr is p_tr, the probability of r, and p_tr - 1 where r came. A token that is rare, or does not come in this text, has
a mean square far below p (1 - p), what the Fisher matrix has for it, and its row would be rounded without care. The mean of the
positive d_tr estimates p (1 - p) for every row. So a head's g_r have the shares of these means, and the sum of the squares.

The model is not modified: a torch function mode sees every F.linear and F.embedding of a forward pass, and identifies
weights by their memory, through views, transposes and the casts of mixed precision.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from parbank.artifact.pack import plan
from parbank.data.shards import TokenSet
from parbank.errors import DataError
from parbank.model import GPT
from parbank.ops.backend import use_backend
from parbank.precision import autocast
from parbank.quant.calibration import Calibration
from parbank.quant.config import QuantConfig
from parbank.runtime import Runtime

# Tokens of one pass: activations of all layers and the plain attention's (heads, T, T) are kept for backward.
_TOKENS_CUDA, _TOKENS_CPU = 8192, 2048
_LOGITS = 1 << 25  # tokens times vocabulary of one pass


def calibrate(
    model: GPT,
    tokens: TokenSet,
    config: QuantConfig,
    *,
    context: int,
    runtime: Runtime,
    progress: Callable[[float], None] = lambda share: None,
) -> Calibration:
    """H and g of every tensor that becomes integers, over about `config.calibration_tokens` in windows spread evenly over
    the text.

    The windows are distributed over the ranks and the sums added, so every rank returns the same. Nothing is random. A
    rank without a window reads the first one and adds zeros: all ranks must sum the same tensors.
    """
    starts = _window_starts(len(tokens), context, config.calibration_tokens)
    mine = starts[runtime.rank :: runtime.world] or starts[:1]
    limit = _TOKENS_CUDA if runtime.is_cuda else _TOKENS_CPU
    rows = max(1, min(limit, _LOGITS // model.config.vocab_size) // context)
    probe = Probe(_weights(model, config), runtime.device)
    with frozen(model), use_backend("reference"):
        for first in range(0, len(mine), rows):
            windows = [
                torch.from_numpy(tokens.read(s, context + 1).astype("int64")) for s in mine[first : first + rows]
            ]
            batch = torch.stack(windows).to(runtime.device)
            with probe, autocast(runtime.device):
                loss = model(batch[:, :-1], batch[:, 1:], reduction="sum")
            loss.backward()
            probe.forget()
            progress(min(1.0, (first + rows) / len(mine)))
    if runtime.rank >= len(starts):
        probe.zero_sums()
    return probe.finish(len(starts) * context, runtime)


def _window_starts(length: int, context: int, count: int) -> list[int]:
    room = length - context - 1
    if room < 0:
        raise DataError(
            f"calibration needs a window of {context + 1} tokens and the training text has {length}; give more text, or set "
            "quant.method=rows"
        )
    windows = max(1, min(count, length - 1) // context)
    return [room * i // max(windows - 1, 1) for i in range(windows)]


def _weights(model: GPT, config: QuantConfig) -> dict[str, Tensor]:
    """The tensors that become integers, as views of the parameters' own memory."""
    state = model.state_dict(keep_vars=False)
    specs = plan({name: tuple(tensor.shape) for name, tensor in state.items()}, config)
    return {spec.name: state[spec.name] for spec in specs if spec.q}


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Eval mode, with gradients of activations only: gradients of weights are not needed."""
    training = model.training
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    model.eval().requires_grad_(False)
    try:
        with torch.enable_grad():
            yield
    finally:
        model.train(training)
        for parameter, flag in zip(model.parameters(), wanted):
            parameter.requires_grad_(flag)


class Probe(TorchFunctionMode):
    """Watches a forward pass, and sums inputs and output gradients when backward reaches them."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        super().__init__()
        self.addresses = {_address(tensor): name for name, tensor in weights.items()}
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self.strides = {name: tensor.stride() for name, tensor in weights.items()}
        self.device = device
        self.casts: dict[int, tuple[int, Tensor]] = {}
        self.grams: dict[tuple[Any, ...], tuple[Tensor, str]] = {}
        self.inputs: dict[str, Tensor] = {}
        self.shared: dict[str, str] = {}
        self.counts: dict[str, Tensor] = {}
        self.squares: dict[tuple[str, str], Tensor] = {}
        self.likely: dict[str, Tensor] = {}
        """The sums of the positive gradients, by output, of each weight that is read as a linear layer."""
        self.signs: dict[str, Tensor] = {}
        """How many of its outputs' gradients were negative in one place, and in several, so that they are no logits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self.device.type == "cuda":
            # fused kernels sum gradients in a free order, and the same model must give the same file
            with sdpa_kernel([SDPBackend.MATH]):
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if func is torch.Tensor.to:
            self._follow_cast(args[0], out)
        elif func in (F.linear, F.embedding):
            given = {**dict(zip(("input", "weight"), args)), **kwargs}
            see = self.see_linear if func is F.linear else self.see_lookup
            see(given["input"], given["weight"], out)
        return out

    def see_linear(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Records a product with a weight (outputs, inputs), if the weight is watched."""
        if (name := self._find_name(weight)) is not None:
            self._see_input(name, x.detach())
            self._watch("linear", name, out)

    def see_lookup(self, ids: Tensor, weight: Tensor, out: Tensor) -> None:
        """Records a lookup in a table, if the table is watched."""
        if (name := self._find_name(weight)) is not None:
            _add(self.counts, name, torch.bincount(ids.flatten(), minlength=self.shapes[name][0]))
            out.requires_grad_()
            self._watch("embedding", name, out)

    def forget(self) -> None:
        """Releases the tensors of a pass. They are kept until then, so that no new tensor takes their address."""
        self.casts.clear()
        self.grams.clear()

    def zero_sums(self) -> None:
        """Keeps the names and shapes of all sums, and no number."""
        for sums in (self.inputs, self.counts, self.squares, self.likely, self.signs):
            for total in sums.values():
                total.zero_()

    def finish(self, tokens: int, runtime: Runtime) -> Calibration:
        """Sums over the ranks, in the order of the names, and the normalisation."""
        inputs = {name: runtime.sum(self.inputs[name].double()) / tokens for name in sorted(self.inputs)}
        counts = {name: runtime.sum(self.counts[name].double()) / tokens for name in sorted(self.counts)}
        squares = {key: runtime.sum(self.squares[key].double()) / tokens for key in sorted(self.squares)}
        likely = {name: runtime.sum(self.likely[name].double()) for name in sorted(self.likely)}
        signs = {name: runtime.sum(self.signs[name].double()) for name in sorted(self.signs)}
        # Two outputs, such as a gate's, seldom have two negative gradients, whatever they are.
        logits = frozenset(
            name
            for name, (once, more) in signs.items()
            if once and not more and likely[name].sum() > 0 and len(likely[name]) > 2
        )
        hessians, sensitivity = {}, {}
        for name in sorted(self.shapes):
            hessian = inputs.get(self.shared.get(name, name))
            head, table = squares.get(("linear", name)), squares.get(("embedding", name))
            if head is not None and name in logits:
                head = likely[name] * (head.sum() / likely[name].sum())
            if table is not None:
                share = counts[name] + 0.5 / tokens  # a row that this text does not look up may be looked up in another
                hessian, head = _join_table(share, table, hessian, head)
            if hessian is not None and head is not None:
                hessians[name], sensitivity[name] = hessian.float(), head.float()
        return Calibration(hessians=hessians, sensitivity=sensitivity, logits=logits & hessians.keys(), tokens=tokens)

    def _find_name(self, weight: Tensor) -> str | None:
        """The name of the weight at this address. None if a part or a transpose is read: its moments have another shape."""
        pointer, offset = _address(weight)
        source = self.casts.get(pointer)
        name = self.addresses.get((source[0] if source else pointer, offset))
        whole = name is not None and (weight.shape, weight.stride()) == (self.shapes[name], self.strides[name])
        return name if whole else None

    def _follow_cast(self, source: Tensor, out: Tensor) -> None:
        """A cast keeps each element's place in the storage, if the parameter fills it densely."""
        pointer = source.untyped_storage().data_ptr()
        if pointer in self.storages and out.untyped_storage().data_ptr() != pointer:
            self.casts[out.untyped_storage().data_ptr()] = (pointer, out)

    def _see_input(self, name: str, x: Tensor) -> None:
        """H += x^T x. Matrices that read the same input share the sum: query, key and value."""
        key = (x.data_ptr(), x.shape, x.stride())
        owner = self.grams[key][1] if key in self.grams else name
        self.grams.setdefault(key, (x, name))
        if self.shared.setdefault(name, owner) != name:
            return
        flat = x.reshape(-1, x.shape[-1]).float()
        with torch.autocast(self.device.type, enabled=False):  # it would round the sum to 16 bits, which is indefinite
            _add(self.inputs, name, flat.mT @ flat)

    def _watch(self, kind: str, name: str, out: Tensor) -> None:
        def add(gradient: Tensor) -> None:
            rows = gradient.reshape(-1, gradient.shape[-1]).float()
            _add(self.squares, (kind, name), rows.square().sum(0))
            seen = self.signs.get(name)
            if kind == "linear" and (seen is None or not seen[1]):  # most are no logits by the first pass
                negative = (rows < 0).sum(1)
                _add(self.signs, name, torch.stack([(negative == 1).sum(), (negative > 1).sum()]))
                _add(self.likely, name, rows.relu().sum(0))

        if out.requires_grad:
            out.register_hook(add)


def _add(sums: dict[Any, Tensor], key: Any, term: Tensor) -> None:
    sums[key] = sums[key] + term if key in sums else term


def _address(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())


def _join_table(share: Tensor, square: Tensor, hessian: Tensor | None, head: Tensor | None) -> tuple[Tensor, Tensor]:
    """H and g of a table, tied (with a head's H and g) or not: see the top of this file."""
    diagonal = torch.diag(square)
    if hessian is None or head is None:
        return diagonal, share
    joined = share.sum() / head.sum().clamp(min=torch.finfo(head.dtype).tiny) * diagonal + hessian
    trace = joined.trace().clamp(min=torch.finfo(head.dtype).tiny)
    return joined, (share * square.sum() + head * hessian.trace()) / trace
