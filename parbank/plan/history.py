"""What earlier runs on a text scored: a plan for the same text expects its score by them.

zlib says little of how hard a text is, so what the laws expect of a new text may be off by a fifth. Once a plan was trained, the
score of that run before packing, over what the laws say of it, is a factor of the text, and the next plan for this text multiplies
its expected scores by it. **The choice of a plan does not change**: the factor multiplies the whole score of every candidate, so a
plan is the same with and without a history.

Of several runs, the one counts from which the coming run follows with the least deviation (`Laws.transfer`): the most alike, and
of equal ones the latest. Where even that one says less than the laws alone, none counts. Runs on a CPU say nothing to a plan for a
GPU, and the other way round: the fit cannot tell a difference of machines from one of texts.

A run is kept as its sizes and its score, and the laws of the plan that reads it are asked: a later fit has its own factor. The
file is in the cache, named by the digest of the text (`PlanText.digest`), and has no text in it. Of two runs that end at the same
moment, one may be forgotten. A file that is damaged, or cannot be read or written, counts as none.
"""

import hashlib
import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np

from parbank.config import parse_json
from parbank.errors import FileError
from parbank.files import default_cache, write_json
from parbank.plan.candidates import are_usual, compare_with_runs, count_token_bytes
from parbank.plan.choose import WORST, Choice, Known, Plan, find_options
from parbank.plan.laws import LEAST_STEPS, Cases, Laws
from parbank.plan.notes import find_ignored
from parbank.plan.shapes import count_parameters
from parbank.plan.texts import PlanText
from parbank.training.config import RunConfig

VERSION = 1
"""Of the file that runs are kept in: an older one is not read."""
_SWITCHES = ("case_operators", "tied")
KEPT = 32
"""Runs of one text; the oldest are forgotten."""
MOST_FACTOR = 3.0
"""Over or under what the laws say: they describe no run that is further from them. They are most wrong for texts of 30 kB, where
they expected up to 1.6 bits per byte too much (docs/design/plan.md)."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the laws know of a run, beside its text."""

    matrices: float
    params: float
    vocab: float
    bigrams: float
    tokens: float
    batch_tokens: float
    length: float
    """Tokens of a window."""
    case_operators: bool
    tied: bool
    """Whether the embedding of tokens is the head, too."""

    @classmethod
    def of(cls, config: RunConfig, tokens: float) -> "Sizes":
        counts = count_parameters(config.model)
        return cls(
            matrices=counts.matrices,
            params=counts.total,
            vocab=config.model.vocab_size,
            bigrams=config.model.bigram_buckets,
            tokens=tokens,
            batch_tokens=config.batch.batch_tokens,
            length=config.batch.sequence_length,
            case_operators=config.tokenizer.case_operators,
            tied=config.model.tied,
        )


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """A run that has ended."""

    on: str
    """The date, in UTC."""
    bpb: float
    """Bits per byte before packing."""
    sizes: Sizes


@dataclass(frozen=True, kw_only=True)
class _Expected:
    """What the laws say of a run on the text of a plan."""

    cases: Cases
    windows: float
    score: float
    """Before packing."""


def remember(plan: Plan, summary: dict[str, Any]) -> None:
    """Keeps the run of a plan that has ended, in one piece, if the laws describe it: with no setting that they ignore, of a size
    that plans choose, and of LEAST_STEPS or more. The first rank alone calls it."""
    score, sizes = float(summary["val_bpb_before_packing"]), Sizes.of(plan.best.config, float(summary["tokens"]))
    ordinary = not find_ignored(plan.settings, cuda=plan.machine.cuda) and are_usual(sizes.matrices, plan.ranges)
    if not (plan.text.digest and ordinary and summary["steps"] >= LEAST_STEPS and 0 < score < WORST):
        return
    run = PastRun(on=datetime.now(UTC).date().isoformat(), bpb=score, sizes=sizes)
    with suppress(OSError, FileError):  # a cache that cannot be written: the next plan knows no more than this one
        path = _path(plan.text, cuda=plan.machine.cuda)
        kept = [*_read(path), run][-KEPT:]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, [asdict(one) for one in kept])


