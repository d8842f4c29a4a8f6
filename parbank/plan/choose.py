"""The best config of a fixed set of candidates: shapes, vocabularies and batches.

The set does not depend on the minutes, and grows with the cap. So a larger budget never makes a plan worse. Settings that
were given are fixed, and the rest is chosen around them.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parbank.artifact.code import code_bytes
from parbank.config import override, parse_value
from parbank.data.tokenizer import USUAL_BYTES
from parbank.errors import ConfigError
from parbank.model.config import ModelConfig
from parbank.plan.laws import Array, Cases, Laws
from parbank.plan.probe import Costs, Machine
from parbank.plan.shapes import count_parameters
from parbank.plan.texts import Text
from parbank.recipes import demo, sprint
from parbank.training.config import BudgetConfig, RunConfig

NAME = "auto"
WIDTHS = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024)
# Layers of each width that runs have tried, or that lie between: from wide and shallow to about 1 layer for 46 channels.
LAYERS = {
    64: (2, 3), 128: (2, 3, 4), 192: (2, 3, 4), 256: (3, 4, 5), 320: (4, 6), 384: (4, 6, 8), 448: (6, 8),
    512: (6, 8, 9, 11), 640: (8, 11), 768: (8, 11), 1024: (10, 14),
}  # fmt: skip
VOCABULARIES = (320, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
BATCHES = tuple(2**power for power in range(9, 21))
LARGE_BATCH = 32_768  # from here on the optimizer's settings are those of `sprint`, below it those of `demo`
LEAST_STEPS = 20
LEAST_BITS = 2.2
"""Bits per weight that a plan must leave: with fewer, fewer weights are better (docs/log/2026-11-15-quantisation.md)."""
MOST_BITS = 8.0
CONTAINER_BYTES = 4096  # header, table of sections and config of an artifact
_TEXT_PER_TOKEN = 250  # bytes of text for each token of a vocabulary, at least: rarer tokens are hardly trained
EXPOSURE = 5.0
"""A plan repeats its text until (epochs - 1) * parameters / bytes of text reaches this, and ends its clock there: beyond, a
model learns the text by heart and scores worse (docs/log/2026-11-16-epochs.md)."""
HOST_SECONDS = 0.005
"""What the host may take for one step: a guess on the safe side, not measured. The probe does not see it: it times passes and
updates alone, and by its rates those of a small model take a GPU a tenth of a millisecond."""
UNTRIED = 0.02
"""Bits per byte, for each factor of e by which matrices, vocabulary or batch are away from the nearest long run: a law is
worth less there. It depends on neither minutes nor bytes, so that more of them is still never worse."""
GPU_TABLE = (16_384, 64)
"""Rows and width of the bigram table on a GPU: -0.022 bits per byte after 25 s against 1,536 rows, and no slower."""
TABLES = (1536, 256)
"""Rows of smaller bigram tables: a large table would not leave room for a model under a small cap."""
SHORT_SHARE, SHORT_LENGTH = 0.4, 1024
"""On a GPU windows of half the length come first: attention costs less there. With the first 40% of the clock at 1,024
tokens, 7% more tokens are read."""
TABLE_MARGIN = 0.03
"""Bits per byte, for each factor of e by which a table is smaller: 0.07 for a factor of 8 (docs/log/2026-11-16-cpu.md)."""
_BEYOND = 4.0  # how far beyond the runs' own sizes a model may go, as a factor; twice as far down, for small caps
_DECAY_STEPS = (
    20  # the averages of `demo` and `sprint` (0.98 in 1,000 steps) and of `golf` (0.997 in 7,000): 2% or less
)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One candidate, with its predicted score, time and size."""

    config: RunConfig
    parameters: int
    tokens: float
    epochs: float
    bits_per_weight: float
    score: float
    """Bits per byte, packed."""
    packing: float
    """Bits per byte of the score that packing costs."""
    deviation: float
    tokens_per_second: float

    @property
    def steps(self) -> float:
        return self.tokens / self.config.batch.batch_tokens


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The best candidate, those it was compared with, and what lies outside the runs behind the laws."""

    best: Choice
    others: tuple[Choice, ...]
    candidates: int
    notes: tuple[str, ...]
    text: Text
    machine: Machine
    more_minutes: float
    """The score for twice the minutes."""
    more_bytes: float
    """The score for twice the bytes."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The budget, the text and the fixed settings to plan for."""

    minutes: float
    max_bytes: int
    text: Text
    settings: tuple[str, ...] = ()
    """a.b=value, each: fixed."""

    @property
    def fixed(self) -> dict[str, Any]:
        pairs = (setting.partition("=") for setting in self.settings)
        return {name.strip(): parse_value(value) for name, _, value in pairs}


