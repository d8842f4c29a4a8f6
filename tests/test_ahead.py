"""The GPU is opened and Triton's hash begins beside the imports, and only where a GPU may be used."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parbank import ahead


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Instead of a hash, a note. The driver's device is a file of this test."""
    found: list[str] = []
    (tmp_path / "driver").touch()
    monkeypatch.setattr(ahead, "_DRIVERS", (tmp_path / "driver",))
    monkeypatch.setattr(ahead, "_hash_triton", lambda: found.append("hashed"))
    monkeypatch.setattr(ahead, "_open_gpu", lambda index: found.append(f"GPU {index}"))
    monkeypatch.setattr(ahead, "_threads", [])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("PARBANK_OPS", raising=False)
    yield found
    ahead.wait()


def test_the_hash_is_computed_once(hashed: list[str]) -> None:
    ahead.begin()
    ahead.begin("cuda")
    ahead.wait()
    assert sorted(hashed) == ["GPU 0", "hashed"]


def test_nothing_is_hashed_where_nothing_needs_it(hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ahead.begin("cpu")
    monkeypatch.setattr(ahead, "_DRIVERS", ())
    ahead.begin()
    ahead.wait()
    assert hashed == []


def test_without_our_kernels_the_gpu_alone_is_opened(hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARBANK_OPS", "reference")
    ahead.begin("cuda:3")
    ahead.wait()
    assert hashed == ["GPU 3"]


@pytest.mark.parametrize(("device", "index"), [("cuda:2", 2), ("cuda", 0), ("auto", 0), ("cuda:x", 0)])
@pytest.mark.parametrize("world", [1, 8])
def test_the_gpu_is_the_one_that_the_run_takes(
    device: str, index: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `parbank.runtime.start` has it. A context on another GPU would take half a gigabyte there."""
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert ahead._index_of(device) == (index if world == 1 else 5)


def test_a_missing_driver_is_reported_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ahead.ctypes, "CDLL", missing)
    ahead._open_gpu(0)


@pytest.mark.gpu
def test_pytorch_takes_the_context_that_was_opened() -> None:
    """In a process of its own: the memory that PyTorch takes lies in the context that is current without it."""
    code = (
        "import ctypes\nfrom parbank import ahead\nahead._open_gpu(0)\n"
        "driver, before, after = ctypes.CDLL('libcuda.so.1'), ctypes.c_void_p(), ctypes.c_void_p()\n"
        "driver.cuDevicePrimaryCtxRetain(ctypes.byref(before), 0)\n"
        "import torch\nassert torch.ones(3, device='cuda').sum().item() == 3\n"
        "driver.cuCtxGetCurrent(ctypes.byref(after))\nassert before.value == after.value, (before, after)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_hash_is_tritons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton keeps it: kernels then find it computed."""
    cache = pytest.importorskip("triton.runtime.cache")
    calls: list[str] = []
    monkeypatch.setattr(cache, "triton_key", lambda: calls.append("key"))
    ahead._hash_triton()
    assert calls == ["key"]


def test_a_broken_triton_is_reported_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    monkeypatch.delattr(cache, "triton_key")
    ahead._hash_triton()
