"""A class name stands for one thing: no two modules of parbank define the same one."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "parbank"


def test_no_class_name_is_used_twice() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert len(homes) > 200, "this reads the package"
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}