@dataclass(frozen=True)
class Grid:
    """All candidates as arrays over models (rows) and batches (columns)."""

    models: tuple[ModelConfig, ...]
    costs: Costs
    matrices: Array
    vocab: Array
    bytes_per_token: Array
    batches: Array
    lengths: Array
    margin: Array
    """Added to the score, by model and batch: for small tables, for what no long run has tried, and what long runs nearby
    were above the law."""


def make_plan(request: Request, machine: Machine, laws: Laws) -> Plan:
    """Chooses, and says what twice the budget would bring."""
    grid = make_grid(request, machine, laws)
    best, others, count = _search(request, machine, laws, grid)
    more = [
        _search(replace(request, **change), machine, laws, grid)[0].score
        for change in ({"minutes": 2 * request.minutes}, {"max_bytes": 2 * request.max_bytes})
    ]
    return Plan(
        best=best,
        others=others,
        candidates=count,
        notes=_notes(best, request, laws),
        text=request.text,
        machine=machine,
        more_minutes=more[0],
        more_bytes=more[1],
    )


def make_grid(request: Request, machine: Machine, laws: Laws) -> Grid:
    fixed, text = request.fixed, request.text
    low, high = laws.ranges["matrices"]
    models = []
    for layers, width in _shapes(fixed):
        for vocab in _vocabularies(fixed, text, laws):
            model = make_model(layers, width, vocab, fixed, cuda=machine.cuda)
            if model is None:
                continue
            inside = low / _BEYOND**2 <= count_parameters(model).matrices <= high * _BEYOND
            if inside or "model.layers" in fixed or "model.width" in fixed:
                models += _with_tables(model, fixed)
    batches = _batches(fixed, machine.ranks, text)
    if not models or not batches:
        raise ConfigError(
            f"no model follows from the settings {', '.join(request.settings) or '(none)'}: check that the width is a multiple "
            f"of the heads, and that the batch can be split into sequences over {machine.ranks} ranks"
        )
    sizes = np.array([float(model.vocab_size) for model in models])
    spelt = laws.token_sizes.predict(sizes, text.hardness) if text.bytes_per_token is None else text.bytes_per_token
    matrices = np.array([float(count_parameters(model).matrices) for model in models])
    largest = max(model.bigram_buckets for model in models)
    batch_tokens = np.array([float(batch) for batch, _ in batches])
    distances = laws.distances(matrices[:, None], sizes[:, None], batch_tokens)
    return Grid(
        models=tuple(models),
        costs=Costs.of(models),
        matrices=matrices,
        margin=(TABLE_MARGIN * np.log([max(1.0, largest / max(model.bigram_buckets, 1)) for model in models]))[:, None]
        + UNTRIED * distances.min(axis=0)
        + laws.correct(distances),
        vocab=sizes,
        bytes_per_token=np.broadcast_to(spelt, sizes.shape),
        batches=batch_tokens,
        lengths=np.array([float(length) for _, length in batches]),
    )


