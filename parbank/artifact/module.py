"""Modules that parbank did not build: the roles of their weights, and their calibration (`parbank.artifact.calibrate`)."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from parbank.artifact.calibrate import Probe, frozen
from parbank.errors import ConfigError
from parbank.ops.backend import use_backend
from parbank.quant.calibration import Calibration
from parbank.quant.roles import Role
from parbank.runtime import Runtime

Batch = Tensor | Mapping[str, Any] | tuple[Any, ...] | list[Any]
Loss = Callable[[Any, Batch], Tensor]


def roles_in(module: nn.Module) -> dict[str, Role]:
    """The roles that a module's structure shows, by name: embeddings, heads tied to one, and buffers, which are not
    weights. `role` decides the rest."""
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    found: Mapping[str, Role] = {name: "other" for name, _ in module.named_buffers(remove_duplicate=False)}
    named = module.named_parameters(remove_duplicate=False)
    return {**found, **{name: "embedding" for name, parameter in named if id(parameter) in tables}}


def transposed_in(module: nn.Module) -> frozenset[str]:
    """The names of weights stored as (inputs, outputs): those of GPT-2's own linear layer in the package transformers. Scales
    and Hessians are for (outputs, inputs)."""
    layers = ((prefix, layer) for prefix, layer in module.named_modules() if type(layer).__name__ == "Conv1D")
    return frozenset(
        f"{prefix}.weight" for prefix, layer in layers if getattr(layer, "weight", torch.empty(0)).ndim == 2
    )


def calibrate_module(
    module: nn.Module, batches: Iterable[Batch], weights: Mapping[str, Tensor], *, loss: Loss | None = None
) -> Calibration:
    """H and g of any module's weights, over batches: token ids (B, T), or a dict or tuple of the module's arguments.
    `weights` are views of the module's memory, by name. A weight that no linear layer, product or embedding reads has
    no entry in the result.

    `loss` makes a number from the module's output and the batch. Without it, the loss is the output's `.loss`, the
    output itself if it is one number, or the cross-entropy of the next token, of logits (B, T, vocabulary) against
    token ids.
    """
    if not isinstance(batches, Iterable):
        raise ConfigError(f"calibration is a list of batches, got a {type(batches).__name__}")
    device = next((weight.device for weight in weights.values()), torch.device("cpu"))
    probe, tokens = _ModuleProbe(weights, device), 0
    with frozen(module), use_backend("reference"):
        for batch in batches:
            if loss is None and isinstance(batch, Tensor) and batch.ndim == 1 and not batch.is_floating_point():
                raise ConfigError(
                    f"a batch is a tensor of token ids (B, T); got a tensor of shape {tuple(batch.shape)}: give ids[None]"
                )
            given = _prepare(batch, device)
            with probe:
                out = _call(module, given)
                found = loss(out, given) if loss is not None else _default_loss(out, given)
            if not isinstance(found, Tensor) or found.numel() != 1:
                given_back = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
                raise ConfigError(f"loss must return one number as a tensor, got {given_back}; sum or average it")
            if not found.requires_grad:
                raise ConfigError(
                    "no gradient leads from the loss to a linear layer, a product or an embedding: compute the loss without "
                    "no_grad and detach, or leave calibration out if the module has no such layer"
                )
            found.backward()
            probe.forget()
            tokens += _count(given)
    if not tokens:
        raise ConfigError("calibration has no batches; give a list of token ids (B, T), or of the module's arguments")
    return probe.finish(tokens, Runtime(device=device))


class _ModuleProbe(Probe):
    """Also sees x @ W.T and addmm, which are other ways to write a linear layer, and the layers inside
    `nn.MultiheadAttention`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward:
            return self._look_inside(func, args, kwargs or {})
        out = super().__torch_function__(func, types, args, kwargs)
        place = _FACTORS.get(func)
        if place is not None and len(args) > place and args[place].ndim == 2:
            self.see_linear(args[place - 1], args[place].mT, out)
        return out

    def _look_inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function of many steps. PyTorch hands it to a mode as a whole, and the mode is off inside. It calls
        `F.linear` by its name, so a function of that name sees the calls."""
        linear = F.linear

        def see(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            out = linear(input, weight, bias)
            self.see_linear(input, weight, out)
            return out

        F.linear = see
        try:
            with sdpa_kernel([SDPBackend.MATH]):  # fused kernels sum gradients in a free order: see `Probe`
                return func(*args, **kwargs)
        finally:
            F.linear = linear


# The argument of a product that is its second factor, (inputs, outputs).
_FACTORS = {torch.matmul: 1, Tensor.matmul: 1, Tensor.__matmul__: 1, torch.mm: 1, torch.addmm: 2}


def _prepare(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device. Floating-point inputs require gradients, so that gradients reach every layer."""
    if isinstance(batch, Tensor):
        moved = batch.detach().to(device)
        return moved.clone().requires_grad_() if moved.is_floating_point() else moved
    if isinstance(batch, Mapping):
        return {name: _prepare(item, device) if isinstance(item, Tensor) else item for name, item in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_prepare(item, device) if isinstance(item, Tensor) else item for item in batch)
    raise ConfigError(
        f"a batch to calibrate on is a tensor of token ids (B, T), or a dict or tuple of the module's arguments; got a "
        f"{type(batch).__name__}"
    )


def _call(module: nn.Module, batch: Batch) -> Any:
    if isinstance(batch, Tensor):
        return module(batch)
    return module(**batch) if isinstance(batch, Mapping) else module(*batch)


def _token_ids(batch: Batch) -> Tensor | None:
    """The ids that a batch holds: the tensor itself, the argument `input_ids`, or the first argument."""
    first = batch
    if isinstance(batch, Mapping):
        first = batch.get("input_ids", next(iter(batch.values()), None))
    elif not isinstance(batch, Tensor):
        first = batch[0] if batch else None  # type: ignore[assignment]
    return first if isinstance(first, Tensor) and first.ndim == 2 and not first.is_floating_point() else None


def _count(batch: Batch) -> int:
    ids = _token_ids(batch)
    if ids is not None:
        return ids.numel()
    items = [batch] if isinstance(batch, Tensor) else list(batch.values() if isinstance(batch, Mapping) else batch)
    return next((len(item) for item in items if isinstance(item, Tensor) and item.ndim), 1)


def _default_loss(out: Any, batch: Batch) -> Tensor:
    own = getattr(out, "loss", None)
    if isinstance(own, Tensor):
        return own
    if isinstance(out, Tensor) and out.ndim == 0:
        return out
    logits, ids = getattr(out, "logits", out), _token_ids(batch)
    if isinstance(logits, Tensor) and ids is not None and logits.shape[:-1] == ids.shape:
        scored = logits[:, :-1].flatten(0, 1).float()
        return F.cross_entropy(scored, ids[:, 1:].flatten().long(), reduction="sum")
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(out).__name__
    raise ConfigError(
        f"calibration cannot find the loss of this module: it returned {shape}, which are no logits (B, T, vocabulary) of the "
        "token ids it was given. Give loss=..., a function of the output and the batch that returns one number"
    )
