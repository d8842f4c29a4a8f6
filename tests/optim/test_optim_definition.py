"""The bounds that a GPU is held to (see definition.py): float16 stays within them, and faults that have passed before do not."""

from dataclasses import replace

import pytest
import torch

from parbank.optim import newton_schulz, update
from tests.optim.definition import ADAM_TOLERANCE, TOLERANCE, Settings, define, train, worst_error

SOUND = Settings(cautious=True)
FAULTS = {
    "no weight decay": replace(SOUND, weight_decay=0.0),
    "twice the weight decay": replace(SOUND, weight_decay=0.2),
    "not cautious": replace(SOUND, cautious=False),
    "momentum 0.9 for 0.95": replace(SOUND, momentum=0.9),
    "a learning rate 5% off": replace(SOUND, lr=1.05 * SOUND.lr),
}
ADAM_FAULTS = {
    "no weight decay": replace(SOUND, adam_decay=0.0),
    "a decay of the mean square of 0.9 for 0.95": replace(SOUND, betas=(0.9, 0.9)),
}


def test_float16_stays_well_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newton-Schulz in float16, as on a GPU."""
    for module in (newton_schulz, update):
        monkeypatch.setattr(module, "working_dtype", lambda G: torch.float16)
    expected = define(torch.float32, SOUND)
    for method in ("plain", "symmetric", "gram"):
        matrices, _ = worst_error(train("cpu", torch.float32, SOUND, method=method), expected, torch.float32)
        assert 1e-4 < matrices < TOLERANCE / 2, method


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_is_far_nearer(dtype: torch.dtype) -> None:
    matrices, small = worst_error(train("cpu", dtype, SOUND), define(dtype, SOUND), dtype)
    assert matrices < TOLERANCE / 10
    assert small < ADAM_TOLERANCE / 10


def test_every_fault_is_far_beyond_the_bound() -> None:
    """By more than float16 could hide: in float32 here, where the whole of the error is the fault's."""
    expected = define(torch.float32, SOUND)
    for name, faulty in FAULTS.items():
        matrices, _ = worst_error(train("cpu", torch.float32, faulty), expected, torch.float32)
        assert matrices > 4 * TOLERANCE, name
    for name, faulty in ADAM_FAULTS.items():
        _, small = worst_error(train("cpu", torch.float32, faulty), expected, torch.float32)
        assert small > 50 * ADAM_TOLERANCE, name
