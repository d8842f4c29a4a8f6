"""torchvision beside a build of PyTorch for the CPU.

transformers and timm import torchvision. Its compiled part may not load beside such a build, and its import then fails
at two operators that are registered without a guard. Declared without an implementation, they let it pass; no model in
these tests calls them.
"""

import functools

import torch


@functools.cache
def declare_operators() -> torch.library.Library | None:
    """Declares the operators if torchvision cannot be imported. The declarations live as long as the result."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    except ImportError:  # not installed
        pass
    return None
