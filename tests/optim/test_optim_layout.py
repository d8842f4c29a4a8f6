"""Batches and owners: every block exactly once, in shares that differ by at most one."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parbank.optim import update
from parbank.optim.layout import plan_batches

DEFAULTS: dict[str, Any] = {
    "algorithm": "muon", "coefficients": "quintic", "ns_steps": 5, "method": "auto", "nesterov": True, "cautious": False,
    "normuon": False, "equilibrate": False,
    "num_heads": None, "split_sizes": None, "transposed": None, "flatten": False, "lr_scale": "spectral",
}  # fmt: skip


def group(*shapes: tuple[int, ...], **options: Any) -> dict[str, Any]:
    return {**DEFAULTS, **options, "params": [torch.zeros(shape) for shape in shapes]}


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 13), st.sampled_from([(2, 3), (3, 2), (4, 4)])), min_size=1, max_size=8),
    st.integers(1, 17),
)
def test_every_block_has_one_owner(stacks: list[tuple[int, tuple[int, int]]], world: int) -> None:
    batches = plan_batches([group(*((count, *shape) for count, shape in stacks))], None, world)
    assert sum(batch.count for batch in batches) == sum(count for count, _ in stacks)
    for batch in batches:
        shares = [sum(count for _, count in batch.owned(rank)) for rank in range(world)]
        assert max(shares) - min(shares) <= 1
        seen = []
        for rank in range(world):
            local = 0
            held: dict[int, int] = {}
            for piece in batch.pieces(rank):
                assert piece.local == local, "local slots follow one another"
                assert piece.offset == held.get(id(piece.member), 0), "so does what is held of a parameter"
                held[id(piece.member)] = piece.offset + piece.count
                local += piece.count
                seen += range(piece.slot, piece.slot + piece.count)
            assert local == shares[rank]
        assert sorted(seen) == list(range(batch.count))


def test_eleven_matrices_on_eight_ranks() -> None:
    """The published scheme padded 11 to 16; here no rank has more than 2 and nothing is padded."""
    (batch,) = plan_batches([group((11, 4, 8))], None, 8)
    assert batch.even == 1
    assert [owner for _, owner in batch.leftover] == [0, 1, 2]


def test_left_over_blocks_are_dealt_on() -> None:
    batches = plan_batches([group((5, 4, 4), (5, 4, 8), (5, 8, 8))], None, 4)
    assert [owner for batch in batches for _, owner in batch.leftover] == [0, 1, 2]


def test_shapes_up_to_transposition_share_a_batch_the_largest_first() -> None:
    groups = [
        group((2, 4, 4), (3, 2, 8)),
        group((8, 2), lr_scale="rms"),
        group((4, 4), ns_steps=3),
        group((16, 8), num_heads=4),
    ]
    batches = plan_batches(groups, None, 1)
    found = {(b.rows, b.cols, len(b.options.triples)): b for b in batches}
    assert list(found) == [(4, 8, 5), (2, 8, 5), (4, 4, 5), (4, 4, 3)]
    assert [(m.count, m.flipped) for m in found[2, 8, 5].members] == [(3, False), (1, True)]
    assert found[2, 8, 5].scales == [1.0] * 3 + [0.2 * 8**0.5]


def test_transposed_flags_follow_the_logical_matrix() -> None:
    (batch,) = plan_batches([group((3, 2, 8), transposed=(True, False, True))], None, 1)
    assert batch.scales == [2.0, 1.0, 2.0]


def test_blocks_are_views() -> None:
    groups = [group((5, 4), (3, 4, 5))]
    image = torch.zeros(6, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    groups[0]["params"].append(image)
    for batch in plan_batches(groups, None, 1):
        for member in batch.members:
            blocks = member.blocks(member.param)
            assert blocks.data_ptr() == member.param.data_ptr()
            blocks.copy_(torch.randn(blocks.shape))
            assert torch.equal(member.param.permute(member.order).reshape(blocks.shape), blocks)


def test_a_rank_without_blocks_sends_the_dtype_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU without Triton the others send float16: a collective needs one dtype on every rank."""
    monkeypatch.setattr(update, "working_dtype", lambda X: torch.float16)
    (batch,) = plan_batches([group((1, 4, 8))], None, 2)
    control = update.Control(torch.ones(2), torch.ones(2, 4), torch.ones(1))
    dtypes = set()
    for rank in (0, 1):
        pieces = batch.pieces(rank)
        blocks = [torch.randn(piece.count, 4, 8) for piece in pieces]
        dtypes.add(update.prepare(batch, pieces, blocks, [torch.zeros_like(block) for block in blocks], control).dtype)
    assert dtypes == {torch.float16}
