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

TREE = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints; its output is the message where it fails."""
    words = [str(word) for word in command]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which may name the tree
    done = subprocess.run(
        words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both; the wheel is built from the source distribution."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", out, TREE, cwd=out)
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


def test_the_sources_tests_collect_and_pass(source: Path) -> None:
    """All are collected; a few files of several rooms are run."""
    assert run(sys.executable, "-c", "import parbank; print(parbank.__file__)", cwd=source).startswith(str(source))
    pytest_command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
    collected = {line.partition("::")[0] for line in run(*pytest_command, "--collect-only", cwd=source).splitlines()}
    files = {path.relative_to(TREE).as_posix() for path in (TREE / "tests").rglob("test_*.py")}
    assert files - collected == {f"tests/integrations/{path.name}" for path in Path(__file__).parent.glob("test_*.py")}
    chosen = ("test_layers", "test_config", "quant/test_integers", "artifact/test_container", "data/test_shards")
    run(*pytest_command, *(f"tests/{name}.py" for name in chosen), cwd=source)
