"""The training step against its floor, and where its time goes.

    python benchmarks/step.py [--variants published ours ...] [--set a.b=v]... [--quick] [--claim NAME] [--out DIR]

The floor, which is the bound, is measured in the same run. It is the sum of every product of the step with cuBLAS, forward and
both gradients, and of attention by the fastest backend of this machine (PyTorch's own, FlexAttention, FlashAttention 3 where
installed), each alone. Then, for the golf recipe, each variant:

- `published`: the baseline. The published recipe's own script (parameter-golf #549), plain PyTorch under Inductor: its own loop
  on random tokens, with PyTorch's attention
- `ours`: the trainer's own step as it is shipped: passes and optimizer replayed as CUDA graphs, no torch.compile
- `cudnn`: as `ours`, without FlashAttention 3 where it is installed
- `isolated`, `isolated cudnn`: as `ours` and `cudnn`, with attention within documents. In random tokens a document has as many
  tokens as the vocabulary, on average
- `compiled`: as `ours`, with the model through torch.compile
- `kernels`: as `ours`, launch by launch
- `reference`: our model under torch.compile with every op in its plain-PyTorch definition. The definitions are written to be
  read, so this is no baseline
- `fp8`, `fp8+head`: as `compiled`, with the MLP, or MLP and head, in 8 bits: the compiler fuses the rounding

Measured: forward + backward of one micro-batch, the optimizer section, a whole step of one micro-batch and of the whole
batch, its wait for data, peak memory, and for ours a waterfall by kernel class with its picture.

Under sustained load a GPU reaches its power limit and lowers its clock; a few short calls never do. So the floor and each
variant are also held for some seconds, queued without a pause as graphs, and timed at the end beside clock and power.

--set batch.micro_batch_tokens=196608 takes larger micro-batches. Tokens are random. Matrices that a new model has at zero get
random values, because products of zeros are faster than real ones. Writes benchmarks/results/step, or the folder of --claim.
"""

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from clocks import Watch
from harness import (
    Row,
    Settings,
    can_draw,
    capture,
    hardware,
    in_a_line,
    measure,
    nothing_compiles,
    settings_of,
    start,
    write,
)
from peers import golf
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from waterfall import Waterfall, draw, profile

from parbank.config import override
from parbank.model import ModelConfig
from parbank.ops import causal_attention, flash
from parbank.ops.backend import use_backend
from parbank.recipes import get_recipe
from parbank.runtime import Runtime
from parbank.training.config import RunConfig
from parbank.training.passes import take_batch
from parbank.training.trainer import Trainer
from parbank.training.warmup import random_data

MEASURED = (
    "parbank/model",
    "parbank/ops",
    "parbank/optim",
    "parbank/graphs.py",
    "parbank/data/prefetch.py",
    "parbank/training/passes.py",
    "parbank/training/trainer.py",
    "benchmarks/step.py",
)
PUBLISHED = "published"
DEVICE = torch.device("cuda")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
HELD = "forward + backward, held for seconds"


@dataclass(frozen=True)
class Variant:
    """One way to run the step."""

    settings: tuple[str, ...] = ()
    backend: str = "triton"
    flash: bool = True
    """FlashAttention 3, where there is one."""


COMPILED = "train.compile=true"
ISOLATED = "model.isolate_documents=true"
VARIANTS = {
    "reference": Variant(("train.cuda_graph=false", COMPILED), "reference"),
    "kernels": Variant(("train.cuda_graph=false",)),
    "cudnn": Variant(flash=False),
    "ours": Variant(),
    "isolated": Variant((ISOLATED,)),
    "isolated cudnn": Variant((ISOLATED,), flash=False),
    "compiled": Variant((COMPILED,)),
    "fp8": Variant((COMPILED, "train.fp8=mlp")),
    "fp8+head": Variant((COMPILED, "train.fp8=mlp+head")),
}


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


def product_both_ways(tokens: int, inputs: int, outputs: int) -> list[Callable[[], Any]]:
    """A product, and the gradients of its input and of its weight."""
    x, w, g = random(tokens, inputs), random(outputs, inputs), random(tokens, outputs)
    return [partial(torch.matmul, a, b) for a, b in ((x, w.mT), (g, w), (g.mT, x))]


def measure_products(c: ModelConfig, tokens: int, settings: Settings) -> dict[str, float]:
    return {
        name: count * sum(measure(call, settings=settings) for call in product_both_ways(tokens, inputs, outputs))
        for name, (inputs, outputs, count) in products(c).items()
    }


