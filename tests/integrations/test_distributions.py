"""The wheel and the source distribution, as a stranger meets them: in an empty environment, outside the tree."""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

from tests.mutants.run import copied_tree

TREE = Path(__file__).parents[2]
ORIGIN = """
def pytest_terminal_summary(terminalreporter):
    import parbank

    terminalreporter.write_line(f"parbank is {parbank.__file__}")
"""
"""A pytest plugin that says which package was tested."""
QUICK = {
    ".": "config files layers runtime statistics surface",
    "api": "api_model",
    "artifact": "container streams versions",
    "benchmarks": "claims levers provenance",
    "cli": "help terminal",
    "data": "batches case shards",
    "docs": "figures pages references",
    "eval": "ngrams registry result",
    "examples": "examples",
    "faults": "odd_files",
    "model": "banks qat",
    "mutants": "mutants",
    "ops": "backend checks",
    "optim": "optim_layout optim_split schedules",
    "plan": "plan_laws plan_texts",
    "quant": "ans integers rotation",
    "report": "listing palette",
    "serve": "player",
    "study": "queue study",
    "training": "budget loggers telemetry",
}
"""Files of each folder of tests that take seconds, without `test_` and `.py`."""


def run(*command: str | Path, cwd: Path, path: tuple[Path, ...] = ()) -> str:
    """What a command prints; its output is the message where it fails. `path` is Python's; the caller's may name the tree."""
    words = [str(word) for word in command]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both; the wheel is built from the source distribution.

    setuptools lays out its files in the tree it builds from, while other tests copy the working tree. So it gets a copy.
    """
    out = tmp_path_factory.mktemp("dist")
    with copied_tree() as tree:
        run(sys.executable, "-m", "build", "--outdir", out, tree, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def source(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution."""
    (path,) = distributions.glob("*.tar.gz")
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    (inner,) = folder.iterdir()
    return inner


@pytest.fixture(scope="module")
def empty(wheel: Path) -> Iterator[Path]:
    """The bin folder of an environment with the wheel and what pip brings along; PyTorch in the version tested here."""
    with tempfile.TemporaryDirectory(prefix="parbank-empty-") as folder:
        venv.create(folder, with_pip=True)
        bin_folder = Path(folder, "bin")
        torch = f"torch=={metadata.version('torch')}"
        run(bin_folder / "python", "-m", "pip", "install", "--quiet", torch, wheel, cwd=Path(folder))
        yield bin_folder


@pytest.fixture(scope="module")
def about(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_index_would_take_them(distributions: Path) -> None:
    files = sorted(distributions.iterdir())
    assert len(files) == 2
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=distributions)


def test_metadata_is_complete(about: Message) -> None:
    for field in ("Summary", "Author", "License-Expression", "License-File", "Keywords", "Requires-Python"):
        assert about[field], field
    assert len(about.get_all("Classifier", [])) > 5
    assert about["Version"] == metadata.version("parbank")


def test_links_of_the_description_lead_somewhere(about: Message) -> None:
    """On a package index there are no files beside the README."""
    description = about.get_payload()
    assert "ParallelMuon" in description
    targets = re.findall(r"\]\(([^)]*)\)", description)
    assert [target for target in targets if not re.match(r"https?://|#", target)] == []


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    tree = TREE / "parbank"
    files = (path for path in tree.rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert set(names) == {path.relative_to(TREE).as_posix() for path in files}


def test_readme_example_runs_from_the_wheel(empty: Path, tmp_path: Path) -> None:
    """Trains, scores and samples in a minute of a CPU's time, in an empty folder."""
    blocks = re.findall(r"```python\n(.*?)```", (TREE / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [block for block in blocks if "parbank.train(" in block]
    assert ".score(" in example
    assert ".sample(" in example
    script = tmp_path / "example.py"
    script.write_text(example)
    before = os.times()
    run(empty / "python", "-I", script, cwd=tmp_path)
    after = os.times()
    spent = after.children_user - before.children_user + after.children_system - before.children_system
    assert spent < 60, f"{spent:.0f} s"


def test_commands_run_from_the_wheel(empty: Path, tmp_path: Path, text_spec: str) -> None:
    assert metadata.version("parbank") in run(empty / "parbank", "--version", cwd=tmp_path)
    given = ("--recipe", "nano", "--data", text_spec, "--steps", "3", "--out", "first")
    run(empty / "parbank", "train", *given, cwd=tmp_path)
    assert "val_bpb" in run(empty / "parbank", "eval", "first", "--json", cwd=tmp_path)
    run(empty / "parbank", "sample", "first", "--tokens", "8", cwd=tmp_path)
    where = run(empty / "python", "-I", "-c", "import parbank; print(parbank.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(empty.parent)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as pip installs it from the wheel, which was built from the source distribution."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, wheel, cwd=folder)
    (folder / "origin.py").write_text(ORIGIN)
    return folder


def run_pytest(tree: Path, installed: Path, package: Path, *arguments: str) -> list[str]:
    """pytest's lines in a tree, whose own package is tested only where `package` says so: neither `-m` nor pyproject.toml
    puts the tree before the installed package."""
    command = (sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-p", "origin", "-o", "pythonpath=")
    path = (package, tree, installed)
    lines = run(*command, *arguments, cwd=tree, path=path).splitlines()
    assert f"parbank is {package / 'parbank' / '__init__.py'}" in lines
    return lines


@pytest.mark.parametrize("selection", [(), ("-m", "integration", "tests/integrations")], ids=["tests", "integrations"])
def test_the_sources_tests_collect(source: Path, installed: Path, selection: tuple[str, ...]) -> None:
    """All that the tree has, by name, with warnings as errors."""
    given, expected = (
        [line for line in run_pytest(*where, "--collect-only", *selection) if "::" in line]
        for where in ((source, installed, installed), (TREE, installed, TREE))
    )
    assert len(expected) > 100
    assert given == expected


def test_the_sources_tests_pass(source: Path, installed: Path) -> None:
    """Some files of every folder, on the installed package."""
    folders = {path.parent.relative_to(TREE / "tests").parts[:1] for path in (TREE / "tests").rglob("test_*.py")}
    assert {Path(folder).parts for folder in QUICK} == folders - {("integrations",)}
    files = [f"tests/{folder}/test_{name}.py" for folder, names in QUICK.items() for name in names.split()]
    lines = run_pytest(source, installed, installed, *files)
    (passed,) = [int(match[1]) for line in lines if (match := re.match(r"(\d+) passed", line))]
    assert passed > 900
