"""The studies that parbank ships, by name, and how a study is made from a name, a file or the command line."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from parbank.config import choose, override
from parbank.data.sources import absolute_spec, add_options, find_source
from parbank.errors import ConfigError
from parbank.recipes import get_recipe
from parbank.study.arms import ARMS, SHAPES, claim_of
from parbank.study.study import Arm, Study, StudyFile, apply_arm, read_arm, read_budget, read_file
from parbank.training.config import RunConfig

SEEDS = 4


@dataclass(frozen=True, kw_only=True)
class Shipped:
    """A study by name."""

    help: str
    arms: tuple[str, ...] = ()
    kind: str = "training"
    recipe: str = "sprint"
    packed: bool = False
    seeds: int = SEEDS


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
            "swa",
            "relu-squared",
            "no-softcap",
            "full-rope",
        ),
    ),
    "width-depth": Shipped(
        help="layers against width, at a fixed clock and cap",
        arms=tuple(f"{layers}x{width}" for layers, width in SHAPES),
        packed=True,
    ),
}


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
    score_tokens: int = 0,
    keep: bool = False,
    checkpoints: Iterable[str] = (),
    noise: float | None = None,
    difference: float | None = None,
) -> Study:
    """A study from the name of a shipped one or the path of a TOML file, with changes.

    arms: names of shipped arms in place of the study's own. extra: more arms, as `name:a.b=v,c.d=w`.
    settings: changes of the recipe that every arm has. holdout: dev scores on a part of the training documents, so that
    the validation text stays unseen by choices; val scores on the validation text.
    """
    file = _look_up(name)
    base = override(get_recipe(recipe or file.recipe or "sprint"), *file.settings, *settings)
    spec = data or file.data or base.data
    base = replace(base, data=absolute_spec(hold_out(spec, holdout)))
    if budget or file.budget:
        base = override(base, *read_budget(budget or file.budget or ""))
    own = [] if arms is not None else list(file.arm.values())
    made = [make_arm(arm, base) for arm in (file.arms if arms is None else arms)]
    made += [*own, *(read_arm(text, base) for text in extra)]
    count = seeds or file.seeds or SEEDS
    return Study(
        name=file.name,
        kind=file.kind,
        base=base,
        arms=tuple(made),
        seeds=tuple(range(base.seed, base.seed + count)),
        packed=file.packed if packed is None else packed,
        score_tokens=score_tokens,
        keep=keep,
        checkpoints=tuple(str(Path(path).resolve()) for path in checkpoints),
        noise=noise,
        difference=difference,
    )


def make_arm(name: str, base: RunConfig) -> Arm:
    """A shipped arm on this base."""
    change = choose(ARMS, name, "an arm")
    try:
        return apply_arm(name, change, base, claim_of(name))
    except ConfigError as error:
        raise ConfigError(
            f"the arm {name} does not fit the recipe {base.recipe}: {error}; choose others by --arms"
        ) from error


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
            arms=found.arms,
        )
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        return read_file(path)
    raise ConfigError(
        f"there is no study {json.dumps(name)}; there are {', '.join(STUDIES)}. A file ends in .toml; a folder continues its study"
    )
