"""The memory of a run on a CPU: estimated before it starts, refused where it surely does not fit, and never elsewhere."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import parbank
from parbank.config import override
from parbank.display import Display
from parbank.errors import ConfigError
from parbank.recipes import demo, sprint
from parbank.runtime import Runtime
from parbank.training import checks
from parbank.training.checks import check_memory
from parbank.training.config import RunConfig
from parbank.training.memory import activation_bytes, free_host_memory, free_memory

PLACE = Runtime(device=torch.device("cpu"))


def check(
    config: RunConfig, free: float, monkeypatch: pytest.MonkeyPatch, compiler: str | None = None, place: Runtime = PLACE
) -> list[str]:
    """What is said of a run where so many bytes are free."""
    monkeypatch.setattr(checks, "free_memory", lambda place: free)
    monkeypatch.setattr(checks, "find_compiler", lambda: compiler)
    display = Display(enabled=False)
    said: list[str] = []
    monkeypatch.setattr(display, "say", said.append)
    check_memory(config, place, display)
    return said


def test_a_pass_that_cannot_fit_is_refused_with_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"a pass of 98,304 tokens takes about 7\d(\.\d)? GB .* and 22 GB are free"
    ) as found:
        check(sprint(), 22e9, monkeypatch)
    setting = str(found.value).partition("--set ")[2].partition(",")[0]
    assert setting == "batch.micro_batch_tokens=16384"
    smaller = override(sprint(), setting)
    assert check(smaller, 22e9, monkeypatch) == []
    assert smaller.batch.micro_sequences(1) * 2048 == 16_384, "the pass that is named is the pass that runs"
    with pytest.raises(ConfigError, match=r"a smaller model or a smaller --set batch\.sequence_length"):
        check(sprint(), 1e9, monkeypatch)


def test_a_run_that_may_fit_is_warned_of_and_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled passes take 0.37 to 0.62 of the memory, and the estimate may be too high by a fifth."""
    (line,) = check(sprint(), 30e9, monkeypatch, compiler="g++")
    assert line.startswith("warning: a pass of 98,304 tokens takes about 7")
    assert "--set batch.micro_batch_tokens=32768" in line
    with pytest.raises(ConfigError):
        check(override(sprint(), "train.compile=false"), 30e9, monkeypatch, compiler="g++")
    with pytest.raises(ConfigError):
        check(sprint(), 30e9, monkeypatch, compiler="g++", place=replace(PLACE, world=2, rank=0))
    assert check(sprint(), 90e9, monkeypatch) == []
    assert check(demo(), 1e9, monkeypatch) == []


def test_the_estimate_is_what_was_measured() -> None:
    """Peaks of resident memory above that of the weights, plain PyTorch in bfloat16; see parbank.training.memory."""
    for recipe, vocab, measured in ((sprint, 1024, 734e3), (demo, 1536, 81.6e3), (demo, 8192, 181.2e3)):
        model = replace(recipe().model, vocab_size=vocab)
        found = activation_bytes(float(model.layers), float(model.width), float(model.hidden), float(vocab), cuda=False)
        assert found == pytest.approx(measured, rel=0.1)


def test_a_container_has_less_memory_than_its_machine(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable:   24000000 kB\n")
    assert free_host_memory(tmp_path) == 24e6 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/inner/job\n")
    group = tmp_path / "sys/fs/cgroup/inner"
    (group / "job").mkdir(parents=True)
    for name, value in (("memory.max", "4000000000"), ("memory.current", "3000000000")):
        (group / name).write_text(value + "\n")
    (group / "memory.stat").write_text("anon 500000000\nfile 2500000000\nfile_mapped 1\n")
    (group / "job/memory.max").write_text("max\n")
    assert free_host_memory(tmp_path) == 3.5e9, "files in the cache make way"
    (tmp_path / "proc/self/cgroup").write_text("5:memory:/old\n")
    old = tmp_path / "sys/fs/cgroup/memory/old"
    old.mkdir(parents=True)
    for name, value in (("memory.limit_in_bytes", "2000000000"), ("memory.usage_in_bytes", "1000000000")):
        (old / name).write_text(value)
    (old / "memory.stat").write_text("cache 100\nrss 999999900\n")
    assert free_host_memory(tmp_path) == 1e9 + 100
    assert free_host_memory(tmp_path / "nowhere") == 4e9


def test_free_memory_is_read_and_divided_over_ranks() -> None:
    assert 1e7 < free_memory(PLACE) < 1e14
    assert free_memory(Runtime(device=torch.device("cpu"), world=2)) < 0.75 * free_memory(PLACE)


def test_a_run_checks_its_memory_before_any_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "free_memory", lambda place: 1e5)
    with pytest.raises(ConfigError, match="GB of memory, and"):
        parbank.train(recipe="nano", data=f"text:{tmp_path}", out=tmp_path / "run", device="cpu", quiet=True)
    assert not (tmp_path / "run").exists()