def recall(plan: Plan, laws: Laws) -> Plan:
    """The plan with the scores to expect of a text that was trained on before; unchanged if it was not."""
    if not plan.text.digest:
        return plan
    machine = plan.machine
    runs = _read(_path(plan.text, cuda=machine.cuda))
    laws = laws if machine.cuda else laws.for_text_on_a_cpu(plan.text.bytes)
    known = [(run, _expect(run.sizes, plan, laws)) for run in reversed(runs)]
    sound = [(run, there) for run, there in known if 1 / MOST_FACTOR < run.bpb / there.score < MOST_FACTOR]

    def deviate(choice: Choice, there: _Expected) -> float:
        """As a share of the score."""
        here = _expect(Sizes.of(choice.config, choice.tokens), plan, laws)
        (found,) = laws.transfer(
            here.cases, there.cases, options=machine.cuda, windows=here.windows, past_windows=there.windows
        )
        return float(found)

    best = plan.best
    shares = [deviate(best, there) for _, there in sound]
    if not shares or min(shares) >= best.deviation / best.score:
        return plan
    run, there = sound[int(np.argmin(shares))]
    factor = run.bpb / there.score

    def correct(choice: Choice) -> Choice:
        score = min(factor * choice.score, WORST)
        return replace(
            choice,
            score=score,
            packing=factor * choice.packing,
            untried=factor * choice.untried,
            deviation=min(deviate(choice, there), 0.5) * score,
        )

    return replace(
        plan,
        best=correct(best),
        others=tuple(map(correct, plan.others)),
        more_minutes=min(factor * plan.more_minutes, WORST),
        more_bytes=min(factor * plan.more_bytes, WORST),
        less_minutes=min(factor * plan.less_minutes, WORST),
        known=Known(on=run.on, bpb=run.bpb, factor=factor, score=best.score, deviation=best.deviation),
    )


def _expect(sizes: Sizes, plan: Plan, laws: Laws) -> _Expected:
    """What `make_plan` expects of such a candidate."""
    text, cuda = plan.text, plan.machine.cuda
    matrices, vocab, batch_tokens, bigrams = (
        np.array([value]) for value in (sizes.matrices, sizes.vocab, sizes.batch_tokens, sizes.bigrams)
    )
    cases = Cases.of(
        matrices=matrices,
        params=sizes.params,
        vocab=vocab,
        bigrams=bigrams,
        tokens=sizes.tokens,
        bytes_per_token=count_token_bytes(text, laws, vocab),
        text_bytes=text.bytes,
        batch_tokens=batch_tokens,
        hardness=text.hardness,
    )
    turn = np.maximum(laws.most_tokens(cases), batch_tokens)
    cases = replace(cases, tokens=np.minimum(sizes.tokens, turn))
    length = np.array([0.0 if cuda else sizes.length])
    windows = laws.count_windows(length, np.array([sizes.tokens / sizes.batch_tokens]))
    tied = np.array([sizes.tied])
    options = find_options(laws, windows, cuda=cuda, case_operators=sizes.case_operators, tied=tied)
    untried, correction = compare_with_runs(laws, matrices, vocab, batch_tokens, bigrams)
    (score,) = options * laws.score(cases, text.fitted_name(cuda=cuda)) + untried + correction
    return _Expected(cases=cases, windows=float(windows[0]), score=float(score))


def _path(text: PlanText, *, cuda: bool) -> Path:
    key = hashlib.sha256(json.dumps([VERSION, cuda, text.digest]).encode()).hexdigest()[:32]
    return default_cache() / "plan" / f"runs-{key}.json"


def _read(path: Path) -> list[PastRun]:
    """The runs of a file, the latest last; none if anything about it is wrong."""
    try:
        return [_parse(entry) for entry in parse_json(path.read_bytes())]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _parse(entry: Any) -> PastRun:
    sizes: dict[str, Any] = {field.name: entry["sizes"][field.name] for field in fields(Sizes)}
    least = {"bigrams": -1, "bpb": 0}  # a model may have no table of bigrams
    for name, value in (*sizes.items(), ("bpb", entry["bpb"])):
        if name in _SWITCHES:
            if type(value) is not bool:
                raise ValueError(f"{name} is {value!r}")
        elif type(value) not in (int, float) or not least.get(name, 0.99) < value < 1e18:
            raise ValueError(f"{name} is {value!r}")
    if not math.isfinite(entry["bpb"]) or entry["bpb"] >= WORST:
        raise ValueError("no run")
    return PastRun(on=date.fromisoformat(entry["on"]).isoformat(), bpb=float(entry["bpb"]), sizes=Sizes(**sizes))
