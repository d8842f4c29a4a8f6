"""benchmarks/prepare.py: a figure for so many cores is one of so many cores."""

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.parametrize("cores", ["0", "1,3", "64"])
def test_cores_that_there_are_not_are_refused(
    benchmark: Callable[[str], ModuleType],
    cores: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepare = benchmark("prepare")
    monkeypatch.setattr(prepare, "count_cores", lambda: 2)
    monkeypatch.setattr(prepare, "prepare", lambda *arguments: pytest.fail("it ran"))
    monkeypatch.setattr("sys.argv", ["prepare.py", "--data", "text:a.txt", "--cores", cores])
    with pytest.raises(SystemExit):
        prepare.main()
    assert f"--cores {cores[-1:] if ',' in cores else cores}: this process may use 1 to 2" in capsys.readouterr().err
