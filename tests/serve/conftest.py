"""A playground over a small model."""

from collections.abc import Iterator

import pytest

from parbank.serve.player import Player
from tests.serve.site import Site, load_player, open_site


@pytest.fixture(scope="session")
def player() -> Player:
    return load_player()


@pytest.fixture(scope="module")
def site(player: Player) -> Iterator[Site]:
    with open_site([player], most=2) as found:
        yield found
