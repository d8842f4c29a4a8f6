"""Compiled code as one file: a real kernel is found again elsewhere, and code for another machine is refused by name."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from parbank.errors import DeviceError, FileError
from parbank.training import portable
from parbank.training.compiled import code_digest
from parbank.training.portable import ABOUT, GRAPHS, describe_machine, export_code, import_code

ROOT = Path(__file__).resolve().parents[2]
KEY = {"GPU": "NVIDIA H200", "torch": "2.11.0", "parbank's ops": "0123456789ab"}

# Compiles a kernel for a GPU that is not here, carries it to another cache, and compiles it again there. Prints whether
# Triton found it, and the cache's entry.
CARRY = """
import os, sys
from pathlib import Path
from triton import compile, knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from parbank.ops.sums import _sum_lines_kernel as kernel
from parbank.training.portable import export_code, import_code

entries = []

def report(*, cache_hit, metadata_group, **about):
    entries.append(Path(next(iter(metadata_group.values()))).parent)
    print("found" if cache_hit else "built", entries[-1])

def build(cache):
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    signature = {"partial": "*fp32", "out": "*fp32", "lines": "i32", "cols": "i32"}
    constants = {"BLOCK_LINES": 256, "BLOCK_COLS": 16}
    signature |= dict.fromkeys(constants, "constexpr")
    built = compile(ASTSource(kernel, signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))
    assert len(built.asm["cubin"]) > 1000

knobs.compilation.listener = report
folder = Path(sys.argv[1])
build(folder / "one")
export_code(folder / "kernels", {"GPU": "H200"}, folder / "one", entries)
(folder / "one").rename(folder / "gone")  # on another machine the old paths lead nowhere
import_code(folder / "kernels", {"GPU": "H200"}, folder / "two")
build(folder / "two")
"""


def write_entry(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    """An entry of Triton's cache, with its list of files."""
    entry = folder / name
    entry.mkdir(parents=True)
    for file, data in files.items():
        (entry / file).write_bytes(data)
    paths = {file: str(entry / file) for file in files}
    (entry / "__grp__kernel.json").write_text(json.dumps({"child_paths": paths}))
    return entry


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """An archive of one kernel and one launcher."""
    cache = tmp_path / "cache"
    entry = write_entry(cache, "AAAA", {"kernel.cubin": b"code", "kernel.json": b"{}"})
    (cache / "BBBB").mkdir()
    (cache / "BBBB" / "launcher.cpython-312.so").write_bytes(b"library")
    write_entry(cache, "CCCC", {"other.cubin": b"another program's", "other.json": b"{}"})
    done = export_code(tmp_path / "kernels", KEY, cache, [entry])
    assert (done.kernels, done.files) == (1, 4)
    return tmp_path / "kernels"