def make_model(layers: int, width: int, vocab: int, fixed: dict[str, Any], *, cuda: bool) -> ModelConfig | None:
    """The model of a shape, with the options of `demo` on a CPU and those of `sprint`, widened, on a GPU; None where
    settings contradict it. Heads of 128 channels take a GPU 7% less time, and a CPU no less."""
    base = (_large() if cuda else _small()).model
    rows, channels = GPU_TABLE if cuda else (base.bigram_buckets, base.bigram_width)
    channels_of_head = 128 if cuda and width % 128 == 0 else 64 if cuda else 48
    counts = range(1, max(1, width // channels_of_head) + 1)
    heads = max((count for count in counts if width % (8 * count) == 0), default=1)
    values: dict[str, Any] = {
        "layers": layers,
        "width": width,
        "vocab_size": vocab,
        "heads": heads,
        "kv_heads": heads // 2 if heads % 2 == 0 else 1,
        "rope_dims": 16,
        "value_layers": (layers - 2, layers - 1) if layers >= 8 else (layers - 1,),
        "value_width": 128 if width >= 384 else min(64, width),
        "bigram_buckets": rows,
        "bigram_width": min(channels, width),
        "xsa_layers": min(base.xsa_layers, layers),
    }
    own = {name.removeprefix("model."): value for name, value in fixed.items() if name.startswith("model.")}
    own = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
    try:
        return replace(base, **values | own)
    except (ConfigError, TypeError, ZeroDivisionError):
        return None


def _with_tables(model: ModelConfig, fixed: dict[str, Any]) -> list[ModelConfig]:
    """The model with its own bigram table, and with smaller ones for small caps."""
    if "model.bigram_buckets" in fixed:
        return [model]
    return [model, *(replace(model, bigram_buckets=rows) for rows in TABLES if rows < model.bigram_buckets)]


_small, _large = cache(demo), cache(sprint)


def _shapes(fixed: dict[str, Any]) -> list[tuple[int, int]]:
    layers, width = fixed.get("model.layers"), fixed.get("model.width")
    if layers is not None and width is not None:
        return [(layers, width)]
    if width is not None:
        nearest = min(WIDTHS, key=lambda known: abs(known - width))
        return [(count, width) for count in LAYERS[nearest]]
    if layers is not None:
        return [(layers, known) for known in WIDTHS]
    return [(count, known) for known in WIDTHS for count in LAYERS[known]]


def _vocabularies(fixed: dict[str, Any], text: Text, laws: Laws) -> list[int]:
    if text.vocab is not None:
        return [text.vocab]
    if "model.vocab_size" in fixed:
        return [fixed["model.vocab_size"]]
    high = laws.ranges["vocab"][1]
    return [size for size in VOCABULARIES if size <= max(VOCABULARIES[0], min(high, text.bytes / _TEXT_PER_TOKEN))]


def _batches(fixed: dict[str, Any], ranks: int, text: Text) -> list[tuple[int, int]]:
    """(batch tokens, sequence length) that divide evenly over the ranks."""
    odd = ranks // math.gcd(ranks, 2**20)
    sizes = [fixed["batch.batch_tokens"]] if "batch.batch_tokens" in fixed else [odd * size for size in BATCHES]
    # About 2% of the text is held out, and must hold some windows.
    most = 2 ** int(math.log2(max(32.0, 0.02 * text.bytes / 16)))
    found = []
    for size in sizes:
        length = fixed.get("batch.sequence_length", max(16, min(2048, most, max(256, _power_below(size // 8)))))
        if isinstance(size, int) and isinstance(length, int) and length > 0 and size % (length * ranks) == 0:
            found.append((size, length))
    return found


def _power_below(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


def fixed_bytes(vocab: Any, count_code: bool) -> Any:
    """Bytes of an artifact that are not weights, about."""
    return CONTAINER_BYTES + USUAL_BYTES * vocab + (code_bytes() if count_code else 0)


def _search(request: Request, machine: Machine, laws: Laws, grid: Grid) -> tuple[Choice, tuple[Choice, ...], int]:
    costs, fixed = grid.costs, request.fixed
    column = {name: value[:, None] for name, value in vars(costs).items()}
    wide = Costs(**column)
    most = np.maximum(machine.most_tokens(costs), 0.0)[:, None]
    if (given := fixed.get("batch.micro_batch_tokens")) is not None:
        most = np.full_like(most, float(given))
    share = grid.batches / machine.ranks
    micro = np.minimum(share, most)
    passes = np.maximum(1.0, 2 ** np.ceil(np.log2(np.maximum(share / np.maximum(micro, 1e-9), 1.0))))
    seconds = machine.step_seconds(wide, grid.lengths, grid.batches, passes)
    steps = 60 * request.minutes / np.maximum(seconds, 1e-12)
    unique = request.text.bytes / grid.bytes_per_token[:, None]
    most_tokens = unique * (1 + EXPOSURE * request.text.bytes / costs.parameters[:, None])
    tokens = np.minimum(np.maximum(steps, 1.0) * grid.batches, np.maximum(most_tokens, grid.batches))
    cases = Cases.of(
        matrices=grid.matrices[:, None],
        vocab=grid.vocab[:, None],
        tokens=tokens,
        bytes_per_token=grid.bytes_per_token[:, None],
        text_bytes=request.text.bytes,
        batch_tokens=grid.batches,
        hardness=request.text.hardness,
    )
    count_code = bool(fixed.get("budget.count_code", False))
    bits = 8 * (request.max_bytes - fixed_bytes(grid.vocab, count_code)) / costs.parameters
    bits = np.clip(bits, -1.0, MOST_BITS)[:, None]
    packing = np.broadcast_to(laws.packing.predict(bits), tokens.shape)
    options = laws.gpu_options if machine.cuda else 1.0
    scores = options * laws.score(cases, request.text.name) + packing + grid.margin
    fits = (bits >= LEAST_BITS) & (share / passes >= grid.lengths) & (most >= grid.lengths)
    usable = fits & (steps >= 1)
    if fits.any() and not usable.any():  # not one step fits the clock: the quickest one comes nearest
        usable = fits & (steps >= steps[fits].max())
    if not usable.any():
        raise _refusal(request, grid, machine)
    order = np.argsort(np.where(usable, scores, np.inf), axis=None, kind="stable")[: int(usable.sum())]

    def choice(index: Any) -> Choice:
        row, at = np.unravel_index(index, scores.shape)
        one = Cases.of(**{name: np.broadcast_to(getattr(cases, name), scores.shape)[row, at] for name in vars(cases)})
        config = configure(
            request, machine, grid.models[row], int(grid.batches[at]), int(grid.lengths[at]), int(passes[row, at]),
            float(tokens[row, at]), float(seconds[row, at]),
        )  # fmt: skip
        return Choice(
            config=config,
            parameters=int(costs.parameters[row]),
            tokens=float(tokens[row, at]),
            epochs=float(tokens[row, at] * grid.bytes_per_token[row] / request.text.bytes),
            bits_per_weight=float(bits[row, 0]),
            score=float(scores[row, at]),
            packing=float(packing[row, at]),
            deviation=float(laws.deviations(one, request.text.name, options=machine.cuda)[0]),
            tokens_per_second=float(grid.batches[at] / seconds[row, at]),
        )

    return choice(order[0]), tuple(choice(index) for index in _distinct(order, scores.shape, grid)), int(usable.sum())


def _distinct(order: NDArray[Any], shape: tuple[int, ...], grid: Grid) -> list[Any]:
    """The best of other shapes and of other vocabularies: three of each, after the winner."""
    first = grid.models[int(np.unravel_index(order[0], shape)[0])]
    shapes, vocabularies, found = {(first.layers, first.width)}, {first.vocab_size}, []
    for index in order[1:]:
        model = grid.models[int(np.unravel_index(index, shape)[0])]
        own = (model.layers, model.width)
        if own not in shapes and model.vocab_size == first.vocab_size and len(shapes) < 4:
            shapes.add(own)
            found.append(index)
        elif own == (first.layers, first.width) and model.vocab_size not in vocabularies and len(vocabularies) < 4:
            vocabularies.add(model.vocab_size)
            found.append(index)
    return found


def _refusal(request: Request, grid: Grid, machine: Machine) -> ConfigError:
    least = min(
        fixed_bytes(vocab, bool(request.fixed.get("budget.count_code"))) + LEAST_BITS * parameters / 8
        for vocab, parameters in zip(grid.vocab, grid.costs.parameters)
    )
    return ConfigError(
        f"no candidate fits {request.max_bytes:,} bytes and {machine.memory_bytes / 1e9:.1f} GB of memory; the smallest needs "
        f"about {int(least):,} bytes: raise --max-bytes, or fix fewer settings by --set"
    )


def configure(
    request: Request,
    machine: Machine,
    model: ModelConfig,
    batch: int,
    length: int,
    passes: int,
    tokens: float,
    step_seconds: float,
) -> RunConfig:
    """The whole config of a candidate: what is not planned comes from `demo` or `sprint`, the nearer one."""
    base = _large() if batch >= LARGE_BATCH else _small()
    near = _large() if machine.cuda else _small()
    steps = max(tokens / batch, 1.0)
    config = replace(
        base,
        recipe=NAME,
        model=model,
        budget=_end(request, machine, steps, step_seconds),
        batch=replace(
            near.batch, sequence_length=length, batch_tokens=batch, micro_batch_tokens=batch // (machine.ranks * passes)
        ),
        optim=replace(_small().optim, warmdown=base.optim.warmdown, normuon=machine.cuda),
        average=replace(base.average, ema_decay=average_decay(steps)),
        train=near.train,
        quant=near.quant,
    )
    if machine.cuda and length >= 2 * SHORT_LENGTH:
        stages = ((SHORT_SHARE, length // 2, batch),)
        config = replace(config, batch=replace(config.batch, stages=stages))
    ends = ("budget.minutes", "budget.steps", "budget.tokens")  # planned: `_end`
    return override(config, *(one for one in request.settings if one.partition("=")[0].strip() not in ends))


def average_decay(steps: float) -> float:
    """The decay of the weight average: it looks back over a twentieth of the steps."""
    return round(min(0.999, max(0.8, 1 - _DECAY_STEPS / steps)), 4)


def _end(request: Request, machine: Machine, steps: float, step_seconds: float) -> BudgetConfig:
    """The clock as it was given, or an earlier end. On a GPU that is a number of steps, if they surely fit the clock: small
    steps take as long as the host does, and a clock of the GPU's seconds would end after a fraction of them."""
    given = 60 * request.minutes
    seconds = steps * step_seconds
    if seconds > 0.98 * given:  # the clock as it was given, not as rounding leaves it
        return BudgetConfig(minutes=request.minutes, max_bytes=request.max_bytes)
    if machine.cuda and steps * (step_seconds + HOST_SECONDS) <= 0.5 * given:
        return BudgetConfig(steps=round(steps), max_bytes=request.max_bytes)
    return BudgetConfig(minutes=seconds / 60, max_bytes=request.max_bytes)


def _notes(best: Choice, request: Request, laws: Laws) -> tuple[str, ...]:
    """Notes on quantities outside the runs behind the laws."""
    model, notes = best.config.model, []
    values = {
        "matrices": (float(count_parameters(model).matrices), "parameters in matrices"),
        "tokens": (best.tokens, "training tokens"),
        "epochs": (best.epochs, "epochs"),
        "vocab": (float(model.vocab_size), "tokens in the vocabulary"),
        "batch_tokens": (float(best.config.batch.batch_tokens), "tokens a batch"),
        "text_bytes": (request.text.bytes, "bytes of text"),
        "hardness": (request.text.hardness, "bits per byte under zlib"),
    }
    for name, (value, what) in values.items():
        low, high = laws.ranges[name]
        if not low * 0.99 <= value <= high * 1.01:
            shown, *bounds = (f"{x:,.2f}" if x < 100 else f"{x:,.0f}" for x in (value, low, high))
            notes.append(f"{shown} {what} lie outside the runs behind this plan ({' to '.join(bounds)}): extrapolated")
    budget = best.config.budget
    if budget.minutes != request.minutes:
        end = f"{budget.steps:,} steps, before" if budget.minutes is None else f"{round(budget.minutes, 2):g} of"
        notes.append(
            f"the text is small: training ends after {end} {request.minutes:g} minutes; with more epochs this model would "
            "learn it by heart: give more text"
        )
    if best.steps < LEAST_STEPS:
        notes.append(f"about {best.steps:.0f} steps fit the clock: give more minutes")
    return tuple(notes)
