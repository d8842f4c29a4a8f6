"""The public surface: every name and signature a user may rely on. A change here is a decision, and is written down here."""

import difflib
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import parbank

NAMES = [
    "__version__", "train", "Run", "load", "Model", "pack", "ParallelMuon", "split_parameters", "bank", "orthogonalize",
    "Prefetcher", "ops",
]  # fmt: skip
SURFACE = Path(__file__).with_name("surface.txt")


def test_dir_shows_the_doors_and_nothing_else() -> None:
    assert sorted(dir(parbank)) == sorted(NAMES) == sorted(parbank.__all__)
    for name in NAMES:
        assert getattr(parbank, name) is not None
    assert not hasattr(parbank, "nonsense")


def test_no_submodule_takes_the_place_of_a_door() -> None:
    """`import parbank.train` would replace the function parbank.train, if there were such a module."""
    modules = {module.name for module in pkgutil.iter_modules(parbank.__path__)}
    assert modules & set(NAMES) == {"ops"}
    importlib.import_module("parbank.training.run")
    assert sorted(dir(parbank)) == sorted(NAMES)


def test_importing_parbank_and_its_help_does_not_import_torch() -> None:
    script = (
        "import sys, parbank\n"
        "import parbank.cli.main\n"
        "dir(parbank), parbank.__version__\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
        "assert parbank.ops.rms_norm and parbank.train.__module__ == 'parbank.api.run'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_the_surface_is_as_it_was_decided() -> None:
    expected, found = SURFACE.read_text(encoding="utf-8").splitlines(), describe_surface().splitlines()
    changes = [line for line in difflib.ndiff(expected, found) if line[0] in "+-"]
    assert not changes, "if this is meant, `python -m tests.test_surface` writes it down"


def describe_surface() -> str:
    """One line a name: functions with their arguments, classes with their public methods and fields."""
    lines = []
    for name in sorted(set(NAMES) - {"__version__", "ops"}):
        value = getattr(parbank, name)
        if not inspect.isclass(value):
            lines.append(f"{name}{signature(value)}")
            continue
        lines.append(f"class {name}{signature(value)}")
        lines += [f"    {name}.{line}" for line in describe_members(value)]
    lines += [f"ops.{name}{signature(getattr(parbank.ops, name))}" for name in sorted(parbank.ops.__all__)]
    return "\n".join(lines) + "\n"


def describe_members(cls: type) -> list[str]:
    """What the class itself defines: what it inherits from PyTorch is PyTorch's to change."""
    lines = []
    annotations = {name: str(kind) for name, kind in inspect.get_annotations(cls).items() if not name.startswith("_")}
    for name in sorted({*vars(cls), *annotations}):
        member = inspect.getattr_static(cls, name, None)
        if name.startswith("_"):
            continue
        if isinstance(member, staticmethod | classmethod) or inspect.isfunction(member):
            lines.append(f"{name}{signature(getattr(cls, name))}")
        else:
            lines.append(name)
    return lines


def signature(value: object) -> str:
    """Arguments and defaults. Types are mypy's business, and are written differently by versions of Python."""
    found = inspect.signature(value)  # type: ignore[arg-type]
    bare = [
        p.replace(annotation=inspect.Parameter.empty, default=p.default if plain(p.default) else ...)
        if p.default is not inspect.Parameter.empty
        else p.replace(annotation=inspect.Parameter.empty)
        for p in found.parameters.values()
    ]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def plain(default: object) -> bool:
    """Whether a default reads the same on every machine."""
    return default is None or isinstance(default, str | int | float | tuple | bool)


if __name__ == "__main__":  # python -m tests.test_surface writes the file anew
    SURFACE.write_text(describe_surface(), encoding="utf-8")
