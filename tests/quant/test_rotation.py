"""The rotation is undone by what every reader of a file computes."""

import numpy as np
import pytest
import torch

from parbank.quant.integers import Quantised, butterfly, dequantise
from parbank.quant.rotation import block_size, rotate, rotate_hessian


def test_the_block_is_the_largest_power_of_two_that_divides() -> None:
    assert [block_size(cols) for cols in (1, 2, 6, 96, 512, 1536)] == [1, 2, 2, 32, 512, 512]


@pytest.mark.parametrize("cols", [1, 4, 12, 64])
def test_rotating_twice_is_the_block_times_the_weights(cols: int) -> None:
    weights = torch.randint(-100, 100, (3, 5, cols)).double()  # sums of integers: exact
    block = block_size(cols)
    assert torch.equal(rotate(rotate(weights, block), block), block * weights)
    flat = weights.reshape(15, cols).numpy()
    assert np.array_equal(rotate(weights, block).reshape(15, cols).numpy(), butterfly(flat, block))


def test_rows_of_the_rotation_are_orthogonal_signs() -> None:
    matrix = rotate(torch.eye(16), 16)
    assert set(matrix.flatten().tolist()) == {-1.0, 1.0}
    assert torch.equal(matrix @ matrix.T, 16 * torch.eye(16))


def test_the_error_is_the_same_in_both_bases() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 24, generator=generator, dtype=torch.float64)
    hessian, error = x.T @ x, torch.randn(3, 24, generator=generator, dtype=torch.float64)
    turned = rotate(error, 8)
    torch.testing.assert_close(turned @ rotate_hessian(hessian, 8) @ turned.T, error @ hessian @ error.T)


def test_a_reader_gets_the_rotated_weights_back() -> None:
    weights = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    turned = rotate(weights, 32)
    scales = (turned.abs().amax(1, keepdim=True) / 127).half()
    values = (turned / scales.float()).round().clamp(-127, 127).to(torch.int8).numpy()
    back = dequantise(Quantised(values, scales.numpy(), 127, rotation=32))
    assert np.abs(back - weights.numpy()).max() < 0.05
