"""Where a step's time goes: the kernels of a profile by class, the gaps between them, and a picture of both. For step.py."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# First match wins. Attention before products, because its kernels name the GEMM they are made of; what Inductor generates
# carries the names of the operations it fused. Ours come first: they are named after their op.
CLASSES: list[tuple[str, tuple[str, ...]]] = [
    ("optimizer", ("_muon_", "_symmetric_product", "multi_tensor", "foreach", "fused_adam", "_xxt", "lerp")),
    ("loss", ("_loss_", "cross_entropy", "nll", "log_softmax", "logsumexp", "tanh")),
    ("norm", ("_norm_", "rms_norm", "rsqrt", "_rope_", "native_layer_norm")),
    ("attention", ("fmha", "flash", "sdpa", "cudnn", "attention", "softmax")),
    ("GEMM", ("_mlp_product", "_mlp_pingpong", "gemm", "nvjet", "xmma", "cutlass", "cublas", "splitk", "triton_tem")),
    ("activation", ("_leaky_", "leaky")),
    (
        "embedding",
        ("embedding", "index_put", "index_select", "indexing_backward", "compute_grad_weight", "radix", "sort"),
    ),
    ("copies and fills", ("memcpy", "memset", "fillfunctor", "copy_kernel", "catarray")),
]
OTHER = "other pointwise and reductions"
GAPS = "gaps"
COLOURS = {
    "GEMM": "#2a6f97", "attention": "#61a5c2", "norm": "#e09f3e", "activation": "#9e2a2b", "loss": "#7b2d8b",
    "embedding": "#588157", "optimizer": "#344e41", "copies and fills": "#8d99ae", OTHER: "#d4a373", GAPS: "#cccccc",
}  # fmt: skip


@dataclass
class Waterfall:
    """Milliseconds by class, and the kernels behind them. They add up to the span from first to last kernel."""

    classes: dict[str, float]
    kernels: list[tuple[str, str, int, float]] = field(default_factory=list)
    """(class, name, launches, milliseconds), the longest first."""

    @property
    def total(self) -> float:
        return sum(self.classes.values())


def classify(name: str) -> str:
    lower = name.lower()
    return next((label for label, words in CLASSES if any(word in lower for word in words)), OTHER)


def profile(call: Callable[[], Any]) -> Waterfall:
    """One call under PyTorch's profiler, already warm. Only the device is traced: tracing the host would slow it down."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    with trace(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    spans = [
        (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in found.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0
    ]
    return summarise(spans)


def summarise(spans: list[tuple[str, int, int]]) -> Waterfall:
    """Time under overlapping kernels goes to the one that started first; time under none is a gap."""
    classes: Counter[str] = Counter({label: 0.0 for label in COLOURS})
    launches: Counter[str] = Counter()
    times: Counter[str] = Counter()
    end = min((start for _, start, _ in spans), default=0)
    for name, start, stop in sorted(spans, key=lambda span: span[1]):
        classes[GAPS] += max(0, start - end) / 1e6
        own = max(0, stop - max(start, end)) / 1e6
        classes[classify(name)] += own
        launches[name] += 1
        times[name] += own
        end = max(end, stop)
    kernels = [(classify(name), name[:160], launches[name], ms) for name, ms in times.most_common()]
    return Waterfall(dict(classes), kernels)


def draw(falls: dict[str, Waterfall], path: Path, title: str, floor: float | None = None) -> None:
    """One bar a variant, stacked by class; the floor as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 1.4 + 0.8 * len(falls)))
    for row, fall in enumerate(falls.values()):
        left = 0.0
        for label, colour in COLOURS.items():
            width = fall.classes.get(label, 0.0)
            axes.barh(row, width, left=left, color=colour, label=label if row == 0 else None)
            if width > 0.02 * fall.total:
                axes.text(left + width / 2, row, f"{width:.1f}", ha="center", va="center", fontsize=8, color="white")
            left += width
        axes.text(left + 0.3, row, f"{left:.1f} ms", va="center", fontsize=9)
    if floor is not None:
        axes.axvline(floor, color="black", linestyle="--", linewidth=1, label=f"floor {floor:.1f} ms")
    axes.set_yticks(range(len(falls)), list(falls))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(fall.total for fall in falls.values()))
    axes.set(xlabel="milliseconds", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=6, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.35))
    figure.tight_layout()
    figure.savefig(path, dpi=130)
