"""benchmarks/communication.py: the arithmetic of its model. That it lists the collectives of real steps is tested over gloo,
in tests/integrations/test_communication_trace.py."""

import math
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def communication(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("communication")


@pytest.fixture
def links(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("communication_links")


def test_the_published_intensity(communication: ModuleType) -> None:
    assert round(communication.intensity(768, 3072, 8)) == 1234


def test_work_and_numbers_of_golf(communication: ModuleType) -> None:
    golf = communication.GOLF
    assert sorted(golf.batches) == [(22, 256, 512), (22, 512, 512), (22, 512, 1536)]
    assert golf.batches[0] == (22, 512, 1536), "the largest first"
    total = sum(count * communication.ns_flops(rows, cols) for count, rows, cols in golf.batches)
    assert round(total / 1e9) == 314, "the FLOP floor of the golf banks"


def test_a_ring_sends_what_a_ring_sends(links: ModuleType) -> None:
    sent = links.sent_bytes
    assert sent("reduce_scatter", 800, 8) == sent("all_gather", 800, 8) == 700
    assert sent("all_reduce", 800, 8) == 1400, "a reduce-scatter and an all-gather"
    assert sent("reduce", 800, 8) == sent("broadcast", 800, 8) == 800


@pytest.mark.parametrize("ranks", [4, 8, 64])
@pytest.mark.parametrize("count", [1, 3, 22])
def test_chains_to_successive_owners_overlap(
    communication: ModuleType, links: ModuleType, ranks: int, count: int
) -> None:
    """Against a simulation hop by hop: every rank takes operations in order, and passes each one on to its neighbour."""
    free = [0] * ranks
    for number in range(count):
        arrives = 0
        for hop in range(ranks):
            rank = (number + 1 + hop) % ranks  # the owner, rank `number`, comes last
            free[rank] = arrives = max(arrives, free[rank]) + 1
    assert max(free) == ranks + 2 * (count - 1)
    cluster = links.Cluster(ranks=ranks, per_machine=ranks)
    nothing = communication.Collective("reduce", 0, "gradients")
    wait = communication.Wait("gradients")
    hop, start = (1e-6 * value for value in (links.PROTOCOLS[0].ring[0], links.PROTOCOLS[0].start))
    found = communication.play([nothing] * count + [wait], cluster).total
    # the model charges two hops for the first chain, too, and W - 1 for its way
    assert found == pytest.approx(count * start + (ranks - 1 + 2 * count) * hop)


def test_work_hides_a_collective_and_a_wait_shows_it(communication: ModuleType, links: ModuleType) -> None:
    cluster = links.Cluster(ranks=8)
    send = communication.Collective("all_gather", 10**9, "a")
    seconds = sum(cluster.time("all_gather", 10**9))
    assert seconds == pytest.approx(0.875 * 10**9 / links.NVLINK, rel=0.02), "large: latency is little"
    work = communication.Work("orthogonalize", seconds / 4)
    found = communication.play([send, work, communication.Wait("a"), work], cluster)
    assert found.exposed == {"a": pytest.approx(0.75 * seconds)}
    assert found.total == pytest.approx(1.25 * seconds)


def test_small_messages_take_a_tree_and_large_ones_the_slowest_link(links: ModuleType) -> None:
    machine, fast, slow = (links.CLUSTERS[n] for n in (1, 2, 4))
    assert sum(machine.time("all_reduce", 4)) < 20e-6
    assert sum(fast.time("all_reduce", 4)) < sum(fast.time("reduce_scatter", 4)), "a ring of 64 has 63 hops"
    assert sum(slow.time("reduce_scatter", 10**9)) == pytest.approx(63 / 64 * 10**9 / 11.25e9, rel=0.05)


def test_rows_add_up(communication: ModuleType, links: ModuleType) -> None:
    rates, sources = communication.read_rates()
    assert [source.partition("/")[0] for source in sources] == ["step", "optimizer", "newton_schulz"]
    rows = {(row.case, row.provider): row.value for row in communication.make_rows(links.CLUSTERS, rates)}
    assert all(value is not None and math.isfinite(value) and value >= 0 for value in rows.values())
    for model in communication.NAMED:
        for cluster in links.CLUSTERS:
            found = {
                case.partition(": ")[2]: v for (case, name), v in rows.items() if name == cluster.name and model in case
            }
            waits = sum(value for quantity, value in found.items() if quantity.startswith("waits"))
            assert found["exposed"] == pytest.approx(waits)
            step = found["forward + backward"] + found["optimizer's own work"] + found["exposed"]
            assert found["exposed share"] == pytest.approx(100 * found["exposed"] / step)
            assert found["exposed, reduced during backward"] < found["exposed"]
    golf = communication.GOLF
    assert rows["golf: sent: gradients of matrices", "8 GPUs, NVLink"] == pytest.approx(
        4e-6 * sum(n * r * c * (6 + 16 * 7 / 8) / 22 for n, r, c in golf.batches)
    ), "of 22 matrices, 16 are scattered and 6 are reduced"


def test_more_tokens_make_communication_small(communication: ModuleType, links: ModuleType) -> None:
    rates = communication.read_rates()[0]["golf"]
    cluster = links.Cluster(ranks=8)
    rows = {row.case: row.value for row in communication.describe("golf", communication.GOLF, cluster, rates)}
    seconds = rows["golf: tokens a GPU for 5%"] / communication.GOLF.tokens * rates.pass_seconds
    step = 1e3 * seconds + rows["golf: optimizer's own work"] + rows["golf: exposed"]
    assert rows["golf: exposed"] / step == pytest.approx(0.05)
