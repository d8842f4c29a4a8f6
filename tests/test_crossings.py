"""A run stays within the functions that packages offer each other: `tests.crossings` says what is counted."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.crossings import Tracer, is_packaged

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 60
"""As docs/design/changes.md says. A change that would exceed it must make an interface narrower elsewhere."""


@pytest.mark.slow
def test_a_small_run_crosses_no_more_borders_than_agreed() -> None:
    command = [sys.executable, "-m", "tests.crossings"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = re.search(r"^crossings: (\d+)$", done.stdout, re.MULTILINE)
    assert found is not None
    assert 40 < int(found[1]) <= LIMIT, done.stdout


def test_the_tracer_sees_each_function_once_and_no_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "shared.py": "def ask(x):\n    return x",
        "low/__init__.py": "",
        "low/work.py": (
            "import house.shared\n"
            "class Tool:\n"
            "    def use(self, back):\n"
            "        house.shared.ask(self)\n"
            "        return sorted([2, 1], key=back)\n"
        ),
        "high/__init__.py": "",
        "high/plan.py": (
            "from house.low.work import Tool\n"
            "import house.shared\n"
            "def order(x):\n    return inner(x)\n"
            "def inner(x):\n    return house.shared.ask(x)\n"
            "def run():\n    return [Tool().use(order) for _ in range(3)]\n"
        ),
    }
    for name, source in files.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    tracer = Tracer(tmp_path / "house")
    sys.setprofile(tracer)
    try:
        importlib.import_module("house.high.plan").run()
    finally:
        sys.setprofile(None)
    names = {here[1] for caller, here in tracer.entered if is_packaged(caller) and is_packaged(here)}
    assert names == {"Tool.use", "order"}, "the call down, and the callback that the sort makes for it"
    assert {here[1] for _, here in tracer.entered} == names | {"ask"}
