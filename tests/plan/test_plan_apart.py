"""The kernels of a probe are compiled in processes, which may fail and say so, and which never outlive the plan."""

import time
from pathlib import Path

import pytest
import torch

from parbank.plan import apart
from parbank.plan.apart import compile_probe
from parbank.runtime import Runtime

CPU, CUDA = (Runtime(device=torch.device(name)) for name in ("cpu", "cuda:0"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU that was not probed, as far as this module asks."""
    monkeypatch.setattr(apart, "can_rehearse", lambda: True)
    monkeypatch.setattr(apart, "count_cores", lambda: 16)
    monkeypatch.setattr(apart, "is_known", lambda place: False)


def test_every_shape_has_a_process(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"open({str(tmp_path)!r} + '/{{shape}}', 'w').write('{{device}} {{threads}}')"
    monkeypatch.setattr(apart, "_CODE", code)
    with compile_probe(CUDA, pytest.fail) as wait:
        wait()
        found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {str(shape): "cuda:0 5" for shape in range(3)}


def test_slow_and_failing_processes_are_not_waited_for(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_CODE", "import time; exit(1) if {shape} else time.sleep(600)")
    monkeypatch.setattr(apart, "PATIENCE", 0.1)
    started: list[list[apart._Child]] = []
    real = apart._start

    def start(place: Runtime, children: list[apart._Child], faults: dict[int, str]) -> None:
        started.append(children)
        real(place, children, faults)

    monkeypatch.setattr(apart, "_start", start)
    began, said = time.monotonic(), []
    with compile_probe(CUDA, said.append) as wait:
        wait()
    assert time.monotonic() - began < 300
    (children,) = started
    assert len(children) == 3
    assert all(child.process.poll() is not None for child in children)
    (line,) = said
    assert "not done after 0.1 s" in line


def test_a_fault_of_a_process_is_said_in_one_line(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which part failed, the last line of its error, and what happens instead."""
    monkeypatch.setattr(apart, "_CODE", "if {shape} == 1:\n    print('on', 'it')\n    raise ValueError('no such card')")
    said: list[str] = []
    with compile_probe(CUDA, said.append) as wait:
        wait()
    assert said == [
        "note: 1 of 3 processes that compile the probe's kernels failed (shape 2: ValueError: no such card); the probe "
        "compiles these kernels itself, so the start takes longer"
    ]


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("exit(3)", "ended with status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended by signal 9"),
        ("import os; os.write(2, b'\\xff' + b'x' * 1000000 + b'\\n\\n'); exit(1)", "\ufffd" + "x" * 199),
    ],
)
def test_a_process_that_says_little_or_too_much(
    gpu: None, monkeypatch: pytest.MonkeyPatch, code: str, fault: str
) -> None:
    monkeypatch.setattr(apart, "_CODE", code)
    said: list[str] = []
    with compile_probe(CUDA, said.append) as wait:
        wait()
    (line,) = said
    assert f"3 of 3 processes that compile the probe's kernels failed (shape 1: {fault});" in line


def test_a_process_that_does_not_start_costs_time_only(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart.sys, "executable", "/no/such/python")
    said: list[str] = []
    with compile_probe(CUDA, said.append) as wait:
        wait()
    (line,) = said
    assert "3 of 3 processes" in line
    assert "(shape 1: cannot be started: No such file or directory)" in line


def test_files_of_the_current_folder_are_no_modules(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "colorsys.py").write_text("open('imported', 'w')")
    monkeypatch.setattr(apart, "_CODE", "import colorsys; open('ran{shape}', 'w')")
    with compile_probe(CUDA) as wait:
        wait()
    assert (tmp_path / "ran0").exists()
    assert not (tmp_path / "imported").exists()


def test_nothing_starts_without_need(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_start", lambda *given: pytest.fail("a process was started"))
    with compile_probe(CPU) as wait:
        wait()
    monkeypatch.setattr(apart, "is_known", lambda place: True)
    with compile_probe(CUDA) as wait:
        wait()


def test_the_code_names_functions_that_exist() -> None:
    from parbank import ahead
    from parbank.plan.probe import rehearse_shape

    assert callable(ahead.begin)
    assert rehearse_shape.__name__ in apart._CODE
    code = apart._CODE.format(shape=0, device="cuda:3", threads=2)
    compile(code, "child", "exec")
    assert "ahead.begin('cuda:3')" in code, "the first GPU may be another's"
