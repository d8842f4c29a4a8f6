"""Where a run happens: devices that are there or not, and ranks that wait for each other."""

import os
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parbank import runtime
from parbank.errors import ConfigError, DataError, DeviceError, RankError
from parbank.runtime import LARGEST_SEED, Runtime, check_seed, pick_device, seed_everything
from tests.distributed import run_distributed_test

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_auto_takes_what_is_there() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert pick_device("auto").type == pick_device(None).type == expected
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["tpu", "", "cuda:x", "cpu:", "mps", "meta"])
def test_unknown_devices_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(DeviceError, match="use auto, cpu, cuda or cuda:N"):
        pick_device(name)


@no_gpu
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_a_gpu_that_was_asked_for_and_is_missing_is_an_error(name: str) -> None:
    with pytest.raises(DeviceError, match=r"torch sees no GPU; `parbank doctor` says why, --device cpu runs here"):
        pick_device(name)


@pytest.mark.gpu
def test_a_gpu_beyond_the_last_is_an_error() -> None:
    with pytest.raises(DeviceError, match="counted from 0"):
        pick_device(f"cuda:{torch.cuda.device_count()}")


def test_one_rank_is_the_same_path_without_a_group() -> None:
    with runtime.start("cpu") as place:
        assert (place.rank, place.world, place.is_main, place.is_cuda) == (0, 1, True, False)
        assert not dist.is_initialized()
        tensor = torch.ones(3)
        assert place.sum(tensor) is tensor
        assert place.broadcast(tensor) is tensor
        assert place.agree([1.5, -2.0]) == [1.5, -2.0]
        assert place.in_turn(lambda: 7) == 7
        place.barrier()
        place.synchronize()


def talk() -> dict[str, object]:
    place = Runtime(device=torch.device("cpu"), rank=dist.get_rank(), world=dist.get_world_size())
    told: dict[str, object] = {}
    told["sum"] = place.sum(torch.tensor([1.0, place.rank])).tolist()
    told["agree"] = place.agree([float(place.rank), -float(place.rank)])
    told["broadcast"] = place.broadcast(torch.full((2,), float(place.rank))).tolist()
    told["in_turn"] = place.in_turn(lambda: place.rank)
    calls = []

    def fail() -> None:
        calls.append(place.rank)
        raise DataError("broken")

    try:
        place.in_turn(fail)
    except DataError as error:
        told["failure"] = str(error)
    except SystemExit as error:
        told["failure"] = error.code
    told["calls"] = calls

    def fail_later() -> None:
        if not place.is_main:
            raise DataError("missing here")

    try:
        place.in_turn(fail_later)
    except (DataError, RankError) as error:
        told["later"] = str(error)
    told["gather"] = place.gather({"rank": place.rank})
    place.barrier()
    return told


def test_ranks_agree_and_take_turns() -> None:
    first, second = run_distributed_test(talk, 2)
    for told in (first, second):
        assert told["sum"] == [2.0, 1.0]
        assert told["agree"] == [1.0, 0.0]
        assert told["broadcast"] == [0.0, 0.0]
    assert (first["in_turn"], second["in_turn"]) == (0, 1)
    assert (first["failure"], second["failure"]) == ("broken", 2)
    assert (first["later"], second["later"]) == ("rank 1 failed: missing here", "missing here")
    assert first["gather"] == second["gather"] == [{"rank": 0}, {"rank": 1}]
    assert (first["calls"], second["calls"]) == ([0], []), "where the first rank failed, nobody else tries"


def test_one_seed_fixes_every_generator() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    drawn = []
    for seed in (3, 3, 4, LARGEST_SEED):
        seed_everything(seed)
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_seeds_no_generator_takes_are_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match=f"from 0 to {LARGEST_SEED}, got {seed}"):
        check_seed(seed)


def test_versions_name_what_made_a_result() -> None:
    found = runtime.versions()
    assert {"parbank", "python", "torch", "numpy", "platform"} <= found.keys()
    assert found["torch"] == torch.__version__
    assert all(isinstance(value, str) for value in found.values())
    assert not any(os.sep in value for value in found.values())