def floor_in_a_row(c: ModelConfig, batch: int, length: int, attend: Attend) -> Callable[[], Any]:
    """Everything the floor counts, once, without a pause."""
    calls = [(attention_both_ways(c, batch, length, attend), c.layers)]
    for inputs, outputs, count in products(c).values():
        calls += [(call, count) for call in product_both_ways(batch * length, inputs, outputs)]

    def run() -> None:
        for call, count in calls:
            for _ in range(count):
                call()

    return capture(run)


def attention_backends(length: int) -> dict[str, Attend]:
    """Every way to causal attention on (B, T, heads, D) that this machine has."""

    def of_pytorch(backend: SDPBackend) -> Attend:
        def attend(*qkv: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                y = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), is_causal=True, enable_gqa=True)
            return y.transpose(1, 2)

        return attend

    mask = create_block_mask(lambda batch, head, query, key: query >= key, None, None, length, length, device="cuda")

    def flex(*qkv: Tensor) -> Tensor:
        y = flex_attention(*(x.transpose(1, 2) for x in qkv), block_mask=mask, enable_gqa=True)
        return y.transpose(1, 2)

    found = {x.name.lower(): of_pytorch(x) for x in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)}
    found["flex_attention"] = torch.compile(flex)
    return found | ({"flash_attention_3": causal_attention} if flash.AVAILABLE else {})


def attention_both_ways(c: ModelConfig, batch: int, length: int, attend: Attend) -> Callable[[], Any]:
    """One layer's attention, forward and backward."""
    *leaves, gradient = (random(batch, length, h, c.head_width) for h in (c.heads, c.kv_heads, c.kv_heads, c.heads))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    return lambda: torch.autograd.grad(attend(*leaves), leaves, gradient)


def measure_attention(c: ModelConfig, batch: int, length: int, settings: Settings) -> dict[str, float]:
    """Milliseconds of all layers both ways, by backend."""
    times = {}
    for name, attend in attention_backends(length).items():
        try:
            times[name] = c.layers * measure(attention_both_ways(c, batch, length, attend), settings=settings)
        except Exception as error:  # a backend that cannot run here is no reason to have no floor
            print(f"{name}: {in_a_line(error)}")
    return times


# --- the step ---------------------------------------------------------------------------------------------------------


