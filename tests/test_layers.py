"""Imports point down only: the rooms and their order are those of the README's file tree."""

import ast
from pathlib import Path

import parbank

ROOT = Path(parbank.__file__).parent
LEVELS = {
    "errors": 0, "gpu": 0.5, "ahead": 0.5, "cores": 0.5, "rendezvous": 0.5, "watch": 0.5,
    "config": 1, "runtime": 1, "graphs": 1, "precision": 1, "files": 1, "compress": 1, "statistics": 1, "threads": 1,
    "display": 1, "sizes": 1,
    "ops": 2,
    "model": 3, "optim": 3, "data": 3, "quant": 3,
    "artifact": 4,
    "eval": 5,
    "training": 6,
    "recipes": 7,
    "plan": 7.5, "report": 7.5,
    "api": 8, "program": 8, "study": 8,
    "serve": 8.5,
    "cli": 9, "adapters": 9, "__main__": 10,
}  # fmt: skip


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
            if LEVELS[other] >= LEVELS[room]:
                wrong.append(f"{path.relative_to(ROOT)} imports {other}")
    assert not wrong


def test_the_walk_sees_imports(tmp_path: Path) -> None:
    """The test above must be able to fail."""
    file = tmp_path / "x.py"
    file.write_text(
        "def f():\n    from parbank.training.run import run\n    import parbank.cli\n    from parbank import ops\n"
    )
    assert imported_rooms(file) == {"training", "cli", "ops"}


def test_files_stay_small() -> None:
    long = {str(p.relative_to(ROOT)): n for p in ROOT.rglob("*.py") if (n := len(p.read_text().splitlines())) > 500}
    assert not long, f"a file over 500 lines wants another room: {long}"
