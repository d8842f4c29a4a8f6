"""A run stays within the functions that packages offer each other: `tests.crossings` says what is counted."""

import importlib
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.crossings import Tracer

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


HOUSE = {
    "shared.py": "def ask(x):\n    return x\ndef call(work, x):\n    return work(x)\n",
    "low/__init__.py": "",
    "low/work.py": (
        "import house.shared\n"
        "class Tool:\n"
        "    def use(self, back):\n"
        "        house.shared.ask(self)\n"
        "        return sorted([2, 1], key=back)\n"
        "def measure(x):\n    return x\n"
        "def weigh(x):\n    return x\n"
        "def count():\n    return 1\n"
    ),
    "high/__init__.py": "",
    "high/plan.py": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from threading import Thread\n"
        "from house.low.work import Tool, count, measure, weigh\n"
        "import house.shared\n"
        "def order(x):\n    return inner(x)\n"
        "def inner(x):\n    return house.shared.ask(x)\n"
        "def run():\n"
        "    house.shared.call(measure, 1)\n"
        "    house.shared.call(order, 1)\n"
        "    with ThreadPoolExecutor(1) as pool:\n"
        "        pool.submit(weigh, 1).result()\n"
        "    thread = Thread(target=count)\n"
        "    thread.start()\n"
        "    thread.join()\n"
        "    for _ in range(3):\n"
        "        Tool().use(order)\n"
    ),
}
"""Two packages and a module at the root between them."""


def test_the_tracer_sees_each_function_once_and_no_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in HOUSE.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    tracer = Tracer(tmp_path / "house")
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        with tracer.following_threads():
            importlib.import_module("house.high.plan").run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    crossings = {(caller[1], here[1]) for caller, here in tracer.between_packages}
    assert crossings == {
        ("run", "Tool.use"),  # the call down
        ("Tool.use", "order"),  # the callback that the sort makes for it
        ("run", "measure"),  # through a module at the root, which is passed through; `order` comes home that way
        ("run", "weigh"),  # by a pool's thread
        ("run", "count"),  # by a thread of its own
    }
    assert {here[1] for _, here in tracer.with_root} == {here for _, here in crossings} | {"ask", "call"}
