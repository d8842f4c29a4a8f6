"""The 16 bits that a bfloat16 weight lacks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from parbank.optim.master import join_master, split_master


@given(
    st.lists(st.floats(width=32, allow_nan=False, min_value=-(2.0**127), max_value=2.0**127), min_size=1, max_size=50)
)
def test_comes_back_exactly(values: list[float]) -> None:
    master = torch.tensor(values, dtype=torch.float32)
    weight, low = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    split_master(master, weight, low)
    assert torch.equal(join_master(weight, low).view(torch.int32), master.view(torch.int32)), (
        "bit for bit, signs of zero too"
    )
    nearest = master.bfloat16()
    # The same as rounding to nearest, but for ties, which go away from zero here and to even there.
    assert ((weight.float() - master).abs() <= (nearest.float() - master).abs()).all()


def test_a_new_weight_is_its_own_master() -> None:
    weight = torch.randn(100).bfloat16()
    assert torch.equal(join_master(weight, torch.zeros(100, dtype=torch.int16)), weight.float())
