"""The command line called in this process, and a run that the command itself made."""

import sys
from pathlib import Path

import pytest

from parbank.cli import main as cli
from tests.cli.calls import Answer, Call, train_arguments


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs `parbank ARGUMENTS...` in this process. Nothing that is not a terminal may get an escape code."""

    def parbank(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["parbank", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        answer = Answer(ended.value.code or 0, *capsys.readouterr())
        assert "\x1b" not in answer.err
        assert "Traceback" not in answer.err
        return answer

    return parbank


@pytest.fixture(scope="session")
def trained(text_spec: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run made by the command itself, in a folder with a space and an umlaut."""
    out = tmp_path_factory.mktemp("cli") / "my rün"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["parbank", *train_arguments(text_spec, out)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert not ended.value.code
    return out
