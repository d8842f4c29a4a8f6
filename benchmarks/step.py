"""The training step against its floor, and where its time goes.

    python benchmarks/step.py [--variants plain kernels all] [--set a.b=v]... [--quick] [--out DIR]

The floor is measured in the same run: every product of the step, forward and both ways back, with cuBLAS, and attention with
the fastest of PyTorch's backends, each alone, summed. Then, for the golf recipe and each variant (`plain`: every op in plain
PyTorch under Inductor; `kernels`: ours; `all`: ours, with passes and optimizer replayed as CUDA graphs): forward + backward of
one micro-batch, the optimizer section, a whole step of one and of eight micro-batches, peak memory, and a waterfall by kernel
class with its picture.

Random tokens, and random values in the matrices that a new model has at zero: products of zeros are faster than life.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import RESULTS, Row, Settings, hardware, measure, write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from waterfall import Waterfall, draw, profile

from parbank.config import override
from parbank.model import GPT, ModelConfig
from parbank.ops.backend import use_backend
from parbank.optim.averaging import Averages
from parbank.optim.parallel_muon import ParallelMuon
from parbank.recipes import get_recipe
from parbank.train.config import RunConfig
from parbank.train.groups import parameter_groups
from parbank.train.passes import Passes

# The published recipe's own figures on one H200, random data: forward + backward at 98,304 tokens, optimizer section.
REFERENCE_MICRO, REFERENCE_SECTION = 69.6, 8.9
DEVICE = torch.device("cuda")


# --- the floor --------------------------------------------------------------------------------------------------------


def products(c: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Every product of a forward pass: (inputs, outputs, how often)."""
    found = {
        "query, output": (c.width, c.width, 2 * c.layers),
        "key, value": (c.width, c.kv_width, 2 * c.layers),
        "up": (c.width, c.hidden, c.layers),
        "down": (c.hidden, c.width, c.layers),
        "head": (c.width, c.vocab_size, 1),
    }
    if c.bigram_buckets:
        found["bigram"] = (c.bigram_width, c.width, 1)
    if c.value_layers:
        found["value embedding"] = (c.value_width, c.kv_width, 1)
    return found


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def measure_products(c: ModelConfig, tokens: int, settings: Settings) -> dict[str, float]:
    times = {}
    for name, (inputs, outputs, count) in products(c).items():
        x, w, g = random(tokens, inputs), random(outputs, inputs), random(tokens, outputs)
        pairs = [(x, w.mT), (g, w), (g.mT, x)]  # forward, and the gradients of its input and of its weight
        times[name] = count * sum(measure(partial(torch.matmul, a, b), settings=settings) for a, b in pairs)
    return times


def measure_attention(c: ModelConfig, batch: int, length: int, settings: Settings) -> dict[str, float]:
    """Milliseconds of all layers both ways, by backend."""
    q, k, v = (random(batch, length, h, c.head_width).transpose(1, 2) for h in (c.heads, c.kv_heads, c.kv_heads))
    head = random(batch, length, c.heads, c.head_width).transpose(1, 2)
    times = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]

        def call(leaves: list[Tensor] = leaves, backend: SDPBackend = backend) -> Any:
            with sdpa_kernel(backend):
                y = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
            return torch.autograd.grad(y, leaves, head)

        try:
            times[backend.name.lower()] = c.layers * measure(call, settings=settings)
        except RuntimeError as error:
            print(f"{backend.name}: {str(error).splitlines()[0]}")
    return times


# --- the step ---------------------------------------------------------------------------------------------------------


class Step:
    """Model, optimizer and averages of a recipe, as the trainer puts them together, on one random micro-batch."""

    def __init__(self, config: RunConfig) -> None:
        torch.manual_seed(0)
        self.config = config
        self.model = GPT(config.model).to(DEVICE)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if not parameter.any():
                    parameter.normal_(std=0.02)
        forward = torch.compile(self.model, dynamic=False)
        graph = config.train.cuda_graph
        self.passes = {count: Passes(forward, self.model, DEVICE, count, graph=graph) for count in (1, 8)}
        self.optimizer = ParallelMuon(
            parameter_groups(self.model, config.optim), max_norm=config.optim.clip, cuda_graph=graph
        )
        self.averages = Averages(dict(self.model.named_parameters()), config.average)
        rows = config.batch.micro_batch_tokens // config.batch.sequence_length
        shape = (rows, config.batch.sequence_length + 1)
        self.batch = torch.randint(0, config.model.vocab_size, shape, device=DEVICE)

    def accumulate(self, passes: int = 1) -> None:
        self.passes[passes].start()
        for _ in range(passes):
            self.passes[passes].add(self.batch)

    def update(self, *, clear: bool = True) -> None:
        self.optimizer.step()
        if clear:
            self.optimizer.zero_grad(set_to_none=False)
        self.averages.update(1.0)

    def whole(self, passes: int) -> None:
        self.accumulate(passes)
        self.update()


