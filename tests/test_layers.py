"""Imports point down only: the rooms and their order are those of the README's file tree."""

import ast
from pathlib import Path

import parbank

ROOT = Path(parbank.__file__).parent
LEVELS = {
    "errors": 0, "config": 0, "runtime": 0, "graphs": 0,
    "ops": 1,
    "model": 2, "optim": 2, "data": 2, "quant": 2, "artifact": 2,
    "eval": 3,
    "train": 4,
    "study": 5,
    "recipes": 6, "doctor": 6, "terminal": 6, "cli_artifact": 6, "cli_eval": 6, "cli": 6, "__main__": 7,
}  # fmt: skip
SIBLINGS_ALLOWED = {
    ("quant", "artifact"),
    ("cli", "recipes"),
    ("cli", "doctor"),
    ("cli", "cli_artifact"),
    ("cli", "terminal"),
    ("cli", "cli_eval"),
    ("cli_eval", "terminal"),
    ("runtime", "errors"),
    ("config", "errors"),
}


def imported_rooms(path: Path) -> set[str]:
    """The rooms a file imports, at run time or for its types, wherever in the file the import stands."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "parbank":
            parts = node.module.split(".")
            rooms |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            rooms |= {a.name.split(".")[1] for a in node.names if a.name.startswith("parbank.")}
    return {room for room in rooms if room in LEVELS}


def test_imports_point_down() -> None:
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room == "__init__":  # the public surface may reach everywhere
            continue
        assert room in LEVELS, f"{path} is in a room that has no place in the order"
        for other in imported_rooms(path) - {room}:
            if LEVELS[other] >= LEVELS[room] and (room, other) not in SIBLINGS_ALLOWED:
                wrong.append(f"{path.relative_to(ROOT)} imports {other}")
    assert not wrong


def test_the_walk_sees_imports(tmp_path: Path) -> None:
    """The test above must be able to fail."""
    file = tmp_path / "x.py"
    file.write_text(
        "def f():\n    from parbank.train.run import run\n    import parbank.cli\n    from parbank import ops\n"
    )
    assert imported_rooms(file) == {"train", "cli", "ops"}


def test_files_stay_small() -> None:
    long = {str(p.relative_to(ROOT)): n for p in ROOT.rglob("*.py") if (n := len(p.read_text().splitlines())) > 500}
    assert not long, f"a file over 500 lines wants another room: {long}"
