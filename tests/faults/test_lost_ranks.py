"""A rank that is lost ends the others by a sentence with its name."""

from pathlib import Path

import pytest
import torch

from tests.faults.ranks import lose_rank


def test_a_killed_rank_is_named_by_the_other(text_spec: str, tmp_path: Path) -> None:
    loss = lose_rank(text_spec, tmp_path, victim=0, after="step 1 ", steps=10_000)
    assert loss.complaint() == ""
    assert "its process was killed or crashed" in loss.errors[1][0]
    assert "--resume" in loss.errors[1][0]
    assert loss.seconds < 30


@pytest.mark.gpu
def test_a_killed_rank_is_named_under_nccl(text_spec: str, tmp_path: Path) -> None:
    """nccl would wait for the lost rank. With one GPU, both ranks share it: nccl needs to take them for two machines.
    Plain ops: kernels would only take time to compile."""
    plain = {"PARBANK_OPS": "reference"}
    shared = plain | {"LOCAL_RANK": "0", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    alone = torch.cuda.device_count() < 2
    apart = [shared | {"NCCL_HOSTID": f"machine-{rank}"} if alone else plain for rank in range(2)]
    loss = lose_rank(text_spec, tmp_path, after="step 1 ", steps=100_000, device="cuda", environments=apart)
    assert loss.codes == {0: 2}, loss
    assert sum("rank 1 was lost" in line for line in loss.errors[0]) == 1, loss
    assert not any("Traceback" in line for line in loss.errors[0]), loss
