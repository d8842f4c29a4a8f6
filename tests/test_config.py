import json
from dataclasses import dataclass, field
from typing import Literal

import pytest

from parbank.config import field_docs, from_dict, override, to_dict, walk
from parbank.errors import ConfigError
from parbank.recipes import RECIPES, get_recipe
from parbank.training.averaging import AverageConfig
from parbank.training.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int = 3
    """How large."""
    rate: float = 0.5
    names: tuple[str, ...] = ()
    kind: Literal["a", "b"] = "a"
    limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    on: bool = True


def test_override_parses_each_kind_of_value() -> None:
    changed = override(
        Outer(),
        "inner.size=16_000",
        "inner.rate=2",
        'inner.names=["x","y"]',
        "inner.kind=b",
        "inner.limit=none",
        "on=false",
    )
    assert changed == Outer(inner=Inner(size=16_000, rate=2.0, names=("x", "y"), kind="b", limit=None), on=False)
    assert isinstance(changed.inner.rate, float)


def test_a_choice_called_none_can_be_set() -> None:
    assert override(AverageConfig(), "use=none").use == "none"
    with pytest.raises(ConfigError, match="got 'none'"):
        override(Outer(), "inner.kind=none")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("inner.sise=3", "did you mean inner.size"),
        ("size=3", "did you mean inner.size"),
        ("inner.size", "a.b=value"),
        ("inner.size=big", "inner.size must be a whole number, got 'big'"),
        ("inner.size=2.5", "a whole number"),
        ("inner.size=true", "a whole number"),
        ("inner.kind=c", "one of 'a', 'b'"),
        ("inner.names=x", "must be a list"),
        ("inner.limit=soon", "a number or none"),
        (f"inner.rate={10**400}", r"inner.rate must be at most 1.8e\+308, got 10000000000000000000\.\.\."),
        ("on=1", "true or false"),
        ("inner=3", "inner.size"),
        ("other.size=3", "is not a setting"),
    ],
)
def test_a_wrong_override_says_what_is_allowed(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(Outer(), assignment)


def test_a_value_of_the_wrong_kind_gets_the_setting_s_form() -> None:
    with pytest.raises(
        ConfigError, match=r"train\.validate_every must be text, got 5\. What it is: .*such as 30s or 200steps"
    ):
        override(get_recipe("nano"), "train.validate_every=5")


def test_field_docs_are_read_from_the_source() -> None:
    assert field_docs(Inner) == {"size": "How large."}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_json_and_documents_every_setting(name: str) -> None:
    recipe = get_recipe(name)
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(recipe)))) == recipe
    assert recipe.recipe == name
    assert [path for path, _, doc in walk(recipe) if not doc] == []


def test_from_dict_names_the_unknown_field() -> None:
    with pytest.raises(ConfigError, match=r"inner\.depth is not a setting"):
        from_dict(Outer, {"inner": {"depth": 1}})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.heads=7"], "multiple of model.heads"),
        (["model.kv_heads=3"], "multiple of model.kv_heads"),
        (["model.rope_dims=5"], "even number"),
        (["model.value_layers=[99]"], "model.value_layers"),
        (["batch.batch_tokens=1000"], "multiple of batch.sequence_length"),
        (["budget.minutes=1"], "exactly one of"),
        (["budget.steps=0"], "must be positive"),
        (["optim.warmdown=2"], "0 to 1"),
        (["average.ema_decay=1.0"], "ema_decay"),
        (["train.log_every=0"], "at least 1"),
        (["seed=-1"], "seed"),
    ],
)
def test_settings_that_cannot_run_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(get_recipe("nano"), *settings)


def test_unknown_recipe_suggests() -> None:
    with pytest.raises(ConfigError, match="did you mean golf"):
        get_recipe("golff")


def test_the_micro_batch_divides_the_batch_over_any_fitting_world() -> None:
    batch = get_recipe("golf").batch
    assert [batch.micro_sequences(world) for world in (1, 2, 4, 8, 16)] == [48, 48, 48, 48, 24]
    with pytest.raises(ConfigError, match="5 ranks"):
        batch.micro_sequences(5)


def test_a_missing_field_is_named() -> None:
    values = to_dict(get_recipe("nano"))
    del values["budget"]
    with pytest.raises(ConfigError, match=r"budget is missing; RunConfig needs: .*recipe"):
        from_dict(RunConfig, values)