class Step:
    """A recipe's trainer on random tokens. A step here is the trainer's own, so that it cannot differ from training."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self.config = config
        data = random_data(config, 16 * config.batch.batch_tokens)
        self.trainer = Trainer(config, Runtime(device=device), data, Path())
        with torch.no_grad():
            # Matrix by matrix, because those at zero share banks with others.
            for tensor in (*self.trainer.model.banks.matrices().values(), *self.trainer.model.parameters()):
                if not tensor.any():
                    tensor.normal_(std=0.02)
        self.trainer.warm_up()
        self.batch = [
            tensor.clone()
            for tensor in take_batch(self.trainer.batches, config.batch.sequence_length, self.trainer.isolated)
        ]

    def accumulate(self, passes: int = 1) -> None:
        """Forward and backward of the same micro-batch, so often."""
        self.trainer.passes.start(passes)
        for _ in range(passes):
            self.trainer.passes.add(*self.batch)

    def update(self) -> None:
        """The optimizer section, which clears the gradients."""
        self.trainer._update_weights(1.0)

    def keep_gradients(self) -> Callable[[], None]:
        """A call that puts back the gradients as they are now."""
        kept = [(p, p.grad.clone()) for p in self.trainer.model.parameters() if p.grad is not None]

        def put_back() -> None:
            for parameter, gradient in kept:
                if parameter.grad is None:
                    parameter.grad = gradient.clone()
                else:
                    parameter.grad.copy_(gradient)

        return put_back

    def clear(self) -> None:
        self.trainer.optimizer.zero_grad(set_to_none=False)

    def whole(self, passes: int) -> None:
        self.accumulate(passes)
        self.update()

    def train(self) -> None:
        """One step of training, with its data."""
        trainer = self.trainer
        share = trainer._schedule(0.0)
        loss = trainer._accumulate_gradients(trainer.stages[-1])
        trainer._update_weights(share)
        trainer._record(loss, share)
        trainer.telemetry.collect()
        trainer.step += 1

    def close(self) -> None:
        self.trainer.close()


def measure_queued(
    call: Callable[[], Any], repeats: int, *, skip: int = 0, before: Callable[[], Any] = lambda: None
) -> tuple[float, float]:
    """Milliseconds of a call among its like, queued without a pause as in training: on the device, and of the host.

    The first `skip` of them do not count. `before` runs ahead of each call, outside the time.
    """
    before()
    call()
    torch.cuda.synchronize()
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    host = []
    with nothing_compiles():
        for _ in range(repeats):
            before()
            marks.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            marks[-1][0].record()
            began = time.perf_counter()
            call()
            marks[-1][1].record()
            host.append(1e3 * (time.perf_counter() - began))
        torch.cuda.synchronize()
    device = [begin.elapsed_time(end) for begin, end in marks]
    return statistics.median(device[skip:]), statistics.median(host[skip:])


def hold(call: Callable[[], Any], seconds: float = 4.0) -> list[tuple[str, float | None, str]]:
    """What a call takes when the GPU has been busy with it for a while, and the clock and the power then."""
    short, _ = measure_queued(call, 2)
    repeats = max(4, round(1e3 * seconds / short))
    with Watch() as watch:
        held, _ = measure_queued(call, repeats, skip=repeats // 2)
    return [("time", held, "ms"), ("clock", watch.clock, "MHz"), ("power", watch.power, "W")]


def measure_variant(
    name: str, variant: Variant, config: RunConfig, floor: float, settings: Settings, rows: list[Row]
) -> dict[str, Waterfall]:
    config = override(config, *variant.settings)
    tokens, batch_tokens = config.batch.micro_batch_tokens, config.batch.batch_tokens
    repeats = 5 if settings.quick else 15

    def note(case: str, value: float | None, unit: str = "ms", bound: float | None = None) -> None:
        rows.append(Row(case, name, value, unit, bound, "" if value is not None else "nvidia-smi does not tell"))
        shown = f"{value:10.3f} {unit}" if value is not None else "unknown"
        print(f"{case:44} {name:12} {shown}" + (f"  bound {bound:.2f}" if bound else ""), flush=True)

    began = time.perf_counter()
    step = Step(config, DEVICE)
    note("compile and warm-up", time.perf_counter() - began, "s")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):  # captures the graph of one pass
        step.whole(1)
    micro, host = measure_queued(step.accumulate, repeats, before=step.clear)
    note(f"forward + backward, {tokens:,} tokens", micro, bound=floor)
    note(f"forward + backward, {tokens:,} tokens: host", host)
    step.accumulate()
    # The section clears the gradients: put back, or all calls but the first would work on zeros.
    section, host = measure_queued(step.update, repeats, before=step.keep_gradients())
    note("optimizer section", section)
    note("optimizer section: host", host)
    whole, host = measure_queued(lambda: step.whole(1), repeats)
    note(f"whole step, {tokens:,} tokens", whole, bound=floor)
    note(f"whole step, {tokens:,} tokens: host", host)
    step.train()  # the first one finds an empty ring of batches
    waited = step.trainer.batches.wait_seconds
    steps = max(4, 2 * repeats * tokens // batch_tokens)
    whole, host = measure_queued(step.train, steps)
    note(f"step of training, {batch_tokens:,} tokens", whole, bound=floor * batch_tokens / tokens)
    note(f"step of training, {batch_tokens:,} tokens: host", host)
    waited = (step.trainer.batches.wait_seconds - waited) / (steps + 1)
    note(f"step of training, {batch_tokens:,} tokens: wait for data", 1e3 * waited)
    note("peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    for what, value, unit in hold(step.accumulate):
        note(f"{HELD}: {what}", value, unit)
    falls = {"micro": profile(step.accumulate), "whole": profile(lambda: step.whole(1))}
    step.close()
    return falls


def measure_published(tokens: int, length: int, floor: float, rows: list[Row], seconds: float = 8.0) -> None:
    """The peer's own loop: its first steps after the warm-up beside `short` timings of ours, its last beside the held ones."""
    steps = max(40, round(1e3 * seconds / 80))  # about 80 ms a step on an H200
    times = golf.time_steps(tokens, length, steps)
    first, section = times.medians(slice(0, 15))
    held, _ = times.medians(slice(steps // 2, -1))
    found: list[tuple[str, float, str, float | None]] = [
        (f"forward + backward, {tokens:,} tokens", first, "ms", floor),
        ("optimizer section", section, "ms", None),
        (f"whole step, {tokens:,} tokens", first + section, "ms", floor),
        ("peak memory", times.peak_bytes / 2**30, "GiB", None),
        (f"{HELD}: time", held, "ms", None),
    ]
    for case, value, unit, bound in found:
        rows.append(Row(case, PUBLISHED, value, unit, bound))
        print(f"{case:44} {PUBLISHED:12} {value:10.3f} {unit}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [PUBLISHED, "ours", *(["cudnn"] if flash.AVAILABLE else []), "compiled"]
    parser.add_argument("--variants", nargs="*", default=usual, choices=[PUBLISHED, *VARIANTS])
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="a.b=v")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--claim", default="step", help="the result's folder")
    arguments = start(parser)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch sees none")
    variants = {name: VARIANTS[name] for name in arguments.variants if name != PUBLISHED}
    config = override(get_recipe("golf"), *arguments.settings)
    settings = Settings(quick=arguments.quick)
    tokens, length = config.batch.micro_batch_tokens, config.batch.sequence_length
    gemms = measure_products(config.model, tokens, settings)
    attention = measure_attention(config.model, tokens // length, length, settings)
    rows = [Row(f"products: {name}", "floor", ms) for name, ms in gemms.items()]
    rows += [Row(f"attention: {name}", "floor", ms) for name, ms in attention.items()]
    floor = sum(gemms.values()) + min(attention.values())
    rows += [Row("all products", "floor", sum(gemms.values())), Row("products + attention", "floor", floor)]
    fastest = attention_backends(length)[min(attention, key=lambda name: attention[name])]
    for what, value, unit in hold(floor_in_a_row(config.model, tokens // length, length, fastest)):
        rows.append(Row(f"{HELD}: {what}", "floor", value, unit))
    for row in rows:
        print(f"{row.case:44} {row.provider:12} {row.value or math.nan:10.3f} {row.unit}", flush=True)
    falls: dict[str, dict[str, Waterfall]] = {}

    def save() -> Path:
        """After every variant, so that a run that is cut off leaves what it has."""
        kernels = {name: {part: fall.kernels[:40] for part, fall in found.items()} for name, found in falls.items()}
        peers = [golf.describe("random tokens, one micro-batch a step")] if PUBLISHED in arguments.variants else []
        options = settings_of(arguments)
        return write(arguments.claim, rows, out=arguments.out, settings=options, measured=MEASURED, peers=peers,
                     extra={"kernels": kernels})  # fmt: skip

    if PUBLISHED in arguments.variants:
        try:
            measure_published(tokens, length, floor, rows)
        except Exception as error:  # the peer's script may not run here; ours still has its columns
            rows.append(Row(f"forward + backward, {tokens:,} tokens", PUBLISHED, None, "ms", floor, in_a_line(error)))
            print(f"{PUBLISHED}: {in_a_line(error)}", flush=True)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        save()
    has_flash = flash.AVAILABLE
    for name, variant in variants.items():
        flash.AVAILABLE = has_flash and variant.flash
        try:
            with use_backend(variant.backend):
                falls[name] = measure_variant(name, variant, config, floor, settings, rows)
        except Exception as error:  # one variant that cannot run leaves the others their columns
            note = in_a_line(error)
            rows.append(Row(f"forward + backward, {tokens:,} tokens", name, None, "ms", floor, note))
            print(f"{name}: {note}", flush=True)
        torch._dynamo.reset()
        gc.collect()  # an error's traceback, and graphs that hold each other, keep the last variant's memory
        torch.cuda.empty_cache()
        for part, fall in falls.get(name, {}).items():
            rows += [Row(f"waterfall, {part}: {label}", name, ms) for label, ms in fall.classes.items()]
        path = save()
        if falls and can_draw():
            title = f"forward + backward, {tokens:,} tokens, {hardware().upper()}"
            draw({name: found["micro"] for name, found in falls.items()}, path.with_name("waterfall.png"), title, floor)
    path = save()
    print(path.with_suffix(".md").read_text())
    for name, found in falls.items():
        print(name)
        for label, kernel, count, ms in found["whole"].kernels[:25]:
            print(f"{ms:8.3f} ms {count:5d}  {label:12} {kernel[:110]}")


if __name__ == "__main__":
    main()
