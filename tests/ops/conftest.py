"""Every test of this folder runs the kernels: on the GPU, or where there is none through Triton's interpreter.

Triton reads TRITON_INTERPRET when a kernel is decorated, so tests/conftest.py sets it before any module of parbank is imported.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import flash_stand_in
import pytest
import torch

from parbank.ops import backend, configs, cublaslt, flash, product

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter's bfloat16 product is silently wrong, so bfloat16 is for the GPU only.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])

# Another card that reads the sm80 table: `tests/integrations/test_other_cards.py` compiles that table for it.
if CARD := os.environ.get("PARBANK_TEST_CARD"):
    configs.ARCHITECTURES = {"sm80": int(CARD)}
    configs.SHARED_LIMIT[f"sm{CARD}"] = configs.SHARED_LIMIT["sm80"]


@pytest.fixture
def device() -> torch.device:
    """Where kernels run in this session: the GPU, or the CPU through the interpreter."""
    return DEVICE


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Every dtype the kernels can be run in here."""
    return request.param


@pytest.fixture(autouse=True)
def _kernels_on() -> Iterator[None]:
    """A fixed seed, and the kernels by name: a call that cannot run them is an error, not a silent reference."""
    torch.manual_seed(0)
    with backend.use_backend("triton"):
        yield


@pytest.fixture
def poison() -> Iterator[None]:
    """Fills every `torch.empty` with NaN, so that an output a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """cuBLASLt on the CPU, as far as parbank calls it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    built = tmp_path_factory.mktemp("cublaslt") / "stand_in.so"
    source = Path(__file__).with_name("cublaslt_stand_in.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", built, source], check=True)
    return cublaslt.declare(ctypes.CDLL(str(built)))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No product has been met yet, and nothing said."""
    monkeypatch.setattr(product, "_plans", {})
    product._say_once.cache_clear()


@pytest.fixture(scope="session")
def library() -> Iterator[None]:
    """`torch.ops.flash_attn_3`: the real one where it is installed, else its definition for the CPU."""
    if flash.AVAILABLE:
        yield
        return
    defined = torch.library.Library("flash_attn_3", "DEF")
    defined.define(flash_stand_in.FORWARD + " -> (Tensor, Tensor, Tensor, Tensor)")
    defined.define(flash_stand_in.BACKWARD + " -> (Tensor, Tensor, Tensor)")
    defined.impl("fwd", flash_stand_in.forward, "CPU")
    defined.impl("bwd", flash_stand_in.backward, "CPU")
    yield
    defined._destroy()


@pytest.fixture
def installed(library, device, monkeypatch) -> torch.device:
    if device.type == "cuda" and not flash.AVAILABLE:
        pytest.skip("needs FlashAttention 3 and a Hopper GPU, or no GPU at all")
    monkeypatch.setattr(flash, "AVAILABLE", True)
    return device
