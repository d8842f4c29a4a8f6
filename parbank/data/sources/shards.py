"""`shards:DIR`: tokens that `parbank data prepare` or another program wrote."""

import os
from dataclasses import dataclass
from pathlib import Path

from parbank.data.progress import Say
from parbank.data.sources.source import Source
from parbank.errors import ConfigError


@dataclass(frozen=True)
class ShardsRequest:
    folder: str

    @property
    def spec(self) -> str:
        return f"shards:{self.folder}"

    def open(self, cache: Path, say: Say) -> Path:
        return Path(self.folder)


def parse(rest: str) -> ShardsRequest:
    if not rest:
        raise ConfigError("shards: needs a folder; write shards:DIR")
    return ShardsRequest(os.path.abspath(os.path.expanduser(rest)))


SOURCE = Source(name="shards", form="shards:DIR", help="what `parbank data prepare` wrote", parse=parse, tokens=True)
