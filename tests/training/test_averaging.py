import pytest
import torch

from parbank.errors import ConfigError
from parbank.training.averaging import AverageConfig, Averages


def walk_of(steps: int, seed: int = 0) -> list[torch.Tensor]:
    return list(torch.randn(steps, 3, generator=torch.Generator().manual_seed(seed)))


class Model(torch.nn.Module):
    """One weight, which its state dict turns round: an average must keep to the names and forms of the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(3))
        self.register_state_dict_post_hook(lambda module, state, *rest: state.update(turned=state.pop("w").flip(0)))
        self.register_load_state_dict_pre_hook(lambda module, state, *rest: state.update(w=state.pop("turned").flip(0)))


def average_of(averages: Averages) -> torch.Tensor:
    return averages.averaged()["turned"].flip(0)


def run(config: AverageConfig, values: list[torch.Tensor], shares: list[float] | None = None) -> Averages:
    model = Model()
    averages = Averages(model, config)
    for value, share in zip(values, shares or [1.0] * len(values)):
        model.w.data.copy_(value)
        averages.update(share)
    return averages


def test_ema_follows_its_recurrence() -> None:
    values = walk_of(50)
    expected = torch.zeros(3)
    for n, value in enumerate(values, start=1):
        decay = min(0.8, n / (n + 10))
        expected = decay * expected + (1 - decay) * value
    torch.testing.assert_close(average_of(run(AverageConfig(ema_decay=0.8), values)), expected)


def test_swa_is_the_mean_of_every_nth_step_of_the_tail() -> None:
    values, shares = walk_of(12), [1.0] * 6 + [0.2] * 6
    averages = run(AverageConfig(ema_decay=0, swa_every=2, swa_tail=0.2, use="swa"), values, shares)
    torch.testing.assert_close(average_of(averages), torch.stack([values[7], values[9], values[11]]).mean(0))


def test_without_a_tail_swa_falls_back() -> None:
    values = walk_of(5)
    config = AverageConfig(ema_decay=0.5, swa_every=1, use="swa")
    torch.testing.assert_close(average_of(run(config, values)), average_of(run(AverageConfig(ema_decay=0.5), values)))


def test_applied_swaps_and_restores_also_on_an_error() -> None:
    averages = run(AverageConfig(ema_decay=0.5), walk_of(5))
    live = averages._weights[0]
    own, average = live.detach().clone(), average_of(averages)
    seen: list[torch.Tensor] = []

    def fail() -> None:
        with averages.applied():
            seen.append(live.detach().clone())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(seen[0], average)
    assert torch.equal(live, own)
    assert not torch.equal(own, average)


def test_state_round_trip_goes_on_exactly() -> None:
    config = AverageConfig(ema_decay=0.9, swa_every=2, swa_tail=1.0, use="swa")
    values = walk_of(20)
    whole, half = run(config, values), run(config, values[:9])
    model = Model()
    resumed = Averages(model, config)
    resumed.load_state_dict(half.state_dict())
    for value in values[9:]:
        model.w.data.copy_(value)
        resumed.update(1.0)
    assert torch.equal(average_of(resumed), average_of(whole))
    assert torch.equal(resumed.state_dict()["ema"]["turned"], whole.state_dict()["ema"]["turned"])


def test_an_average_that_is_not_kept_cannot_be_used() -> None:
    with pytest.raises(ConfigError, match="swa_every"):
        AverageConfig(use="swa")
