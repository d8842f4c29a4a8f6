"""The best of the candidates by the laws, its whole config, and what twice the budget would bring."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parbank.artifact.code import code_bytes
from parbank.config import override
from parbank.data.tokenizer import USUAL_BYTES, TokenizerConfig
from parbank.errors import ConfigError
from parbank.model.config import ModelConfig
from parbank.plan.candidates import Grid, Request, large, make_grid, small
from parbank.plan.laws import Array, Cases, Laws, large_share
from parbank.plan.machine import Costs, Machine
from parbank.plan.texts import PlanText
from parbank.training.config import BudgetConfig, RunConfig

NAME = "auto"
LARGE_BATCH = 32_768  # from here on the optimizer's settings are those of `sprint`, below it those of `demo`
LEAST_BITS = 2.2
"""Bits per weight that a plan must leave: with fewer, fewer weights are better (docs/log/packing.md)."""
MOST_BITS = 8.0
WORST = 8.0
"""Bits per byte of a model that knows nothing. A law says more where next to nothing was trained, and then ranks nothing."""
CONTAINER_BYTES = 4096  # header, table of sections and config of an artifact
SHORT_SHARE, SHORT_LENGTH, SHORT_LENGTH_CPU = 0.4, 1024, 256
"""Windows of half the length come first, for this share of the clock, unless they would be shorter than this: attention costs less
there, so more tokens are read (docs/log/training.md)."""
CASE_OPERATORS, CASE_OPERATORS_GPU = 0.983, 0.987
"""The factor on the score of case operators in the tokenizer. On a CPU the median of three seeds, 0.985, 0.983 and 0.970
(benchmarks/results/study_demo); on a GPU that of a screen of twelve runs (benchmarks/results/study_screen50)."""
UNTIED_GPU = 0.9936
"""The factor on the score of a head of its own, apart from the embedding of the tokens, on a GPU, before packing: 0.9935 at a
complete schedule of 60 s (benchmarks/results/study_heads60, one seed), 0.9937 by a screen of 50 s (study_screen50b)."""
FINAL_LR_GPU = 0.05
"""The learning rate at the end, as a share of its peak: gained 0.0013 by that screen (benchmarks/results/study_screen50b)."""
DECAY_EPOCHS, DECAY_EPOCHS_GPU, DECAY_STEPS, MOST_DECAY = 5, 2.25, 4080, 4.0
"""Weight decay grows up to MOST_DECAY times where a text is repeated: fully from DECAY_EPOCHS on, and by DECAY_STEPS / steps, as if
decay acted through the sum over all steps. On a CPU 4 times the decay gained 0.019 in 1,020 steps over 5 epochs, by 4 seeds
(benchmarks/results/study_repeats_decay), changed nothing over 2 epochs, and lost 0.022 within one. On a GPU 2.5 times the decay
gained 0.0036 in 1,500 steps over 2.25 epochs (benchmarks/results/study_screen50)."""
DECAY_BY_EPOCHS = ((1, DECAY_EPOCHS, 6, 9), (1.0, MOST_DECAY, MOST_DECAY, 8.0))
"""Epochs, and the factor on weight decay after so many of them, for a text on a CPU that is not large, however many steps it takes.
After 12 epochs of 500 kB the factors 1.7, 4 and 7.5 scored 2.534, 2.288 and 2.226 (docs/log/training.md). After 5 the factor 8 lost
0.03 against 4."""
SHOWN = (3, 3, 2, 2, 1)
"""Of other shapes, vocabularies, tables, batches and heads, so many are compared with the winner."""
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
    untried: float
    """Bits per byte of the score for sizes that no long run has tried: a caution, by which near ties are decided."""
    deviation: float
    tokens_per_second: float

    @property
    def steps(self) -> float:
        return self.tokens / self.config.batch.batch_tokens


@dataclass(frozen=True, kw_only=True)
class Known:
    """The run on this text by which a plan expects its scores, and what it would expect without that run; see `history`."""

    on: str
    """The date of the run."""
    bpb: float
    """Its bits per byte before packing."""
    factor: float
    """That over what the laws say of it, and of every score of the plan over what they say."""
    score: float
    """Of the best candidate, by the laws alone."""
    deviation: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The best candidate, those it was compared with, and what lies outside the runs behind the laws."""

    best: Choice
    others: tuple[Choice, ...]
    candidates: int
    text: PlanText
    machine: Machine
    more_minutes: float
    """The score for twice the minutes."""
    more_bytes: float
    """The score for twice the bytes."""
    less_minutes: float
    """The score for half the minutes."""
    minutes: float
    """That were asked for."""
    settings: tuple[str, ...]
    """That were fixed."""
    ranges: Mapping[str, tuple[float, float]]
    """Of the runs behind the laws."""
    known: Known | None = None


