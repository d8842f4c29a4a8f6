"""How many threads fit beside the load of other processes."""

import pytest

from parbank.training.threads import choose_threads, is_busy


@pytest.mark.parametrize(
    ("cores", "most", "others", "expected"),
    [
        (2, 2, 0.0, 2),
        (2, 2, 0.1, 2),  # a desktop
        (2, 2, 0.49, 2),
        (2, 2, 0.5, 2),  # two threads that wait shortly are better than one
        (2, 2, 1.0, 2),
        (2, 2, 4.0, 2),
        (2, 1, 0.9, 1),
        (1, 1, 0.0, 1),
        (1, 1, 50.0, 1),
        (4, 4, 1.0, 3),
        (4, 4, 2.0, 2),
        (16, 16, 1.0, 15),
        (16, 16, 4.0, 12),
        (16, 16, 32.0, 5),  # a third of the machine, not one thread
        (16, 16, 1e6, 2),
        (64, 32, 20.0, 32),  # 32 cores are left to others anyway
        (64, 32, 32.4, 32),
        (64, 32, 40.0, 28),
    ],
)
def test_threads_fit_beside_the_load(cores: int, most: int, others: float, expected: int) -> None:
    assert choose_threads(cores=cores, most=most, others=others) == expected


@pytest.mark.parametrize("cores", [1, 2, 3, 8, 96])
def test_more_load_never_gives_more_threads(cores: int) -> None:
    found = [choose_threads(cores=cores, most=cores, others=x / 4) for x in range(8 * cores)]
    assert found == sorted(found, reverse=True)
    assert (found[0], min(found)) == (cores, max(min(cores, 2), cores // 3))


def test_busy_means_that_cores_are_shared() -> None:
    assert is_busy(cores=2, threads=2, others=0.6)
    assert not is_busy(cores=2, threads=1, others=1.0)
    assert is_busy(cores=2, threads=1, others=1.6)
    assert not is_busy(cores=2, threads=16, others=0.0), "16 threads of ours are not the load of others"