def measure_queued(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Milliseconds of a call among its like, queued without a pause as in training: on the device, and of the host."""
    call()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    host = []
    for mark in marks[1:]:
        began = time.perf_counter()
        call()
        mark.record()
        host.append(1e3 * (time.perf_counter() - began))
    torch.cuda.synchronize()
    device = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return statistics.median(device), statistics.median(host)


def measure_variant(
    name: str, config: RunConfig, floor: float, settings: Settings, rows: list[Row]
) -> dict[str, Waterfall]:
    tokens, repeats = config.batch.micro_batch_tokens, 5 if settings.quick else 15

    def note(case: str, value: float, unit: str = "ms", bound: float | None = None) -> None:
        rows.append(Row(case, name, value, unit, bound))
        print(f"{case:44} {name:12} {value:10.3f} {unit}" + (f"  bound {bound:.2f}" if bound else ""), flush=True)

    began = time.perf_counter()
    step = Step(config)
    for _ in range(4):  # compiles, makes the optimizer's state, and has the step captured where it is to be
        step.whole(1)
    torch.cuda.synchronize()
    note("compile and first steps", time.perf_counter() - began, "s")
    torch.cuda.reset_peak_memory_stats()
    micro, host = measure_queued(lambda: (step.accumulate(), step.optimizer.zero_grad(set_to_none=False)), repeats)
    note(f"forward + backward, {tokens:,} tokens", micro, bound=floor)
    note(f"forward + backward, {tokens:,} tokens: host", host)
    step.accumulate()
    # Gradients stay, or all but the first call would work on zeros.
    section, host = measure_queued(lambda: step.update(clear=False), repeats)
    note("optimizer section", section)
    note("optimizer section: host", host)
    for passes in (1, 8):
        whole, host = measure_queued(lambda passes=passes: step.whole(passes), repeats if passes == 1 else 4)
        note(f"whole step, {passes * tokens:,} tokens", whole, bound=passes * floor)
        note(f"whole step, {passes * tokens:,} tokens: host", host)
    note("peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    return {"micro": profile(step.accumulate), "whole": profile(lambda: step.whole(1))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="*", default=["plain", "all"], choices=["plain", "kernels", "all"])
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="a.b=v")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--name", default="step", help="of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch sees none")
    config = override(get_recipe("golf"), *arguments.settings)
    settings = Settings(quick=arguments.quick)
    tokens, length = config.batch.micro_batch_tokens, config.batch.sequence_length
    gemms = measure_products(config.model, tokens, settings)
    attention = measure_attention(config.model, tokens // length, length, settings)
    rows = [Row(f"products: {name}", "floor", ms) for name, ms in gemms.items()]
    rows += [Row(f"attention: {name}", "floor", ms) for name, ms in attention.items()]
    floor = sum(gemms.values()) + min(attention.values())
    rows += [Row("all products", "floor", sum(gemms.values())), Row("products + attention", "floor", floor)]
    rows.append(Row(f"forward + backward, {tokens:,} tokens", "published", REFERENCE_MICRO, "ms", floor))
    rows.append(Row("optimizer section", "published", REFERENCE_SECTION))
    for passes in (1, 8):
        published = passes * REFERENCE_MICRO + REFERENCE_SECTION
        rows.append(Row(f"whole step, {passes * tokens:,} tokens", "published", published, "ms", passes * floor))
    for row in rows:
        print(f"{row.case:44} {row.provider:12} {row.value:10.3f} {row.unit}", flush=True)
    falls: dict[str, dict[str, Waterfall]] = {}
    for variant in arguments.variants:
        with use_backend("reference" if variant == "plain" else "triton"):
            chosen = override(config, f"train.cuda_graph={str(variant == 'all').lower()}")
            falls[variant] = measure_variant(variant, chosen, floor, settings, rows)
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        for part, fall in falls[variant].items():
            rows += [Row(f"waterfall, {part}: {label}", variant, ms) for label, ms in fall.classes.items()]
        extra = {
            "settings": arguments.settings,
            "kernels": {
                name: {part: fall.kernels[:40] for part, fall in found.items()} for name, found in falls.items()
            },
        }
        path = write(arguments.name, rows, out=arguments.out, extra=extra)
        title = f"forward + backward, {tokens:,} tokens, {hardware().upper()}"
        draw({name: found["micro"] for name, found in falls.items()}, path.with_suffix(".png"), title, floor)
    print(path.with_suffix(".md").read_text())
    for name, found in falls.items():
        print(name)
        for label, kernel, count, ms in found["whole"].kernels[:25]:
            print(f"{ms:8.3f} ms {count:5d}  {label:12} {kernel[:110]}")


if __name__ == "__main__":
    main()
