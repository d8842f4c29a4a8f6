"""The code that counts towards a cap: what is in the archive, what is not, and that it runs with nothing else."""

import ast
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parbank import program
from parbank.artifact import code
from parbank.artifact.code import code_bytes, collect, find_imports, is_left_out, strip
from parbank.config import override, to_dict
from parbank.errors import ConfigError
from parbank.ops.backend import use_backend
from parbank.recipes import get_recipe
from parbank.runtime import Runtime, pick_device

# Runs the archive in a process where nothing else offers parbank. The archive's own folder goes when it is done, so a module
# whose file is still there came from elsewhere.
BARE = """
import importlib.util, os, runpy, sys
sys.argv.pop(0)
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
sys.path[:] = [path for path in sys.path if not os.path.exists(os.path.join(path, "parbank"))]
assert importlib.util.find_spec("parbank") is None, "another parbank is on the path"
runpy.run_path(sys.argv[0], run_name="__main__")
ours = {name: module.__file__ for name, module in sys.modules.items() if name.split(".")[0] == "parbank"}
assert "parbank.training.run" in ours
assert not [name for name, file in ours.items() if os.path.exists(file)]
"""


def run_bare(archive: Path, *words: str, **env: str) -> dict[str, Any]:
    command = [sys.executable, "-I", "-c", BARE, str(archive), *words]
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("code") / "parbank.pyz"
    written = subprocess.check_output([sys.executable, "-m", "parbank.artifact.code", str(path)], text=True)
    assert f"{path.stat().st_size:,} bytes" in written
    return path


@pytest.fixture(scope="module")
def counted() -> dict[str, ast.Module]:
    return collect()


def test_the_archive_trains_and_scores_alone(archive: Path, tmp_path: Path, text_spec: str) -> None:
    """In a bare process, with the scores of the package to the last bit: by plain PyTorch and by Triton's kernels."""
    out, short = tmp_path / "run", tmp_path / "short.txt"
    short.write_text("It was the best of times, it was the worst of times, it was the age of wisdom.\n" * 4)
    settings = ("budget.steps=3", "budget.count_code=true", "budget.max_bytes=500000")
    planned = tmp_path / "config.json"  # a plan is no recipe: its config alone says what it was
    planned.write_text(json.dumps(to_dict(override(get_recipe("nano"), "recipe=auto", "batch.batch_tokens=512"))))
    summary = run_bare(archive, "train", f"config={planned}", f"out={out}", f"data={text_spec}", *settings)
    assert (summary["recipe"], summary["steps"], summary["tokens"]) == ("auto", 3, 3 * 512)
    assert summary["code_bytes"] == archive.stat().st_size  # the archive, packed from inside itself, is the same again
    assert summary["artifact_bytes"] == (out / "model.pbk").stat().st_size

    here, artifact = Runtime(device=pick_device("cpu")), str(out / "model.pbk")
    assert program.score(here, artifact, text_spec)["val_bpb"] == summary["val_bpb"]
    given = {"model": artifact, "data": f"text:val={short}", "method": "streaming"}
    words = [f"{name}={value}" for name, value in given.items()]
    scored = run_bare(archive, "score", *words, TRITON_INTERPRET="1", PARBANK_OPS="triton")
    with use_backend("triton"):
        assert program.score(here, **given) == scored


