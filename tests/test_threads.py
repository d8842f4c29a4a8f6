"""How many threads fit: cores by affinity and quota, the load of other processes, and how threads wait."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from parbank import cores, threads
from parbank.cores import LoadMeter, count_cores, estimate_others, read_quota
from parbank.errors import ConfigError
from parbank.threads import ShortWaits, check_threads, compute_with, run_in_background, use_threads
from parbank.training.threads import choose_threads

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
libgomp = pytest.mark.skipif(
    not (sys.platform.startswith("linux") and "libgomp" in Path("/proc/self/maps").read_text())
    or any(name in os.environ for name in threads._WAITING),
    reason="this PyTorch has another OpenMP, or the environment says how to wait",
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"cores": 2, "threads": 2, "ran": 1.0, "waited": 0.0, "used": 0.0}, 0.0),
        ({"cores": 2, "threads": 1, "ran": 1.0, "waited": 0.0, "used": 1.0}, 1.0),
        (
            {"cores": 2, "threads": 2, "ran": 1.0, "waited": 0.05, "used": 0.1},
            0.1,
        ),  # too little waiting to mean anything
        ({"cores": 2, "threads": 2, "ran": 0.5, "waited": 1.0, "used": 1.3}, 4.0),  # 6 threads on 2 cores
        ({"cores": 2, "threads": 1, "ran": 0.4, "waited": 0.6, "used": 1.6}, 4.0),  # 5 threads on 2 cores
        ({"cores": 16, "threads": 16, "ran": 0.8, "waited": 0.2, "used": 3.2}, 4.0),
        ({"cores": 2, "threads": 2, "ran": 0.0, "waited": 0.0, "used": 0.7}, 0.7),  # slept all the time
        ({"cores": 2, "threads": 2, "ran": 1.0, "waited": 0.0, "used": -0.01}, 0.0),  # clocks of different grain
    ],
)
def test_the_wish_of_others_follows_from_our_own_waiting(given: dict[str, float], expected: float) -> None:
    assert estimate_others(**given) == pytest.approx(expected)  # type: ignore[arg-type]


def group(root: Path, *lines: str, **files: str) -> Path:
    """A file system with the cgroups of one process: the lines of its list, and files below the mount."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


V1 = "cpu.cfs_quota_us", "cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        (["0::/"], {}, None),
        (["0::/"], {"cpu.max": "max 100000"}, None),
        (["0::/"], {"cpu.max": "150000 100000"}, 1.5),
        (["0::/a/b"], {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 0.5),
        (["0::/a/b"], {"a/b/cpu.max": "300000 100000", "cpu.max": "200000 100000"}, 2.0),
        (["0::/docker/123"], {"cpu.max": "400000 100000"}, 4.0),  # a container's own group is its root
        (["2:memory:/", "1:cpu,cpuacct:/x"], {f"cpu,cpuacct/x/{V1[0]}": "25000", f"cpu,cpuacct/x/{V1[1]}": "50000"}, 0.5),
        (["1:cpu:/x"], {f"cpu/{V1[0]}": "800000", f"cpu/{V1[1]}": "100000"}, 8.0),
        (["1:cpu:/"], {f"cpu/{V1[0]}": "-1", f"cpu/{V1[1]}": "100000"}, None),
        (["3:cpuset:/", "0::/"], {f"cpu/{V1[0]}": "100000", f"cpu/{V1[1]}": "100000"}, None),  # not this process's
        (["1:cpu:/", "0::/"], {f"cpu/{V1[0]}": "300000", f"cpu/{V1[1]}": "100000", "unified/cpu.max": "100000 100000"}, 1.0),
        (["0::/"], {"cpu.max": "150000"}, None),
        (["0::/"], {"cpu.max": "a b"}, None),
        (["0::/"], {"cpu.max": "100000 0"}, None),
        (["nonsense", ""], {"cpu.max": "max 1"}, None),
    ],
)  # fmt: skip
def test_the_quota_of_both_kinds_of_cgroups(
    tmp_path: Path, lines: list[str], files: dict[str, str], expected: float | None
) -> None:
    assert read_quota(group(tmp_path, *lines, **files)) == expected


def test_a_system_without_cgroups_has_no_quota(tmp_path: Path) -> None:
    assert read_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("cpus", "quota", "expected"),
    [(8, None, 8), (8, 2.0, 2), (8, 0.3, 1), (8, 1.4, 1), (8, 1.5, 2), (2, 16.0, 2), (1, None, 1)],
)
def test_cores_are_those_of_affinity_and_quota(
    monkeypatch: pytest.MonkeyPatch, cpus: int, quota: float | None, expected: int
) -> None:
    monkeypatch.setattr(cores, "cpus", lambda: set(range(cpus)))
    monkeypatch.setattr(cores, "read_quota", lambda: quota)
    assert count_cores() == expected


@linux
def test_affinity_limits_the_threads_of_a_process() -> None:
    """As `taskset` sets it, whatever OpenMP makes of it."""
    script = (
        "import os\nfrom parbank.cores import count_cores\nos.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
    )
    subprocess.run([sys.executable, "-c", f"{script}assert count_cores() == 1"], check=True, timeout=300)


