"""The list of mutants is in step with the code: every fault can still be planted, and its tests are still there."""

from pathlib import Path

from tests.mutants.run import Mutant, find_faults, load_mutants

ROOMS = (
    "ops", "optim", "model", "data", "quant", "artifact", "eval", "training", "plan", "study", "report", "serve", "api",
    "adapters", "cli",
)  # fmt: skip


def test_every_mutant_can_be_planted() -> None:
    assert find_faults(load_mutants()) == []


def test_the_list_covers_every_room() -> None:
    mutants = load_mutants()
    assert len(mutants) >= 30
    files = [mutant.file for mutant in mutants]
    for room in ROOMS:
        assert sum(file.startswith(f"parbank/{room}/") for file in files) >= 3, room
    assert {"parbank/config.py", "parbank/runtime.py", "parbank/files.py", "parbank/graphs.py"} <= set(files)


def test_a_list_that_fell_behind_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n", encoding="utf-8")
    mutant = Mutant("a", "a.py", "x = 1", "x = 2", "for a test", ("a.py::test_x",))
    assert find_faults([mutant], tmp_path) == []
    mutant.plant(tmp_path)
    assert (tmp_path / "a.py").read_text(encoding="utf-8") == "x = 2\ny = 1\n"
    (line,) = find_faults([mutant], tmp_path)
    assert line == "a: its old text stands 0 times in a.py, it must stand there once"
    twice = Mutant("b", "a.py", " = ", " + ", "for a test", ("gone.py",))
    assert find_faults([twice, twice], tmp_path)[0] == "b: the name is used twice"
    assert "b: its old text stands 2 times in a.py, it must stand there once" in find_faults([twice], tmp_path)
    assert "b: there is no gone.py" in find_faults([twice], tmp_path)