def test_the_archive_trains_a_recipe_or_the_config_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(program, "run", lambda config, place, out: SimpleNamespace(summary=to_dict(config)))
    here, asked = (
        Runtime(device=pick_device("cpu")),
        to_dict(override(get_recipe("nano"), "batch.batch_tokens=512", "seed=7")),
    )
    (tmp_path / "config.json").write_text(json.dumps(asked))
    assert program.train(here, out="x", recipe="nano", **{"batch.batch_tokens": "512", "seed": "7"}) == asked
    for given in (tmp_path, tmp_path / "config.json"):
        assert program.train(here, out="x", config=str(given)) == asked
        assert program.train(here, out="x", config=str(given), seed="8") == {**asked, "seed": 8}
    for wrong in ({}, {"recipe": "nano", "config": str(tmp_path)}):
        with pytest.raises(ConfigError, match="recipe=NAME, or config=PATH"):
            program.train(here, out="x", **wrong)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "config=missing"], "missing a required argument: 'out'"),
        (["score", "model=missing.pbk"], "missing.pbk does not exist"),
        (["score", "missing.pbk"], "usage: train recipe=NAME"),
    ],
)
def test_a_mistake_in_the_archive_s_words_ends_in_one_message(words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        program.main(words)


def test_documentation_costs_nothing() -> None:
    documented = '''"""A module."""  # and a comment
from typing import TYPE_CHECKING, Any
if TYPE_CHECKING:
    from parbank.cli import main
class A:
    """A class."""
    x: int = 1
    """A field."""
    def f(self):
        """A method with nothing else."""
def g(y: Any, *z: int, k: str = "k") -> str:  # another
    """A function."""
    return "# no comment"
@kernel
def h(y: Any) -> str:
    return y
'''
    bare = """
from typing import TYPE_CHECKING, Any
class A:
    x: int = 1
    def f(self):
        pass
def g(y, *z, k="k"):
    return "# no comment"
@kernel
def h(y: Any) -> str:
    return y
"""
    assert ast.unparse(strip(documented)) == ast.unparse(ast.parse(bare))


def test_stripped_source_means_the_same(counted: dict[str, ast.Module]) -> None:
    """Writing a tree out and reading it again gives the tree: no f-string and no operator is lost on the way. Nothing is
    left to strip: the archive packs itself to the same bytes."""
    for name, tree in counted.items():
        assert ast.dump(strip(ast.unparse(tree))) == ast.dump(tree), name


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_of(path: str, tree: ast.Module) -> set[str]:
    package = module_name(path) if path.endswith("__init__.py") else module_name(path).rpartition(".")[0]
    return {*find_imports(tree, package)}


def test_what_is_left_out_is_not_imported_at_once(counted: dict[str, ast.Module]) -> None:
    """A module may only import a left-out one inside a function, or the archive would not start."""
    for path, tree in counted.items():
        functions = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
        at_once = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) and id(n) not in functions]
        wrong = {name for name in imports_of(path, ast.Module(at_once, [])) if is_left_out(name)}
        assert not wrong, f"{path} imports {wrong}, which {code.__name__}.LEFT_OUT leaves out"


def test_the_list_of_what_is_left_out_has_no_idle_line(counted: dict[str, ast.Module]) -> None:
    others = {path: tree for path, tree in counted.items() if module_name(path) != code.__name__}
    reached = set().union(*(imports_of(path, tree) for path, tree in others.items()))
    idle = [name for name in code.LEFT_OUT if not any(f"{other}.".startswith(f"{name}.") for other in reached)]
    assert not idle


def test_the_walk_follows_every_kind_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "__init__": "TABLE = {'later': 'parbank.later'}",
        "program": "import parbank.one\nfrom parbank.room import thing\ndef f():\n    from parbank import api, lazy",
        "one": "import numpy\nfrom . import two",
        "two": "from .room.deep import name",
        "room/__init__": "from parbank.room import registered",
        **dict.fromkeys(["later", "lazy", "room/thing", "room/deep", "room/registered", "room/unused", "api"], ""),
    }
    for name, text in files.items():
        path = tmp_path / "parbank" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr("parbank.__file__", str(tmp_path / "parbank" / "__init__.py"))
    assert {*collect()} == {f"parbank/{name}.py" for name in files} - {"parbank/api.py", "parbank/room/unused.py"}


def test_commands_are_not_counted(counted: dict[str, ast.Module]) -> None:
    names = set(map(module_name, counted))
    assert {"parbank.training.run", "parbank.eval.methods", "parbank.ops.mlp_hopper", "parbank.recipes"} < names
    assert not [name for name in names if name.startswith("parbank.cli")]


def test_size_is_that_of_the_file(archive: Path) -> None:
    assert code_bytes() == archive.stat().st_size
    package = Path(code.__file__).parents[1]
    everything = b"".join(path.read_bytes() for path in package.rglob("*.py"))
    assert code_bytes() < 0.7 * len(lzma.compress(everything, preset=9))


def test_the_size_is_kept_for_this_source_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packed: list[int] = []

    def pack() -> bytes:
        packed.append(len(packed))
        return bytes(1000 + len(packed))

    monkeypatch.setenv("PARBANK_CACHE", str(tmp_path))
    monkeypatch.setattr(code, "pack_code", pack)
    count = code_bytes.__wrapped__
    monkeypatch.setattr(code, "_hash_source", lambda: "one")
    assert [count(), count()] == [1001, 1001]
    monkeypatch.setattr(code, "_hash_source", lambda: "other")
    assert count() == 1002, "another source is packed again"
    (tmp_path / "code-bytes.json").write_text('{"source": "other", "bytes": null}')
    assert count() == 1003, "and so it is after damage"
    (tmp_path / "code-bytes.json").unlink()
    (tmp_path / "code-bytes.json").mkdir()
    assert count() == 1004, "a cache that cannot be written is no obstacle"


def test_the_hash_sees_every_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("__init__.py", "inner/a.py"):
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(code.parbank, "__file__", str(tmp_path / "__init__.py"))
    before = code._hash_source()
    (tmp_path / "inner" / "a.py").write_text("x = 2\n")
    changed = code._hash_source()
    (tmp_path / "inner" / "a.py").rename(tmp_path / "inner" / "b.py")
    assert len({before, changed, code._hash_source()}) == 3
