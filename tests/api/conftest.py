"""One run, made through the door, for every test of the doors."""

import sysconfig
from pathlib import Path

import pytest

import parbank
from tests.conftest import MODULES


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the examples know it: `books/` holds text, `runs/first` a run on it."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "books").mkdir()
    for name in MODULES:
        source = Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py"
        (folder / "books" / f"{name}.txt").write_bytes(source.read_bytes())
    return folder


@pytest.fixture(scope="session")
def first(home: Path) -> parbank.Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        return parbank.train(recipe="nano", data="text:books", steps=4, out="runs/first", device="cpu", quiet=True)
