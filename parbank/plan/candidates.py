"""The candidates of a plan: a fixed set of shapes, vocabularies, bigram tables and batches.

The set depends on neither the minutes nor the cap, of which a larger one only makes more of the set usable. So a larger budget
never makes a plan worse. Settings that were given are fixed, and the rest of the set is made around them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from parbank.config import parse_value
from parbank.data.tokenizer import check_vocab
from parbank.errors import ConfigError
from parbank.model.config import ModelConfig
from parbank.plan.laws import Array, Cases, Laws
from parbank.plan.machine import Costs, Machine
from parbank.plan.shapes import count_parameters
from parbank.plan.texts import PlanText
from parbank.recipes import demo, sprint

WIDTHS = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024)
# Layers of each width that runs have tried, or that lie between: from wide and shallow to about 1 layer for 46 channels.
LAYERS = {
    64: (2, 3), 128: (2, 3, 4), 192: (2, 3, 4), 256: (3, 4, 5), 320: (4, 6), 384: (4, 6, 8), 448: (6, 8),
    512: (6, 8, 9, 11), 640: (8, 11), 768: (8, 11), 1024: (10, 14),
}  # fmt: skip
WIDE_MLP = 4.0
"""On a GPU, from WIDE_WIDTH channels on, the MLP's multiple, with fewer layers: a seventh layer of 3 to 4 times the width is read
faster than an eighth of 3, and gained 0.0017 by the screen of 2026-11-19 (docs/log/training.md)."""
WIDE_WIDTH = 512
WIDE_LAYERS = {512: (5, 7, 8, 10), 640: (7, 9), 768: (7, 9), 1024: (8, 12)}  # matrices like those of LAYERS
VOCABULARIES = (320, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
BATCHES = tuple(2**power for power in range(9, 21))
CPU_WINDOW = 512
"""Tokens of a window on a CPU, at most: no long run there has tried more."""
PER_BYTE = 1.0
"""Parameters for each byte of text, at most. On 285 kB a model with 0.9 scored better than one with 2.7, and the law, which knows
the cost of repeats alone, would see a large model's text once (docs/log/training.md)."""
EXPOSURE = 3.0
"""On a GPU no run ends before (epochs - 1) * parameters / bytes of text is this, even where the law turns earlier: only models of
up to two million parameters, on a CPU, have shown that more epochs hurt. They were 0.07 from their best there at most
(docs/log/training.md)."""
TABLES = (256, 1536, 12_288, 16_384, 24_576, 49_152, 98_304, 196_608)
"""Rows of bigram tables. The smaller ones are for small caps, where a large table would leave no room for a model."""
GPU_ROWS = 16_384
"""Of a bigram table on a GPU, at most. 49,152 gained 0.002 before packing (benchmarks/results/study_screen50), where the law, which
knows large tables from small models on a CPU, says 0.020; and their bytes cost the other weights half of that gain."""
TABLE_WIDTH = 64
GPU_QK_GAIN = 3.0
"""1.5 on a CPU. 3 gained 0.0031 by a screen (benchmarks/results/study_screen50b), which mixes up to 0.003 of others' effects in."""
UNTRIED = 0.02
"""Bits per byte, for each factor of e by which matrices, vocabulary or batch are away from the nearest long run, and for four by
which a bigram table is: a law is worth less there. Neither minutes nor bytes change it, so more of them is still never worse."""
_TEXT_PER_TOKEN = 250  # bytes of text for each token of a vocabulary, at least: rarer tokens are hardly trained
_PER_CHANNEL = 2  # tokens of a vocabulary for each channel of the width, at least: no run has tried fewer
_BEYOND = 4.0  # how far beyond the runs' own sizes a model may go, as a factor; twice as far down, for small caps
LEAST_TEXT = 20_000
"""Bytes of text that a plan takes. With less, a tokenizer finds too few different pieces, and a score says nothing."""