def make_plan(request: Request, machine: Machine, laws: Laws) -> Plan:
    """Chooses, and says what twice the budget would bring."""
    laws = laws if machine.cuda else laws.for_text_on_a_cpu(request.text.bytes)
    grid = make_grid(request, machine, laws)
    best, others, count = _search(request, machine, laws, grid)
    budgets: tuple[dict[str, Any], ...] = (
        {"minutes": 2 * request.minutes}, {"max_bytes": 2 * request.max_bytes}, {"minutes": request.minutes / 2}
    )  # fmt: skip
    more = [_search(replace(request, **change), machine, laws, grid, compare=False)[0].score for change in budgets]
    return Plan(
        best=best,
        others=others,
        candidates=count,
        text=request.text,
        machine=machine,
        more_minutes=more[0],
        more_bytes=more[1],
        less_minutes=more[2],
        minutes=request.minutes,
        settings=request.settings,
        ranges=laws.ranges,
    )


def fixed_bytes(vocab: Any, count_code: bool) -> Any:
    """Bytes of an artifact that are not weights, about."""
    return CONTAINER_BYTES + USUAL_BYTES * vocab + (code_bytes() if count_code else 0)


def _search(
    request: Request, machine: Machine, laws: Laws, grid: Grid, *, compare: bool = True
) -> tuple[Choice, tuple[Choice, ...], int]:
    """The best candidate, those to compare it with if they are wanted, and how many fit."""
    costs, fixed, text_name = grid.costs, request.fixed, request.text.fitted_name(cuda=machine.cuda)
    if request.minutes >= request.compile_minutes:
        machine = machine.compiled()
    column = {name: value[:, None] for name, value in vars(costs).items()}
    wide = Costs(**column)
    most = np.maximum(machine.most_tokens(costs), 0.0)[:, None]
    if (given := fixed.get("batch.micro_batch_tokens")) is not None:
        most = np.full_like(most, float(given))
    share = grid.batches / machine.ranks
    micro = np.minimum(share, most)
    passes = np.maximum(1.0, 2 ** np.ceil(np.log2(np.maximum(share / np.maximum(micro, 1e-9), 1.0))))
    seconds = machine.step_seconds(wide, grid.lengths, grid.batches, passes)
    if not machine.cuda and "batch.stages" not in fixed:  # on a GPU `gpu_options` has the gain
        early = machine.step_seconds(wide, _first_lengths(grid.lengths), grid.batches, passes)
        seconds = 1 / (SHORT_SHARE / early + (1 - SHORT_SHARE) / seconds)
    steps = 60 * request.minutes / np.maximum(seconds, 1e-12)
    tokens = np.minimum(np.maximum(steps, 1.0) * grid.batches, grid.most_tokens)
    cases = replace(grid.cases, tokens=np.minimum(tokens, grid.turn))  # no gain is expected beyond, and no loss
    epochs = tokens * cases.bytes_per_token / cases.text_bytes
    count_code = bool(fixed.get("budget.count_code", False))
    bits = 8 * (request.max_bytes - fixed_bytes(grid.vocab, count_code)) / costs.parameters
    bits = np.clip(bits, -1.0, MOST_BITS)[:, None]
    packing = np.broadcast_to(laws.packing.predict(bits, grid.vocab[:, None]), tokens.shape)
    windows = laws.count_windows(np.zeros_like(grid.lengths) if machine.cuda else grid.lengths, tokens / grid.batches)
    case_operators = _tokenizer(request, machine).case_operators and fixed.get("tokenizer.case_operators", True)
    tied = np.array([model.tied for model in grid.models])[:, None]
    options = find_options(laws, windows, cuda=machine.cuda, case_operators=case_operators, tied=tied)
    scores = options * laws.score(cases, text_name) + packing + grid.untried + grid.correction
    scores = np.minimum(scores, WORST)
    fits = (bits >= LEAST_BITS) & (share / passes >= grid.lengths) & (most >= grid.lengths)
    usable = fits & (steps >= 1)
    if fits.any() and not usable.any():  # not one step fits the clock: the quickest one comes nearest
        usable = fits & (steps >= steps[fits].max())
    if not usable.any():
        raise _refusal(request, grid, machine)
    order = np.argsort(np.where(usable, scores, np.inf), axis=None, kind="stable")[: int(usable.sum())]

    def choice(index: Any) -> Choice:
        row, at = np.unravel_index(index, scores.shape)
        one = Cases.of(**{name: values[row, at] for name, values in vars(cases).items()})
        config = configure(
            request, machine, grid.models[row], int(grid.batches[at]), int(grid.lengths[at]), int(passes[row, at]),
            float(tokens[row, at]), float(epochs[row, at]), float(seconds[row, at]),
        )  # fmt: skip
        (deviation,) = laws.deviations(one, text_name, options=machine.cuda, windows=float(windows[row, at]))
        return Choice(
            config=config,
            parameters=int(costs.parameters[row]),
            tokens=float(tokens[row, at]),
            epochs=float(epochs[row, at]),
            bits_per_weight=float(bits[row, 0]),
            score=float(scores[row, at]),
            packing=float(packing[row, at]),
            untried=float(grid.untried[row, at]),
            deviation=min(float(deviation), float(scores[row, at]) / 2),
            tokens_per_second=float(grid.batches[at] / seconds[row, at]),
        )

    others = _distinct(order, scores.shape, grid) if compare else []
    return choice(order[0]), tuple(choice(index) for index in others), int(usable.sum())


