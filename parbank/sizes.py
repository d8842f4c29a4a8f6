"""Sizes and counts as people write them: `16MB`, `30_000_000`, `2e6`."""

import re
from decimal import Decimal

from parbank.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_LARGEST = 2**63 - 1  # the limit of file systems, and of other programs' integers


def read_size(text: str) -> int:
    """Bytes from `16MB`, `16MiB`, `30_000_000` or `2e6`."""
    return _read_whole(
        text, _UNITS, "a size is written as 16MB (16,000,000 bytes), 16MiB (16,777,216), 30_000_000 or 2e6"
    )


def read_count(text: str) -> int:
    """A whole number from `30_000_000` or `2e6`."""
    return _read_whole(text, {"": 1}, "a count is written as 2000000, 2_000_000 or 2e6")


def _read_whole(text: str, units: dict[str, int], remedy: str) -> int:
    found = re.fullmatch(r"(\d[\d_]*|\d{1,3}(?:,\d{3})+)(\.\d+)?(e\+?\d{1,2})?\s*([a-z]*)", text.strip(), re.I | re.A)
    if found is None or found[4].upper() not in units:
        raise ConfigError(f"{text!r} is not understood; {remedy}")
    number = Decimal(re.sub("[_,]", "", found[1]) + (found[2] or "") + (found[3] or "")) * units[found[4].upper()]
    if number != int(number):
        raise ConfigError(f"{text!r} is {number.normalize():f}, not a whole number; {remedy}")
    if number > _LARGEST:
        raise ConfigError(f"{text!r} is larger than {_LARGEST:,}; {remedy}")
    return int(number)
