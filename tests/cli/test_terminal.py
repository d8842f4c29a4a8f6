"""What commands share: sizes, data options, and text that is safe to print."""

import shlex
from pathlib import Path

import pytest
import typer

from parbank.cli.terminal import print_next, printable, read_count, read_size
from parbank.data.sources import read_data
from parbank.errors import ConfigError


def test_a_sample_reaches_a_terminal_without_its_control_codes() -> None:
    assert printable("a\tb\nc") == "a\tb\nc"
    assert printable("\x1b[2J\x07\r\x7f\x9b é∞") == "␛[2J␇␍␡\ufffd é∞"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16MB", 16_000_000),
        ("16MiB", 16_777_216),
        ("16 mib", 16_777_216),
        ("30_000_000", 30_000_000),
        ("30,000,000", 30_000_000),
        ("2e6", 2_000_000),
        ("1.5MB", 1_500_000),
        ("1.5e3kB", 1_500_000),
        ("0.5KiB", 512),
        ("12B", 12),
        ("0", 0),
        ("2GiB", 2**31),
        ("10TB", 10**13),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert read_size(text) == size
    assert type(read_size(text)) is int


@pytest.mark.parametrize(
    "text",
    ["", "MB", "-5", "16M", "16 megabytes", "1.5", "1,5MB", "16,00", "0.3KiB", "0x10", "1e99", "2e6.5", "nan", "inf", "_5", "²MB",
     str(2**63), "9999999999GiB", "1" * 5000],
)  # fmt: skip
def test_sizes_that_cannot_be_read_say_how_to_write_one(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"16MB \(16,000,000 bytes\), 16MiB \(16,777,216\), 30_000_000 or 2e6"):
        read_size(text)


def test_counts_have_no_unit() -> None:
    assert (read_count("2e6"), read_count("30_000")) == (2_000_000, 30_000)
    with pytest.raises(typer.BadParameter, match="a count is written as"):
        read_count("2MB")


def test_data_options_are_parts_of_the_spec() -> None:
    assert read_data(None, None, None, False) is None
    assert read_data("text:a", None, None, False) == "text:a"
    assert read_data("text:a", ["*.md", "*.txt"], "body", True) == "text:a,glob=*.md,glob=*.txt,field=body,skip-bad=yes"
    with pytest.raises(ConfigError, match="--glob, --skip-bad without --data"):
        read_data(None, ["a", "b"], None, True)
    with pytest.raises(ConfigError, match="--field is not for --data stdlib; it goes with text:PATH or parquet:PATH"):
        read_data("stdlib", None, "body", False)


def test_the_next_command_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    print_next(("parbank", "eval", Path("my rün/it's")), ("parbank", "sample", Path("-x")))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("next  parbank")
    assert second == "      parbank sample ./-x"
    assert shlex.split(first)[1:] == ["parbank", "eval", "my rün/it's"]
