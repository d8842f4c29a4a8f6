"""The code that a recipe counts beside its artifact: the source of training and scoring, as one file that runs.

The archive holds every module that the roots import, without comments and docstrings, so that documentation costs no
bytes. Compressed together with bzip2 they take less than with lzma, and far less than one by one in a zip file.

    python -m parbank.artifact.code parbank.pyz
    python parbank.pyz train recipe=golf out=runs/golf
    python parbank.pyz train config=runs/planned out=runs/again
    python parbank.pyz score model=runs/golf/model.pbk method=sliding
"""

import ast
import functools
import hashlib
import io
import json
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import resolve_name
from pathlib import Path

import parbank
from parbank.errors import FileError
from parbank.files import default_cache, write_file, write_json

ROOTS = ("parbank.program",)
"""The modules from which imports are followed: training and scoring."""

LEFT_OUT = {
    "parbank.api": "the public Python API for other programs; parbank.program takes its place",
}
"""Imported modules and packages that training and scoring do not need, each with the reason. No import reaches the
commands."""

SOURCE = "source.json"  # {path: text of the module}

# Python runs a zip file that holds __main__.py. Triton and the compile cache read modules as files, so files they become.
LAUNCHER = f"""\
import json, runpy, sys, tempfile, zipfile
from pathlib import Path
with zipfile.ZipFile(sys.path[0]) as archive:
    sources = json.loads(archive.read("{SOURCE}"))
with tempfile.TemporaryDirectory(prefix="parbank-") as folder:
    for name, source in sources.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    sys.path[0] = folder
    runpy.run_module("{ROOTS[0]}", run_name="__main__")
"""


@functools.cache
def code_bytes() -> int:
    """The size of the archive. Packing takes a second, so the size is kept in the cache with a hash of the source."""
    kept, source = default_cache() / "code-bytes.json", _hash_source()
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(kept.read_text(encoding="utf-8"))
        if found["source"] == source:
            return int(found["bytes"])
    size = len(pack_code())
    with suppress(OSError, FileError):  # a cache that cannot be written costs a second the next time
        write_json(kept, {"source": source, "bytes": size})
    return size


def _hash_source() -> str:
    """The hash of everything that the archive depends on: the package's source, and the Python that packs it."""
    digest, home = hashlib.sha256(sys.version.encode()), Path(parbank.__file__).parent
    for path in sorted(home.rglob("*.py")):
        digest.update(f"\0{path.relative_to(home)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def pack_code() -> bytes:
    """The archive: the same bytes wherever the same Python packs the same source, also from inside the archive."""
    sources = json.dumps({name: ast.unparse(tree) for name, tree in collect().items()})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py"), LAUNCHER, zipfile.ZIP_DEFLATED, 9)
        archive.writestr(zipfile.ZipInfo(SOURCE), sources, zipfile.ZIP_BZIP2, 9)
    return buffer.getvalue()


def collect() -> dict[str, ast.Module]:
    """Path below the package's folder and stripped source of every counted module, in the order of their paths."""
    home = Path(parbank.__file__).parents[1]
    found: dict[str, ast.Module] = {}
    waiting, seen = [*ROOTS], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        path = _find(home, name)
        if path is None or is_left_out(name) or (key := path.relative_to(home).as_posix()) in found:
            continue
        found[key] = strip(path.read_text(encoding="utf-8"))
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        waiting += [package, name.rpartition(".")[0], *find_imports(found[key], package)]
    return dict(sorted(found.items()))


def is_left_out(name: str) -> bool:
    """Whether the module, or a package it is in, is on the list."""
    return any(name == other or name.startswith(f"{other}.") for other in LEFT_OUT)


def find_imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Names of all modules that the source imports, wherever the import stands. Also the names of imported attributes, since
    the source does not tell them from modules, and strings: a table of modules to import on demand holds strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("parbank."):
            yield node.value


def _find(home: Path, name: str) -> Path | None:
    """The file of a module of parbank; None for any other name."""
    parts = name.split(".")
    if parts[0] != parbank.__name__ or not all(part.isidentifier() for part in parts):
        return None
    path = home.joinpath(*parts)
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


def strip(source: str) -> ast.Module:
    """The module without comments, docstrings, and what only a type checker reads: some imports, and annotations of
    functions. Decorated functions keep theirs: PyTorch's custom operators and Triton's kernels read them."""
    tree = ast.parse(source)
    _strip_blocks(tree)
    return tree


def _strip_blocks(node: ast.AST) -> None:
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        block = getattr(node, field, [])
        kept = [child for statement in block for child in _strip_statement(statement)]
        if block and not kept and field == "body" and not isinstance(node, ast.Module):
            kept = [ast.Pass()]
        block[:] = kept
        for child in kept:
            _strip_blocks(child)


def _strip_statement(node: ast.stmt) -> list[ast.stmt]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return []  # a string that stands alone documents what is above or below it
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return [kept for child in node.orelse for kept in _strip_statement(child)]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list:
        node.returns = None
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
    return [node]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m parbank.artifact.code FILE, e.g. parbank.pyz")
    print(f"{sys.argv[1]}: {write_file(sys.argv[1], pack_code()):,} bytes")
