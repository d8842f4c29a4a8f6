"""Gradients at fixed addresses, for a CUDA graph that reads them there.

A gradient that moves is copied once to memory of its own, and stays there: `zero` fills it with zeros, and backward adds
to it, so that there is no second copy. Where zeros stand for "set to None", a gradient that no code has computed must still
count as None. A hook on each parameter tells when a backward has added to its gradient. For other gradients, the host asks
the device whether they are still zero: they may also be written by hand, by a library or by the caller's own graph.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class FixedGradients:
    """The gradients of some parameters, each in memory of its own."""

    def __init__(self) -> None:
        self._places: dict[Tensor, Tensor] = {}
        self._zeroed: list[Tensor] = []
        """Parameters whose gradients were filled with zeros, in place of None."""
        self._dropped: set[Tensor] = set()
        """Parameters whose gradients may lie elsewhere: they are new here, or this object has set them to None."""
        self._computed: set[int] = set()
        """By id: the parameters that a backward has reached since."""
        self._hooks: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._hooks).atexit = False  # parameters outlive an optimizer

    def __bool__(self) -> bool:
        return bool(self._places)

    def hold(self, params: Sequence[Tensor]) -> None:
        """Gives the gradients of more parameters memory of their own; `bring_back` moves them there."""
        computed = self._computed  # a hook must not keep this object alive
        for param in params:
            if param.requires_grad and param not in self._places:
                like = param.detach() if param.grad is None else param.grad
                self._places[param] = torch.empty_like(like)
                self._dropped.add(param)
                hook = param.register_post_accumulate_grad_hook(lambda reached: computed.add(id(reached)))
                self._hooks.append(hook)

    def bring_back(self, *, always: bool) -> bool:
        """Copies gradients that lie elsewhere to their own memory: one launch for all.

        If no gradient lies here, and this object has not set them to None, other code has, probably at every step. The
        memory here is then a second copy. Unless `always`, nothing is copied in that case, and the result is False.
        """
        away = [(p, g) for p, place in self._places.items() if (g := p.grad) is not None and g is not place]
        if not away:
            return True
        none_here = not any(param.grad is place for param, place in self._places.items())
        if not always and none_here and any(param not in self._dropped for param, _ in away):
            return False
        for param, grad in away:
            self._dropped.discard(param)
            if self._places[param].dtype != grad.dtype:
                self._places[param] = torch.empty_like(grad)
        torch._foreach_copy_([self._places[param] for param, _ in away], [grad for _, grad in away])
        for param, _ in away:
            param.grad = self._places[param]
        return True

    def zero(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Fills the gradients that lie here with zeros. Returns the parameters whose gradients do not."""
        self._zeroed = [p for p in params if p.grad is not None and p.grad is self._places.get(p)]
        if not self._zeroed:
            return list(params)
        self._computed.clear()
        torch._foreach_zero_([self._places[param] for param in self._zeroed])
        here = set(self._zeroed)
        return [param for param in params if param not in here]

    def drop_unused(self) -> bool:
        """Sets gradients to None that no code has written since `zero`. True if other code than backward has written some.

        Waits for the device only if a backward has left out a parameter.
        """
        left = [p for p in self._zeroed if id(p) not in self._computed and p.grad is self._places[p] and p.numel()]
        self._zeroed = []
        self._computed.clear()
        if not left or (left[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        norms = torch._foreach_norm([self._places[param] for param in left], torch.inf)
        written = [norm != 0 for norm in torch.stack([norm.double() for norm in norms]).tolist()]  # NaN counts, too
        for param, by_hand in zip(left, written):
            if not by_hand:
                param.grad = None
                self._dropped.add(param)
        return any(written)

    def release(self) -> None:
        """Gives the memory back. Gradients that lie in it stay there until other code sets them to None."""
        _remove(self._hooks)
        self._places.clear()
        self._zeroed.clear()
        self._dropped.clear()


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