def seconds_of_waiting() -> float:
    """CPU time while the main thread sleeps after each of 30 operations on two threads: that of the thread that waits."""
    numbers = torch.randn(2**18)
    total = 0.0
    for _ in range(30):
        numbers.add(1.0)
        before = time.process_time()
        time.sleep(0.003)
        total += time.process_time() - before
    return total


@libgomp
def test_waiting_threads_sleep_from_begin_to_end() -> None:
    """Other processes can keep a thread from spinning, so the largest of several measurements counts."""
    waits = ShortWaits()
    with use_threads(2):
        seconds_of_waiting()
        spinning = max(seconds_of_waiting() for _ in range(3))
        for _ in range(2):
            waits.begin(2)
            waits.begin(2)
            sleeping = min(seconds_of_waiting() for _ in range(3))
            waits.end()
            waits.end()
            assert sleeping < 0.3 * spinning
        assert any(seconds_of_waiting() > 0.5 * spinning for _ in range(10))
    assert not [thread for thread in threading.enumerate() if thread.name == "parbank-short-waits"]


@pytest.mark.parametrize("name", threads._WAITING)
def test_waiting_stays_as_the_user_set_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = ShortWaits()
    monkeypatch.setenv(name, "1")
    waits.begin(2)
    assert waits._helper is None
    monkeypatch.delenv(name)


@libgomp
@pytest.mark.parametrize(("busy", "number", "expected"), [(True, 2, True), (True, 1, False), (False, 2, False)])
def test_a_command_waits_shortly_where_it_found_a_busy_machine(
    busy: bool, number: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "had_to_wait", lambda: busy)

    def helpers() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "parbank-short-waits"]

    with compute_with(number):
        assert bool(helpers()) == expected
    assert not helpers()


@pytest.mark.parametrize(
    ("line", "expected"), [("95 5 3", False), ("8 2 3", True), ("1 0 3", False), ("0 0 0", False), ("", False)]
)
def test_a_thread_knows_whether_it_had_to_wait(line: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_read", lambda path: line)
    assert cores.had_to_wait() == expected


@pytest.mark.parametrize("number", [0, -1, 1025, 99999])
def test_a_number_of_threads_that_makes_no_sense_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=rf"from 1 to 1024, got {number}; this process may use \d+ cores"):
        check_threads(number)
    before = torch.get_num_threads()
    with pytest.raises(ConfigError), use_threads(number):
        pass
    assert torch.get_num_threads() == before


def test_threads_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    with use_threads(3) as chosen:
        assert chosen == torch.get_num_threads() == 3
    assert torch.get_num_threads() == before
    monkeypatch.setattr(threads, "count_cores", lambda: 4)
    with use_threads(8):
        for ranks, expected in (("1", 4), ("2", 2), ("8", 1)):
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
            with use_threads() as chosen:
                assert chosen == torch.get_num_threads() == expected
        with use_threads(2), use_threads() as chosen:
            assert chosen == 1, "torch's own number is an upper limit, and 8 ranks share 4 cores"


STAT = """cpu  9 9 9 9 9 9 9 9 9 9
cpu0 100 20 30 1000 500 1 2 4 0 0
cpu1 200 20 30 1000 500 1 2 4 50 0
cpu10 100000 0 0 0 0 0 0 0 0 0
intr 5
"""


def test_busy_time_is_that_of_our_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without idle time, time waiting for disks, and work at a lower priority than ours; with time stolen from the machine."""
    monkeypatch.setattr(cores, "cpus", lambda: {0, 1})
    monkeypatch.setattr(os, "getpriority", lambda which, who: 0)
    ticks = os.sysconf("SC_CLK_TCK")
    assert cores._busy_seconds(STAT) == (137 + 237) / ticks
    monkeypatch.setattr(os, "getpriority", lambda which, who: 10)
    assert cores._busy_seconds(STAT) == (157 + 257) / ticks
    assert cores._busy_seconds("cpu  1 2 3\n") is None


def test_a_meter_needs_a_system_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_read", lambda path: "")
    assert LoadMeter(2).measure(2) is None


def measure_for_a_moment(count: int) -> float:
    meter = LoadMeter(count)
    assert meter.measure(1, least_seconds=600) is None, "too early"
    end = time.monotonic() + 0.7
    while time.monotonic() < end:
        pass
    found = meter.measure(1, least_seconds=0.5)
    assert found is not None
    return found


@linux
def test_other_processes_are_noticed() -> None:
    """Two busy processes for each CPU, and this thread computing beside them: at most a third of a core is left to it."""
    count = count_cores()
    script = "import os\nparent = os.getppid()\nprint(flush=True)\nwhile os.getppid() == parent: pass"
    others = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) for _ in range(2 * len(cores.cpus()))
    ]
    try:
        for process in others:
            assert process.stdout is not None
            process.stdout.readline()  # it runs
        found = max(measure_for_a_moment(count) for _ in range(3))
    finally:
        for process in others:
            process.kill()
            process.communicate()
    assert found > 0.8 * count
    assert choose_threads(cores=count, most=count, others=found) <= max(2, round(0.6 * count))


def test_work_in_the_background_gives_its_result_or_its_error() -> None:
    assert run_in_background(lambda: threading.current_thread().name, "aside").result() == "aside"
    with pytest.raises(ZeroDivisionError):
        run_in_background(lambda: 1 // 0, "aside").result()
