"""Memory layout of tensors. Kernels walk weight, gradient and state together: all must be dense and in one order."""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor


class Views:
    """Views of tensors, kept as long as the tensors stay where they are: making a view costs the host more than comparing
    addresses."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[list[int], list[Tensor]]] = {}

    def get(self, key: Hashable, tensors: Sequence[Tensor], make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The result of `make`, which depends on the memory of `tensors` alone."""
        places = [tensor.data_ptr() for tensor in tensors]
        kept = self._kept.get(key)
        if kept is None or kept[0] != places:
            kept = self._kept[key] = (places, make())
        return kept[1]

    def clear(self) -> None:
        self._kept.clear()


def overlaps(tensor: Tensor) -> bool:
    """Whether two numbers of a tensor may share memory, as in an expanded one.

    From the smallest stride up, each dimension must step over everything that the smaller ones reach. Interleaved
    dimensions that happen not to meet count as overlapping, too.
    """
    reach = 0
    for stride, size in sorted((t, n) for t, n in zip(tensor.stride(), tensor.shape) if n != 1):
        if stride <= reach:
            return tensor.numel() > 0
        reach += (size - 1) * stride
    return False


def same_order(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have their numbers in one order. The stride of a single number means nothing."""
    strides = zip(a.shape, a.stride(), b.stride())
    return a.stride() == b.stride() or all(n == 1 or s == t for n, s, t in strides)


def arrange(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor in the memory order of `like`: itself, or a copy."""
    if tensor.shape != like.shape or same_order(tensor, like):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def make_dense(tensor: Tensor) -> Tensor:
    """The tensor itself where it fills its memory without gaps, else a copy that does."""
    return tensor if tensor.is_contiguous() else arrange(tensor, torch.empty_like(tensor))
