"""The studies that parbank ships, by name, and how a study is made from a name, a file or the command line."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from parbank.config import choose, override
from parbank.data.sources import absolute_spec, add_options, find_source
from parbank.errors import ConfigError
from parbank.recipes import find_recipe
from parbank.study import kernels
from parbank.study.arms import ARMS, SHAPES, claim_of
from parbank.study.study import (
    STORED,
    TRAINED,
    Arm,
    Kind,
    Study,
    StudyFile,
    apply_arm,
    read_arm,
    read_budget,
    read_file,
)
from parbank.training.checkpoint import find_checkpoint, load_checkpoint
from parbank.training.config import RunConfig, read_config
from parbank.training.configure import configure_run
from parbank.training.folder import load_run_config

SEEDS = 4


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """A study by name."""

    help: str
    arms: tuple[str, ...] = ()
    kind: Kind = "training"
    recipe: str = "sprint"
    packed: bool = False
    seeds: int = SEEDS
    grid: tuple[tuple[str, str, str], ...] = ()
    """Arms that are no settings of a run: name, settings, claim."""
    note: str = ""
    """Shown under the table."""


STUDIES: dict[str, Shipped] = {
    "seeds": Shipped(help="mean and deviation of a recipe", seeds=5),
    "published-training": Shipped(
        help="changes of model, optimizer and data that others published",
        arms=(
            "xsa-everywhere",
            "value-residual",
            "gated-attention",
            "weight-decay-008",
            "batch-third-larger",
            "width-576",
            "hard-first",
            "swa",
            "relu-squared",
            "no-softcap",
            "full-rope",
        ),
    ),
    "levers": Shipped(
        help="changes that the field found to pay under a clock, one at a time",
        arms=(
            "vocab-4096",
            "vocab-8192",
            "half-batch",
            "dropout-01",
            "bigrams-16384",
            "values-everywhere",
            "head-128",
            "short-sequences-first",
            "long-warmdown",
            "lr-floor",
            "embedding-lr-twice",
            "quick-momentum",
            "gated-attention",
            "qk-gain-4",
            "xsa-everywhere",
            "muoneq-r",
            "normuon",
            "mlp-4x",
            "cautious-decay",
            "decay-taper",
            "token-dropout-005",
            "input-smear",
            "dense-connections",
            "parallel-blocks",
            "isolated-documents",
            "windowed-layers",
            "batch-grows",
            "case-operators",
        ),
    ),
    "muon-variants": Shipped(
        help="variants of Muon and of the algorithm beside it, at the learning rates of the recipe",
        arms=("muoneq-r", "normuon", "polar-express", "cautious-decay", "adamw-sized-updates", "lion"),
    ),
    "width-depth": Shipped(
        help="layers against width, at a fixed clock and cap",
        arms=tuple(f"{layers}x{width}" for layers, width in SHAPES),
        packed=True,
    ),
    "published-quantisation": Shipped(
        help="ways to pack one or several stored checkpoints under the same cap",
        kind="packing",
        arms=(
            "no-hadamard",
            "no-calibration",
            "no-activation-order",
            "no-pruning",
            "more-pruning",
            "low-rank-8",
            "int6-rows",
            "int5-rows",
        ),
        seeds=8,
        note="Soft rounding, which was published beside these, changes training. `parbank study run published-rounding` trains "
        "it and packs the result.",
    ),
    "published-rounding": Shipped(
        help="the part of the published quantisation that trains: rounding in the last fifth of training, then packed",
        arms=("qat-soft", "qat-straight"),
        packed=True,
    ),
    "ttt-grid": Shipped(
        help="test-time training of stored checkpoints against streaming scores",
        kind="scoring",
        grid=(
            ("sgd", "method=ttt", "score-first SGD: -0.0024 (1.1218 -> 1.1194, parameter-golf #549)"),
            ("sgd-lr-half", "method=ttt,lr=0.001", "22 variants: +0.0006 at best (parameter-golf #670)"),
            ("sgd-lr-double", "method=ttt,lr=0.004", "22 variants: +0.0006 at best (parameter-golf #670)"),
            ("sgd-one-epoch", "method=ttt,epochs=1", "22 variants: +0.0006 at best (parameter-golf #670)"),
            ("sgd-chunk-8192", "method=ttt,chunk=8192", "22 variants: +0.0006 at best (parameter-golf #670)"),
            ("low-rank", "method=ttt,adapter=low-rank", "per document: -0.0108 (parameter-golf #1530, #1586)"),
            (
                "low-rank-lr-tenth",
                "method=ttt,adapter=low-rank,lr=0.0001",
                "the same at a tenth of the rate; no number",
            ),
        ),
        seeds=8,
    ),
    "inside-clock": Shipped(
        help="a learning rate chosen inside the clock, against the default for the whole clock",
        kind="inside",
        grid=(
            ("halving", "strategy=halving,rates=[0.5,1,2]", "halving among candidates on one GPU: an idea, no number."),
            ("bandit", "strategy=bandit,rates=[0.7,1,1.4]", "a bandit over learning rates: an idea, no number."),
        ),
    ),
    "published-kernels": Shipped(
        help="kernels against the code they would replace, by micro-benchmarks",
        kind="kernels",
        arms=tuple(kernels.KERNELS),
        seeds=8,
    ),
}
CONFIGURED = ("training", "packing")  # kinds whose arms are settings of a run


def make_study(
    name: str,
    *,
    recipe: str | None = None,
    data: str | None = None,
    holdout: str = "dev",
    budget: str | None = None,
    seeds: int | None = None,
    arms: Iterable[str] | None = None,
    extra: Iterable[str] = (),
    settings: Iterable[str] = (),
    packed: bool | None = None,
    metric: str | None = None,
    score_tokens: int = 0,
    keep: bool = False,
    checkpoints: Iterable[str] = (),
    noise: float | None = None,
    difference: float | None = None,
) -> Study:
    """A study from the name of a shipped one or the path of a TOML file, with changes.

    seeds: runs of each arm; several checkpoints are a seed each. arms: names of shipped arms in place of the study's own.
    extra: more arms, as `name:a.b=v,c.d=w`.
    settings: changes of the recipe that every arm has. holdout: dev scores on a part of the training documents, so that
    the validation text stays unseen by choices; val scores on the validation text. metric: chunked or streaming.
    """
    file = _look_up(name)
    stored = [str(Path(path).resolve()) for path in checkpoints]
    if file.kind in STORED:
        base = override(_stored_config(file.name, stored), *file.settings, *settings)
        base = replace(base, data=absolute_spec(data or base.data))
    else:
        changes = [*file.settings, *settings]
        if spec := data or file.data:
            changes.append(f"data={json.dumps(spec)}")
        base = configure_run(find_recipe(recipe or file.recipe or "sprint"), *changes)
        base = replace(base, data=hold_out(base.data, holdout))
    if budget or file.budget:
        base = override(base, *read_budget(budget or file.budget or ""))
    own = [] if arms is not None else list(file.arm.values())
    made = [make_arm(arm, base, file.kind) for arm in (file.arms if arms is None else arms)]
    made += [*own, *(read_arm(text, base if file.kind in CONFIGURED else None) for text in extra)]
    if metric is not None and file.kind not in TRAINED:
        raise ConfigError(f"--metric is how trained runs are scored, and {file.name} trains none; leave it out")
    count = _count_seeds(seeds, file, stored)
    first = 0 if file.kind in STORED else base.seed
    return Study(
        name=file.name,
        kind=file.kind,
        base=base,
        arms=tuple(made),
        seeds=tuple(range(first, first + count)),
        packed=file.packed if packed is None else packed,
        metric=metric or file.metric,
        score_tokens=score_tokens,
        keep=keep,
        checkpoints=tuple(stored),
        own_baselines=file.kind == "kernels",
        note=file.note,
        noise=noise,
        difference=difference,
    )


def _count_seeds(given: int | None, file: StudyFile, checkpoints: list[str]) -> int:
    if len(checkpoints) > 1:
        if given not in (None, len(checkpoints)):
            raise ConfigError(
                f"with several checkpoints each is a seed: {len(checkpoints)} are given, and --seeds {given}; leave --seeds out"
            )
        return len(checkpoints)
    found = next(number for number in (given, file.seeds, SEEDS) if number is not None)
    if found < 1:
        raise ConfigError(f"a study needs at least 1 seed, got {found}; leave seeds out for {SEEDS}")
    return found


def make_arm(name: str, base: RunConfig, kind: str = "training") -> Arm:
    """A shipped arm on this base."""
    if kind == "kernels":
        choose(kernels.KERNELS, name, "an arm of a study of kernels")
        return Arm(name=name, claim=kernels.claim_of(name))
    change = choose(ARMS, name, "an arm")
    try:
        return apply_arm(name, change, base, claim_of(name))
    except ConfigError as error:
        raise ConfigError(
            f"the arm {name} does not fit the recipe {base.recipe}: {error}; choose others by --arms"
        ) from error


def _stored_config(name: str, checkpoints: list[str]) -> RunConfig:
    """The config of the first checkpoint."""
    if not checkpoints:
        raise ConfigError(f"the study {name} works on stored runs; say which by --checkpoint RUN, once for each")
    path = Path(checkpoints[0])
    if (path / "config.json").is_file():
        return load_run_config(path)
    return read_config(load_checkpoint(find_checkpoint(path))["config"])


def hold_out(spec: str, part: str) -> str:
    """The spec that scores on this part: `dev` of the training documents, or `val`."""
    if part not in ("dev", "val"):
        raise ConfigError(f"--holdout is dev or val, got {part!r}")
    if part == "val" or ",holdout=" in spec or "holdout" not in find_source(spec).options:
        return spec
    return add_options(spec, ["holdout=dev"])


def _look_up(name: str) -> StudyFile:
    if name in STUDIES:
        found = STUDIES[name]
        return StudyFile(
            name=name,
            recipe=found.recipe,
            kind=found.kind,
            seeds=found.seeds,
            packed=found.packed,
            note=found.note,
            arms=found.arms,
            arm={name: replace(read_arm(f"{name}:{text}"), claim=claim) for name, text, claim in found.grid},
        )
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        return read_file(path)
    raise ConfigError(
        f"there is no study {json.dumps(name)}; there are {', '.join(STUDIES)}. A file ends in .toml; a folder continues its study"
    )