def find_options(laws: Laws, windows: Array, *, cuda: bool, case_operators: bool, tied: NDArray[np.bool_]) -> Array:
    """The factor on the law's score of what a plan sets beyond the runs of the laws."""
    options = laws.gpu_options * np.where(tied, 1.0, UNTIED_GPU) if cuda else laws.cpu_windows**windows
    if case_operators:
        options = (CASE_OPERATORS_GPU if cuda else CASE_OPERATORS) * options
    return np.asarray(options, np.float64)


def _distinct(order: NDArray[Any], shape: tuple[int, ...], grid: Grid) -> list[Any]:
    """The best that differ from the winner in one way only: in the shape, the vocabulary, the table, the batch or the head."""

    def ways(index: Any) -> tuple[Any, ...]:
        row, at = np.unravel_index(index, shape)
        model = grid.models[int(row)]
        sides, batch = (model.layers, model.width), int(grid.batches[at])
        return (sides, model.vocab_size, model.bigram_buckets, batch, model.tied)

    first, found = ways(order[0]), []
    seen: list[set[Any]] = [{own} for own in first]
    for index in order[1:]:
        own = ways(index)
        differs = [way for way in range(len(own)) if own[way] != first[way]]
        way = differs[0]
        if len(differs) == 1 and own[way] not in seen[way] and len(seen[way]) <= SHOWN[way]:
            seen[way].add(own[way])
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
    epochs: float,
    step_seconds: float,
) -> RunConfig:
    """The whole config of a candidate: what is not planned comes from `demo` or `sprint`, the nearer one."""
    base = large() if batch >= LARGE_BATCH else small()
    near = large() if machine.cuda else small()
    steps = max(tokens / batch, 1.0)
    decay = decay_factor(epochs, steps, request.text.bytes, cuda=machine.cuda)
    optim = small().optim
    shortest = SHORT_LENGTH if machine.cuda else SHORT_LENGTH_CPU
    config = replace(
        base,
        recipe=NAME,
        model=model,
        tokenizer=_tokenizer(request, machine),
        budget=_end(request, steps, step_seconds),
        batch=replace(
            near.batch,
            sequence_length=length,
            batch_tokens=batch,
            micro_batch_tokens=batch // (machine.ranks * passes),
            stages=((SHORT_SHARE, length // 2, batch),) if length >= 2 * shortest and length % 2 == 0 else (),
        ),
        optim=replace(
            optim,
            normuon=machine.cuda,
            final_lr=FINAL_LR_GPU if machine.cuda else optim.final_lr,
            matrix_weight_decay=round(decay * optim.matrix_weight_decay, 3),
            adam_weight_decay=round(decay * optim.adam_weight_decay, 3),
        ),
        average=replace(base.average, ema_decay=average_decay(steps)),
        train=near.train,
        quant=near.quant,
    )
    ends = ("budget.minutes", "budget.steps", "budget.tokens", "budget.most_steps")  # planned: `_end`
    return override(config, *(one for one in request.settings if one.partition("=")[0].strip() not in ends))


def _first_lengths(lengths: NDArray[Any]) -> NDArray[Any]:
    """The windows on a CPU at first, for the main ones."""
    return np.where(lengths >= 2 * SHORT_LENGTH_CPU, lengths // 2, lengths)


def _tokenizer(request: Request, machine: Machine) -> TokenizerConfig:
    """That of `demo`, with case operators. Text that is tokens already has one, which says by itself what it is."""
    return TokenizerConfig() if request.text.vocab is not None else small().tokenizer


def decay_factor(epochs: float, steps: float, text_bytes: float, *, cuda: bool) -> float:
    """The factor on weight decay for a text that is repeated."""
    full = DECAY_EPOCHS_GPU if cuda else DECAY_EPOCHS
    most = min(MOST_DECAY, max(1.0, DECAY_STEPS / steps))
    by_steps = float(most ** min(1.0, max(0.0, (epochs - 1) / (full - 1))))
    if cuda:
        return by_steps
    known, factors = DECAY_BY_EPOCHS
    share, by_epochs = large_share(text_bytes), math.exp(np.interp(epochs, known, np.log(factors)))
    return by_epochs ** (1 - share) * by_steps**share


def average_decay(steps: float) -> float:
    """The decay of the weight average: it looks back over a twentieth of the steps."""
    return round(min(0.999, max(0.8, 1 - _DECAY_STEPS / steps)), 4)


def _end(request: Request, steps: float, step_seconds: float) -> BudgetConfig:
    """The clock as it was given, or with an earlier end after a number of steps, if the text is small. A clock of the probe's
    seconds would end a slower machine after a fraction of the steps: the host of a small model, or a busy CPU."""
    early = steps * step_seconds < 0.98 * 60 * request.minutes  # not only as rounding leaves it
    return BudgetConfig(
        minutes=request.minutes, most_steps=max(1, round(steps)) if early else None, max_bytes=request.max_bytes
    )