def rewrite(path: Path, change: dict[str, bytes], *, about: dict[str, object] | None = None) -> Path:
    """The archive with other members, and with hashes that fit them."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    described = json.loads(members.pop(ABOUT))
    members |= change
    described["files"] = {name: hashlib.sha256(data).hexdigest() for name, data in members.items()}
    changed = path.with_name("changed")
    with zipfile.ZipFile(changed, "w") as archive:
        archive.writestr(ABOUT, json.dumps(described | (about or {})))
        for name, data in members.items():
            archive.writestr(name, data)
    return changed


def test_a_real_kernel_is_found_where_it_was_imported(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", CARRY, str(tmp_path)]
    environment |= {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    built, found = done.stdout.splitlines()
    entry = Path(built.removeprefix("built ")).name
    assert built == f"built {tmp_path / 'one' / entry}"
    assert found == f"found {tmp_path / 'two' / entry}"
    cubin = Path(entry, "_sum_lines_kernel.cubin")
    assert (tmp_path / "two" / cubin).read_bytes() == (tmp_path / "gone" / cubin).read_bytes()


def test_only_used_kernels_and_libraries_travel(exported: Path, tmp_path: Path) -> None:
    import_code(exported, KEY, tmp_path / "new")
    found = {path.relative_to(tmp_path / "new").as_posix() for path in (tmp_path / "new").rglob("*.*")}
    assert found == {
        "AAAA/kernel.cubin", "AAAA/kernel.json", "AAAA/__grp__kernel.json", "BBBB/launcher.cpython-312.so",
    }  # fmt: skip
    listed = json.loads((tmp_path / "new" / "AAAA" / "__grp__kernel.json").read_text())["child_paths"]
    assert listed["kernel.cubin"] == str(tmp_path / "new" / "AAAA" / "kernel.cubin")
    assert str(tmp_path) not in zipfile.ZipFile(exported).read("triton/AAAA/__grp__kernel.json").decode()


def test_an_export_replaces_only_an_export(exported: Path, tmp_path: Path) -> None:
    portable.check_export(exported)
    portable.check_export(tmp_path / "nothing")
    mine = tmp_path / "mine.zip"
    with zipfile.ZipFile(mine, "w") as archive:
        archive.writestr(ABOUT, "[]")
    for file in (mine, tmp_path):
        with pytest.raises(FileError, match="no export of parbank"):
            portable.check_export(file)
    entry = tmp_path / "cache" / "AAAA"
    with pytest.raises(FileError, match="no export of parbank"):
        export_code(mine, KEY, tmp_path / "cache", [entry])


def test_files_that_exist_stay(exported: Path, tmp_path: Path) -> None:
    mine = tmp_path / "new" / "AAAA" / "kernel.cubin"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    taken = import_code(exported, KEY, tmp_path / "new")
    assert (taken.new, taken.kept) == (3, 1)
    assert mine.read_bytes() == b"mine"
    again = import_code(exported, KEY, tmp_path / "new")
    assert (again.new, again.kept) == (0, 4)


@pytest.mark.parametrize("name", list(KEY))
def test_another_machine_is_refused_by_name(exported: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(DeviceError, match=f"{name}: {KEY[name]} there, another here"):
        import_code(exported, KEY | {name: "another"}, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_key_that_only_one_side_has_is_a_difference(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"CUDA: none there, 13\.0 here"):
        import_code(exported, KEY | {"CUDA": "13.0"}, tmp_path / "new")
    with pytest.raises(DeviceError, match=r"torch: 2\.11\.0 there, none here"):
        import_code(exported, {name: KEY[name] for name in KEY if name != "torch"}, tmp_path / "new")


@pytest.mark.parametrize(
    "name",
    ["triton/../../evil.so", "/evil.so", "triton/AAAA/../evil.so", "triton/AAAA/.evil", "triton/AAAA", "x/y/z.so"],
)
def test_no_file_leaves_the_folder(exported: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(FileError, match="no file of a compile cache"):
        import_code(rewrite(exported, {name: b"evil"}), KEY, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("child", ["../../evil", "..", "/etc/passwd", ""])
def test_a_list_that_leads_elsewhere_is_refused(exported: Path, tmp_path: Path, child: str) -> None:
    lists = {"triton/AAAA/__grp__kernel.json": json.dumps({"child_paths": {"kernel.cubin": child}}).encode()}
    with pytest.raises(FileError, match="list of a kernel's files"):
        import_code(rewrite(exported, lists), KEY, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_damage_is_found(exported: Path, tmp_path: Path) -> None:
    """Every cut, and a byte changed anywhere: refused, or without effect on any member."""
    whole = exported.read_bytes()
    good = portable.read_archive(exported, KEY)
    for size in range(0, len(whole), 7):
        exported.write_bytes(whole[:size])
        with pytest.raises(FileError):
            portable.read_archive(exported, KEY)
    for place in range(0, len(whole), 5):
        exported.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with suppress(FileError, DeviceError):
            assert portable.read_archive(exported, KEY) == good
    with pytest.raises(FileError, match="cannot read"):
        import_code(tmp_path / "missing", KEY, tmp_path / "new")


def test_a_changed_member_is_damage(exported: Path, tmp_path: Path) -> None:
    files = json.loads(zipfile.ZipFile(exported).read(ABOUT))["files"]
    changed = rewrite(exported, {"triton/AAAA/kernel.cubin": b"other"}, about={"files": files})
    with pytest.raises(FileError, match="differs from its sha256"):
        import_code(changed, KEY, tmp_path / "new")


def test_other_archives_and_formats_are_refused(exported: Path, tmp_path: Path) -> None:
    for about, said in (({"format": 2}, "format 2"), ({"made_by": "x"}, "not an archive"), ({"key": 3}, "format 1")):
        with pytest.raises(FileError, match=said):
            import_code(rewrite(exported, {}, about=about), KEY, tmp_path / "new")


def test_a_huge_archive_is_refused_unread(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "_MOST_BYTES", 100)
    with pytest.raises(FileError, match="more than 100 bytes"):
        import_code(exported, KEY, tmp_path / "new")


def test_graphs_of_pytorch_go_to_pytorch(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", loaded.append)
    taken = import_code(rewrite(exported, {GRAPHS: b"graphs"}), KEY, tmp_path / "new")
    assert taken.graphs
    assert loaded == [b"graphs"]


def test_nothing_compiled_is_nothing_to_export(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    with pytest.raises(FileError, match="nothing to export"):
        export_code(tmp_path / "kernels", KEY, tmp_path / "cache", [])
    assert not (tmp_path / "kernels").exists()


def test_the_key_holds_what_code_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class H200:
        name, major, minor = "NVIDIA H200", 9, 0

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    key = describe_machine(torch.device("cuda", 0))
    assert key["GPU"] == "NVIDIA H200"
    assert key["compute capability"] == "9.0"
    assert key["torch"] == torch.__version__
    assert key["parbank's ops"] == code_digest()
    assert {"CUDA", "Triton", "Python", "system"} <= key.keys()
    assert all(isinstance(value, str) and value for value in key.values())
    with pytest.raises(DeviceError, match="belongs to a CUDA GPU"):
        describe_machine(torch.device("cpu"))
