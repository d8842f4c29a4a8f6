import torch

from parbank.model.banks import Banks

SHAPES = {"a.up": (6, 4), "b.up": (6, 4), "a.down": (4, 6), "b.down": (4, 6), "a.q": (4, 4)}


def filled() -> Banks:
    banks = Banks(SHAPES)
    with torch.no_grad():
        for bank in banks.parameters():
            bank.copy_(torch.randn(bank.shape))
    return banks


def test_a_shape_and_its_transpose_share_one_bank() -> None:
    banks = filled()
    assert {name: tuple(p.shape) for name, p in banks.named_parameters()} == {"6x4": (4, 6, 4), "4x4": (1, 4, 4)}
    assert banks.transposed["6x4"] == (False, False, True, True)


def test_matrices_come_back_in_their_logical_orientation_as_views() -> None:
    banks = filled()
    matrices = banks.matrices()
    assert {name: tuple(m.shape) for name, m in matrices.items()} == SHAPES
    torch.testing.assert_close(matrices["b.down"], banks.bank("6x4")[3].T)
    storage = banks.bank("6x4").untyped_storage().data_ptr()
    assert all(matrices[n].untyped_storage().data_ptr() == storage for n in ("a.up", "b.down"))


def test_the_gradient_reaches_the_right_slice() -> None:
    banks = filled()
    factor = torch.randn(4, 6)
    (banks.matrices()["a.down"] * factor).sum().backward()
    grad = banks.bank("6x4").grad
    assert grad is not None
    torch.testing.assert_close(grad[2], factor.T)
    assert grad[[0, 1, 3]].abs().max() == 0


def test_split_and_join_are_inverse() -> None:
    banks = filled()
    state = {f"banks.{k}": v for k, v in banks.state_dict().items()} | {"other": torch.ones(2)}
    plain = banks.split(state, "banks.")
    assert set(plain) == {*SHAPES, "other"}
    back = banks.join(plain, "banks.")
    assert set(back) == set(state)
    assert all(torch.equal(back[k], state[k]) for k in state)
