"""Worker processes of one machine: started, replaced if they die at work, and ended with the process that started them.

A worker keeps imports, data and compiled kernels from job to job. It is a process of its own even where there is only one:
a job that kills its process, or leaves its GPU unusable, must not end the study.

Each worker reads from a pipe whose other end only this process has. When this process ends, in whatever way, the system
closes the pipe, and the worker ends itself.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import torch

from parbank.cores import count_cores
from parbank.errors import TrainingError
from parbank.runtime import pick_device
from parbank.study.queue import Queue
from parbank.study.worker import DEVICE_LOST, GRACE


class Crew:
    """`with Crew(folder, 2, "auto") as crew: while crew.attend(): time.sleep(0.5)`."""

    def __init__(self, folder: Path, workers: int, device: str, *, shown: bool = False, stay: bool = False) -> None:
        """shown: the worker, a single one, prints progress here; others write to FOLDER/workers. stay: workers wait for jobs
        that are added, until the block ends."""
        assert workers == 1 or not shown, "lines of several workers would mix"
        self._folder, self._workers, self._device = folder, workers, device
        self._shown, self._stay = shown, stay
        self._queue = Queue(folder)
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Crew":
        self._queue.make_folders()
        (self._folder / "workers").mkdir(exist_ok=True)
        for number in range(self._workers):
            self._start(number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._running.values():
            _close_pipe(process)
        for process in self._running.values():
            try:
                process.wait(2 * GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def attend(self) -> bool:
        """Replaces workers that died at work; the death counts as an error of the job. Returns whether any worker is left."""
        for number, process in list(self._running.items()):
            if process.poll() is None:
                continue
            del self._running[number]
            _close_pipe(process)
            if process.returncode == 0:
                continue
            how = f"worker {number} {describe_end(process.returncode)}"
            held = self._queue.fail_worker(process.pid, f"{how}{self._point_to_log(number)}")
            if held or process.returncode == DEVICE_LOST:
                self._start(number)
            elif not self._running:  # it died between jobs, or before the first, and nobody is left to go on
                raise TrainingError(f"{how}: {self._last_words(number)}")
        return bool(self._running)

    def _start(self, number: int) -> None:
        gpus = count_gpus(self._device)
        chosen = f"cuda:{number % gpus}" if gpus > 1 else self._device
        # with this process's path: a folder named parbank where the command was given must not become the worker's code
        code = f"import sys; sys.path[:] = {sys.path!r}; from parbank.study.worker import main; main()"
        command = [sys.executable, "-c", code, str(self._folder), "--device", chosen]
        command += ["--progress"] * self._shown + ["--stay"] * self._stay
        env = dict(os.environ)
        if self._workers > gpus:  # they share a device: more threads than cores would wait for each other
            share, given = max(1, count_cores() // self._workers), env.get("OMP_NUM_THREADS", "")
            env["OMP_NUM_THREADS"] = str(min(share, int(given)) if given.isdecimal() and int(given) else share)
        with open(self._log(number), "ab") as log:
            out = None if self._shown else log
            self._running[number] = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=out, stderr=out)

    def _log(self, number: int) -> Path:
        return self._folder / "workers" / f"{number}.log"

    def _point_to_log(self, number: int) -> str:
        return "" if self._shown else f"; see {self._log(number)}"

    def _last_words(self, number: int) -> str:
        if self._shown:
            return "its message is above"
        lines = self._log(number).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it left no message"


def _close_pipe(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def describe_end(code: int) -> str:
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"was ended by {names.get(-code, f'signal {-code}')}"
    return f"ended with code {code}"


def count_gpus(device: str) -> int:
    """The GPUs that `device` leaves open; 1 on a CPU."""
    chosen = pick_device(device)
    return torch.cuda.device_count() if chosen.type == "cuda" and chosen.index is None else 1
