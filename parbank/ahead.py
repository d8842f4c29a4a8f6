"""Begins slow work of a start on a GPU in a thread, beside the imports.

Triton looks for a kept kernel by a hash that covers Triton itself, half a gigabyte. Hashing takes about a second, or
three on a slow disk, once in a process. Reading and hashing leave Python's lock to the imports of the main thread.
"""

import importlib
import os
import threading
from contextlib import suppress
from pathlib import Path

_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Devices of the NVIDIA driver, the second under WSL. Asking torch would import it first."""
_threads: list[threading.Thread] = []


def begin(device: str = "auto") -> None:
    """Imports Triton and computes its hash in a thread, if this machine has a GPU and the command may use it."""
    plain = os.environ.get("PARBANK_OPS") == "reference" or os.environ.get("TRITON_INTERPRET")
    if _threads or device == "cpu" or plain or not any(driver.exists() for driver in _DRIVERS):
        return
    _threads.append(threading.Thread(target=_hash_triton, name="parbank-ahead", daemon=True))
    _threads[0].start()


def wait() -> None:
    """Waits for the thread, if there is one. A caller that does not wait computes the hash a second time."""
    for thread in _threads:
        thread.join()


def _hash_triton() -> None:
    with suppress(Exception):  # the import of the kernels meets the same error, and reports it
        from triton.runtime.cache import triton_key

        with suppress(ImportError):  # kernels in Gluon need it, and it takes as long to import as Triton
            importlib.import_module("triton.experimental.gluon.nvidia.hopper")
        triton_key()