small, large = cache(demo), cache(sprint)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The budget, the text and the fixed settings to plan for."""

    minutes: float
    max_bytes: int
    text: PlanText
    settings: tuple[str, ...] = ()
    """a.b=value, each: fixed."""
    compile_minutes: float = math.inf
    """A run of so many minutes compiles its passes on a CPU."""

    @property
    def fixed(self) -> dict[str, Any]:
        pairs = (setting.partition("=") for setting in self.settings)
        return {name.strip(): parse_value(value) for name, _, value in pairs}


@dataclass(frozen=True)
class Grid:
    """All candidates as arrays over models (rows) and batches (columns)."""

    models: tuple[ModelConfig, ...]
    costs: Costs
    vocab: Array
    bytes_per_token: Array
    batches: Array
    lengths: Array
    untried: Array
    """Added to the score, by model and batch, for sizes that no long run has tried."""
    correction: Array
    """Added to the score, by model and batch: what long runs nearby were above the law."""
    cases: Cases
    """What the law needs to know, by model and batch, without the tokens that a budget allows."""
    turn: Array
    """By model and batch: with more tokens of this text, says the law, the score would rise."""
    most_tokens: Array
    """By model and batch: with so many tokens a run ends, whatever its clock."""


def make_grid(request: Request, machine: Machine, laws: Laws) -> Grid:
    fixed, text = request.fixed, request.text
    if text.bytes < LEAST_TEXT:
        raise ConfigError(
            f"the text has about {text.bytes:,.0f} bytes to train on; a plan needs {LEAST_TEXT:,} at least: give more text"
        )
    models = _make_models(request, machine, laws)
    batches = _batches(fixed, machine, text)
    if not batches:
        raise ConfigError(
            f"the batch of {_show(request, 'batch.')} cannot be split into sequences over {machine.ranks} ranks: give "
            "batch.batch_tokens that is a multiple of batch.sequence_length and of the ranks, or leave both to the plan"
        )
    sizes = np.array([float(model.vocab_size) for model in models])
    spelt = count_token_bytes(text, laws, sizes)
    matrices = np.array([float(count_parameters(model).matrices) for model in models])
    batch_tokens = np.array([float(batch) for batch, _ in batches])
    bigrams = np.array([float(model.bigram_buckets) for model in models])
    untried, correction = compare_with_runs(laws, matrices[:, None], sizes[:, None], batch_tokens, bigrams[:, None])
    costs, lengths = Costs.of(models), np.array([float(length) for _, length in batches])
    spelt = np.broadcast_to(spelt, sizes.shape)
    cases = Cases.of(
        matrices=matrices[:, None],
        params=costs.parameters[:, None],
        vocab=sizes[:, None],
        bigrams=bigrams[:, None],
        tokens=1.0,
        bytes_per_token=spelt[:, None],
        text_bytes=text.bytes,
        batch_tokens=batch_tokens,
        hardness=text.hardness,
    )
    turn = np.maximum(laws.most_tokens(cases), batch_tokens)
    return Grid(
        models=tuple(models),
        costs=costs,
        cases=cases,
        turn=turn,
        most_tokens=np.maximum(turn, _least_end(costs, spelt, text)[:, None]) if machine.cuda else turn,
        untried=untried,
        correction=correction,
        vocab=sizes,
        bytes_per_token=spelt,
        batches=batch_tokens,
        lengths=lengths,
    )


def count_token_bytes(text: PlanText, laws: Laws, vocab: Array) -> Any:
    """Bytes per token, for each vocabulary, or measured."""
    return laws.token_sizes.predict(vocab, text.hardness) if text.bytes_per_token is None else text.bytes_per_token


def compare_with_runs(
    laws: Laws, matrices: Array, vocab: Array, batch_tokens: Array, bigrams: Array
) -> tuple[Array, Array]:
    """What is added to a score for sizes that no long run has tried, and what long runs nearby were above the law."""
    distances, tables = laws.distances(matrices, vocab, batch_tokens), laws.table_distances(bigrams)
    untried: Array = UNTRIED * np.hypot(distances, tables).min(axis=0)
    return untried, laws.correct(distances)


def are_usual(matrices: float, ranges: Mapping[str, tuple[float, float]]) -> bool:
    """Whether a plan takes a model with so many parameters in matrices, if no shape is fixed."""
    low, high = ranges["matrices"]
    return low / _BEYOND**2 <= matrices <= high * _BEYOND


def _least_end(costs: Costs, bytes_per_token: Array, text: PlanText) -> Array:
    """The tokens of each model at EXPOSURE."""
    epochs = 1 + EXPOSURE * text.bytes / costs.parameters
    found: Array = epochs * text.bytes / bytes_per_token
    return found


def _make_models(request: Request, machine: Machine, laws: Laws) -> list[ModelConfig]:
    """The models of all shapes, vocabularies and tables, on a GPU also with a head of their own. Where settings leave none, the
    reason is that of the last one."""
    fixed = request.fixed
    anywhere = "model.layers" in fixed or "model.width" in fixed
    tables = [rows for rows in TABLES if rows <= GPU_ROWS or not machine.cuda]
    if "model.bigram_buckets" in fixed:
        tables = [fixed["model.bigram_buckets"]]
    ties = (True, False) if machine.cuda and "model.tied" not in fixed else (bool(fixed.get("model.tied", True)),)
    found, reason = [], ConfigError("no shape is near enough to the runs behind the laws")
    for layers, width in _shapes(fixed, cuda=machine.cuda):
        for vocab in _vocabularies(fixed, request.text, laws, width):
            try:
                model = make_model(layers, width, vocab, fixed, cuda=machine.cuda)
            except ConfigError as error:
                reason = error
                continue
            if anywhere or are_usual(count_parameters(model).matrices, laws.ranges):
                found += [replace(model, bigram_buckets=rows, tied=tied) for rows in tables for tied in ties]
    if not found:
        raise ConfigError(
            f"no model fits {_show(request, 'model.')}: {reason}; change one of these settings, or leave one out"
        )
    sizes = [count_parameters(model).total for model in found]
    most = max(PER_BYTE * request.text.bytes, min(sizes))
    return [model for model, size in zip(found, sizes) if size <= most]


def _show(request: Request, kind: str) -> str:
    """The settings of a kind, as they were given."""
    own = [setting for setting in request.settings if setting.strip().startswith(kind)]
    return ", ".join(f"--set {setting}" for setting in own) or "these settings"


def make_model(layers: int, width: int, vocab: int, fixed: dict[str, Any], *, cuda: bool) -> ModelConfig:
    """The model of a shape, with the options of `demo` on a CPU and those of `sprint`, widened, on a GPU. Heads of 128
    channels are faster on a GPU (docs/log/training.md), and not on a CPU. A ConfigError says which settings contradict it."""
    base = (large() if cuda else small()).model
    channels_of_head = 128 if cuda and width % 128 == 0 else 64 if cuda else 48
    counts = range(1, max(1, width // channels_of_head) + 1)
    heads = max((count for count in counts if width % (8 * count) == 0), default=1)
    values: dict[str, Any] = {
        "layers": layers,
        "width": width,
        "vocab_size": vocab,
        "heads": heads,
        "kv_heads": heads // 2 if heads % 2 == 0 else 1,
        # a quarter of a head rotates; of wide heads an eighth was worse by 0.004 (docs/log/training.md)
        "rope_dims": max(16, channels_of_head // 4) if cuda else 16,
        "value_layers": (layers - 2, layers - 1) if layers >= 8 else (layers - 1,),
        "value_width": 128 if width >= 384 else min(64, width),
        "mlp_multiple": WIDE_MLP if cuda and width >= WIDE_WIDTH else base.mlp_multiple,
        "bigram_buckets": base.bigram_buckets,
        "bigram_width": min(TABLE_WIDTH, width),
        "xsa_layers": min(base.xsa_layers, layers),
        "qk_gain": GPU_QK_GAIN if cuda else base.qk_gain,
    }
    own = {name.removeprefix("model."): value for name, value in fixed.items() if name.startswith("model.")}
    own = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
    try:
        return replace(base, **values | own)
    except (TypeError, ZeroDivisionError) as error:
        raise ConfigError(str(error)) from error


def _shapes(fixed: dict[str, Any], *, cuda: bool) -> list[tuple[int, int]]:
    known_layers = LAYERS | WIDE_LAYERS if cuda else LAYERS
    layers, width = fixed.get("model.layers"), fixed.get("model.width")
    if layers is not None and width is not None:
        return [(layers, width)]
    if width is not None:
        nearest = min(WIDTHS, key=lambda known: abs(known - width))
        return [(count, width) for count in known_layers[nearest]]
    if layers is not None:
        return [(layers, known) for known in WIDTHS]
    return [(count, known) for known in WIDTHS for count in known_layers[known]]


def _vocabularies(fixed: dict[str, Any], text: PlanText, laws: Laws, width: int) -> list[int]:
    if text.vocab is not None:
        return [text.vocab]
    if "model.vocab_size" in fixed:
        check_vocab(fixed["model.vocab_size"])
        return [fixed["model.vocab_size"]]
    most = max(VOCABULARIES[0], min(laws.ranges["vocab"][1], text.bytes / _TEXT_PER_TOKEN))
    found = [size for size in VOCABULARIES if size <= most]
    return [size for size in found if size >= _PER_CHANNEL * width] or found[-1:]


def _batches(fixed: dict[str, Any], machine: Machine, text: PlanText) -> list[tuple[int, int]]:
    """(batch tokens, sequence length) that divide evenly over the ranks. A batch has 8 windows, or more of the longest."""
    ranks, longest = machine.ranks, 2048 if machine.cuda else CPU_WINDOW
    odd = ranks // math.gcd(ranks, 2**20)
    sizes = [fixed["batch.batch_tokens"]] if "batch.batch_tokens" in fixed else [odd * size for size in BATCHES]
    # About 2% of the text is held out, and must hold some windows.
    most = 2 ** int(math.log2(max(32.0, 0.02 * text.bytes / 16)))
    found = []
    for size in sizes:
        length = fixed.get("batch.sequence_length", max(16, min(longest, most, max(256, _power_below(size // 8)))))
        if isinstance(size, int) and isinstance(length, int) and length > 0 and size % (length * ranks) == 0:
            found.append((size, length))
    return found


def _power_below(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)
