"""The table of sources: whatever is in it is offered, explained and refused in the same way."""

from pathlib import Path

import pytest

from parbank.cli.terminal import DATA_HELP
from parbank.data.sources import SOURCES, absolute_spec, add_options, is_public, is_spec, parse_spec
from parbank.errors import ConfigError


def test_every_source_is_in_the_help_and_in_the_error() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_spec("nonsense")
    for name, source in SOURCES.items():
        assert source.name == name
        assert source.form.startswith(name)
        assert f"{source.form}: {source.help}." in DATA_HELP
        assert source.form in str(refused.value)


def test_a_path_without_its_kind_is_recognised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"did you mean text:{tmp_path}"):
        parse_spec(str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        parse_spec(f"{tmp_path}/missing")
    assert "did you mean" not in str(refused.value)


def test_specs_that_need_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [absolute_spec(spec) for spec in ("stdlib", "fineweb", "fineweb:3")] == ["stdlib", "fineweb", "fineweb:3"]
    assert absolute_spec("shards:x") == f"shards:{tmp_path}/x"
    with pytest.raises(ConfigError, match="shards:DIR"):
        parse_spec("shards:")


def test_only_specs_without_a_path_are_public() -> None:
    assert [is_public(spec) for spec in ("stdlib", "fineweb:3", "text:stdlib", "shards:x", "nonsense")] == [
        True, True, False, False, False,
    ]  # fmt: skip


def test_a_string_is_a_spec_or_plain_text() -> None:
    assert all(map(is_spec, ("stdlib", "fineweb", "fineweb:2", "text:a", "shards:x")))
    assert not any(map(is_spec, ("text", "shards", "stdlibs", "hello: world", "")))


def test_options_become_parts_of_the_spec() -> None:
    assert add_options("text:a", []) == "text:a"
    assert add_options("text:a", ["glob=*.md", "skip-bad=yes"]) == "text:a,glob=*.md,skip-bad=yes"
    for spec in ("stdlib", "fineweb", "shards:x"):
        with pytest.raises(ConfigError, match=f"--field is not for --data {spec}; it goes with text:PATH"):
            add_options(spec, ["field=body"])
    with pytest.raises(ConfigError, match=r"--glob 'a,b' has a comma"):
        add_options("text:a", ["glob=a,b"])
