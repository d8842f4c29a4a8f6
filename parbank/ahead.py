"""Begins slow work of a start on a GPU in threads, beside the imports.

Triton looks for a kept kernel by a hash that covers Triton itself, half a gigabyte. Hashing takes about a second, or
three on a slow disk, once in a process. Reading and hashing leave Python's lock to the imports of the main thread.

The driver opens a GPU for a process in a second or more. PyTorch would ask for it after its import, and wait.
"""

import ctypes
import importlib
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Devices of the NVIDIA driver, the second under WSL. Asking torch would import it first."""
_threads: list[threading.Thread] = []


def begin(device: str = "auto") -> None:
    """Opens the GPU, imports Triton and computes its hash, each in a thread, if this machine has a GPU and the command may use
    it."""
    plain = os.environ.get("PARBANK_OPS") == "reference" or os.environ.get("TRITON_INTERPRET")
    if _threads or device == "cpu" or not any(driver.exists() for driver in _DRIVERS):
        return
    works: list[Callable[[], None]] = [partial(_open_gpu, _index_of(device)), *([] if plain else [_hash_triton])]
    _threads.extend(threading.Thread(target=work, name="parbank-ahead", daemon=True) for work in works)
    for thread in _threads:
        thread.start()


def wait() -> None:
    """Waits for the threads, if there are any. A caller that does not wait computes the hash a second time."""
    for thread in _threads:
        thread.join()


def _index_of(device: str) -> int:
    """The GPU that `parbank.runtime.start` takes: of several ranks each has its own, whatever the device says."""
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    index = device.partition(":")[2] if alone else os.environ.get("LOCAL_RANK", "0")
    return int(index) if index.isdecimal() else 0


def _open_gpu(index: int) -> None:
    """Opens the context that PyTorch takes too, the primary one. An error here is met again, and reported, by PyTorch."""
    with suppress(Exception):
        driver = ctypes.CDLL("libcuda.so.1")
        gpu, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(gpu), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)  # until the process ends


def _hash_triton() -> None:
    with suppress(Exception):  # the import of the kernels meets the same error, and reports it
        from triton.runtime.cache import triton_key

        with suppress(ImportError):  # kernels in Gluon need it, and it takes as long to import as Triton
            importlib.import_module("triton.experimental.gluon.nvidia.hopper")
        triton_key()
