"""When the optimizer captures its step by itself, replays it, falls back and gives up: seen on a CPU. The graph is a
stand-in that does the work over again, on the addresses of its capture or not at all."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parbank.errors import ConfigError, DeviceError
from parbank.optim import ParallelMuon
from parbank.optim.graph import CALM, FAILURES, IDLE, PATIENCE, TRIALS, WORTH, GraphedStep, Pilot, Recorded, Signature

SIGNATURE = Signature(("w",), ("g",), ("s",), ("o",), ("l",), ("b",))
OTHER = SIGNATURE._replace(gradients=("elsewhere",))


def _fly(pilot: Pilot, signatures: list[Signature]) -> list[str]:
    """What the pilot decides, step by step; every capture succeeds."""
    actions = []
    for signature in signatures:
        actions.append(pilot.decide(signature))
        if actions[-1] == "run":
            pilot.ran(signature)
        if actions[-1] == "capture":
            pilot.captured()
        if actions[-1] != "run":
            pilot.replayed()
    return actions


def test_captures_after_calm_steps_and_replays() -> None:
    assert _fly(Pilot(required=False), [SIGNATURE] * 5) == ["run"] * CALM + ["capture", "replay", "replay"]


@pytest.mark.parametrize("part", Signature._fields)
def test_any_change_drops_the_graph(part: str, caplog: pytest.LogCaptureFixture) -> None:
    pilot = Pilot(required=False)
    changed = SIGNATURE._replace(**{part: ("changed",)})
    with caplog.at_level(logging.INFO, "parbank"):
        actions = _fly(pilot, [SIGNATURE] * 4 + [changed] * 4)
    assert actions == (["run"] * CALM + ["capture", "replay"]) * 2
    assert f"dropped: changed {part}" in caplog.text


def test_the_state_that_the_first_step_makes_is_no_change() -> None:
    pilot = Pilot(required=False)
    assert pilot.decide(SIGNATURE._replace(states=())) == "run"
    pilot.ran(SIGNATURE)
    assert _fly(pilot, [SIGNATURE] * 3) == ["run", "capture", "replay"]


def test_gradients_that_always_move_are_noticed() -> None:
    pilot = Pilot(required=False)
    for step in range(PATIENCE + 1):
        assert not pilot.gradients_move
        _fly(pilot, [SIGNATURE._replace(gradients=("here", None, step))])
    assert pilot.gradients_move
    assert pilot.moved == {2}
    _fly(pilot, [SIGNATURE] * (CALM + WORTH))
    assert not pilot.gradients_move, "a graph that pays starts the count again"


def test_gradients_that_move_now_and_then_are_noticed() -> None:
    """Every sixth step: each graph is replayed a few times, which does not pay."""
    pilot = Pilot(required=False)
    for step in range(6 * PATIENCE + 1):
        assert not pilot.gradients_move
        _fly(pilot, [SIGNATURE._replace(gradients=(step // 6,))])
    assert pilot.gradients_move
    assert pilot.captures == TRIALS
    pilot.gradients_settled()
    assert _fly(pilot, [SIGNATURE] * 20)[CALM:] == ["capture"] + ["replay"] * 17, "what was tried before does not count"


def test_gradients_that_come_and_go_have_not_moved() -> None:
    pilot = Pilot(required=False)
    for step in range(4 * PATIENCE):
        _fly(pilot, [SIGNATURE._replace(gradients=("a", None) if step % 2 else (None, "b"))])
    assert not pilot.gradients_move


@pytest.mark.parametrize("required", [False, True])
def test_gives_up_where_nothing_can_be_replayed(required: bool) -> None:
    pilot = Pilot(required=required)
    for step in range(IDLE + 1):
        assert not pilot.gave_up
        _fly(pilot, [SIGNATURE._replace(gradients=("a", None) if step % 2 else (None, "b"))])
    reason = f"{IDLE} steps in a row without a replay; last changed: gradients"
    assert pilot.gave_up == ("" if required else reason)


def test_gives_up_after_captures_that_fail(caplog: pytest.LogCaptureFixture) -> None:
    pilot = Pilot(required=False)
    for _ in range(FAILURES):
        assert _fly_until_capture(pilot) == CALM
        pilot.failed("no room")
    assert pilot.gave_up == f"{FAILURES} captures failed: no room"
    assert _fly(pilot, [SIGNATURE] * 9) == ["run"] * 9


def _fly_until_capture(pilot: Pilot) -> int:
    steps = 0
    while pilot.decide(SIGNATURE) == "run":
        pilot.ran(SIGNATURE)
        steps += 1
        assert steps < 50
    return steps


@pytest.mark.parametrize("required", [False, True])
def test_gives_up_where_captures_do_not_pay_unless_asked_for(required: bool) -> None:
    pilot = Pilot(required=required)
    for _ in range(2 * TRIALS):
        _fly(pilot, [SIGNATURE] * (CALM + 1) + [OTHER] * (CALM + 1))
    assert bool(pilot.gave_up) is not required
    assert pilot.captures == (4 * TRIALS if required else TRIALS)


# --- the optimizer, with a stand-in for the graph --------------------------------------------------------------------


class StandIn:
    """Refuses to replay where a graph would read other memory than the optimizer does now."""

    def __init__(self, optimizer: ParallelMuon, work: Callable[[], None]) -> None:
        self.optimizer, self.work = optimizer, work
        self.addresses = self._find()

    def _find(self) -> list[Any]:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        held = [v.data_ptr() for p in params for v in self.optimizer.state[p].values()]
        return [*held, *((p.data_ptr(), None if p.grad is None else p.grad.data_ptr()) for p in params)]

    def replay(self) -> None:
        assert self._find() == self.addresses
        self.work()


def _make(graphed: bool, **options: Any) -> tuple[ParallelMuon, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((6, 4), (2, 5, 5), (7,))]
    groups = [{"params": params[:2]}, {"params": params[2:], "algorithm": "adamw"}]
    optimizer = ParallelMuon(groups, weight_decay=0.1, max_norm=1.0, **{"cuda_graph": "auto", **options})
    if graphed:
        capture: Callable[[Callable[[], None]], Recorded] = lambda work: StandIn(optimizer, work)  # noqa: E731
        optimizer._graph = GraphedStep(optimizer, required=False, capture=capture)
    return optimizer, params


Change = Callable[[ParallelMuon, int], None]


def _load(optimizer: ParallelMuon, step: int) -> None:
    if step == 9:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _drop(optimizer: ParallelMuon, step: int) -> None:
    if step in (9, 10):
        optimizer.param_groups[0]["params"][0].grad = None


def _schedule(optimizer: ParallelMuon, step: int) -> None:
    optimizer.param_groups[0].update(lr=0.02 / (step + 1), momentum=0.8 + 0.001 * step)
    optimizer.max_norm = 1.0 + step


def _set_betas(optimizer: ParallelMuon, step: int) -> None:
    optimizer.param_groups[1]["betas"] = (0.9, 0.95) if step < 9 else (0.8, 0.9)


def _grow(optimizer: ParallelMuon, step: int) -> None:
    if step == 9:
        optimizer.param_groups[0]["ns_steps"] = 3


CHANGES: dict[str, tuple[Change, int]] = {
    "nothing": (lambda optimizer, step: None, 1),
    "a schedule": (_schedule, 1),
    "a loaded state": (_load, 2),
    "a missing gradient": (_drop, 2),
    "betas": (_set_betas, 2),
    "an option of the layout": (_grow, 2),
}


def _train(
    optimizer: ParallelMuon, params: list[nn.Parameter], change: Change, moving: bool, steps: int = 24
) -> list[Tensor]:
    held = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step + 1)
        wanted = [torch.randn(param.shape, generator=generator) for param in params]
        if moving:
            optimizer.zero_grad()
            torch.stack([(param * grad).sum() for param, grad in zip(params, wanted)]).sum().backward()
            held += [param.grad for param in params]  # so that no address comes back
        for param, grad in zip(params, wanted):
            if param.grad is None:
                param.grad = grad
            elif not moving:
                param.grad.copy_(grad)
        change(optimizer, step)
        optimizer.step()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("moving", [False, True], ids=["gradients in place", "gradients that move"])
@pytest.mark.parametrize("name", CHANGES)
def test_equals_a_step_without_a_graph(name: str, moving: bool) -> None:
    change, captures = CHANGES[name]
    optimizer, params = _make(True)
    found = _train(optimizer, params, change, moving)
    assert optimizer._graph is not None
    assert optimizer._graph.captures >= (1 if moving else captures)
    assert optimizer._graph.pilot.replays > 4
    expected = _train(*_make(False, cuda_graph=False), change, moving)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_a_capture_that_fails_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    optimizer, params = _make(True)

    def fail(work: Callable[[], None]) -> Recorded:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    optimizer._graph = GraphedStep(optimizer, required=False, capture=fail)
    with caplog.at_level(logging.INFO, "parbank"):
        found = _train(optimizer, params, CHANGES["nothing"][0], False)
    assert "runs without a CUDA graph from here on: 2 captures failed: operation not permitted" in caplog.text
    assert "without a graph: 2 captures failed: operation not permitted when stream is capturing)" in repr(optimizer)
    expected = _train(*_make(False, cuda_graph=False), CHANGES["nothing"][0], False)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    optimizer._graph = GraphedStep(optimizer, required=True, capture=fail)
    with pytest.raises(DeviceError, match="could not be captured"):
        _train(optimizer, params, CHANGES["nothing"][0], False)


def test_a_skipped_step_is_replayed_as_one() -> None:
    optimizer, params = _make(True)
    _train(optimizer, params, CHANGES["nothing"][0], False, steps=6)
    before = [param.detach().clone() for param in params]
    assert params[0].grad is not None
    params[0].grad[0, 0] = torch.nan
    optimizer.step()
    assert optimizer.last_skipped
    assert all(torch.equal(a, b) for a, b in zip(params, before))


def test_extra_work_is_an_ordinary_call_unless_a_graph_was_asked_for() -> None:
    """It may count on the host, which a graph would do once."""
    seen: list[int] = []
    optimizer, params = _make(True, extra_captured=lambda: seen.append(1))
    _train(optimizer, params, CHANGES["nothing"][0], False, steps=8)
    assert len(seen) == 8


def test_says_what_it_did() -> None:
    optimizer, params = _make(True)
    _train(optimizer, params, CHANGES["nothing"][0], False, steps=8)
    assert "cuda_graph: auto (6 of 8 steps replayed, captured 1 times)" in repr(optimizer)
    plain, params = _make(False)
    _train(plain, params, CHANGES["nothing"][0], False, steps=3)
    assert "0 of 3 steps replayed, captured 0 times; now without a graph: the parameters are on cpu)" in repr(plain)
    assert repr(ParallelMuon(params[:2], cuda_graph=False)).endswith("cuda_graph: False\n)")
    assert "cuda_graph: auto" in repr(copy.deepcopy(plain))


def test_a_graph_that_was_asked_for_and_a_grad_scaler_are_an_error() -> None:
    optimizer, params = _make(True, cuda_graph=True)
    optimizer._graph = GraphedStep(optimizer, required=True, capture=lambda work: StandIn(optimizer, work))
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    with pytest.raises(DeviceError, match="cannot work with a GradScaler"):
        _train(optimizer, params, CHANGES["nothing"][0], False, steps=1)


def test_tables_that_were_sent_anew_drop_the_graph() -> None:
    """While an obstacle lasts, other gradients may get tables, and those that the graph reads are freed."""
    optimizer, params = _make(True)
    _train(optimizer, params, CHANGES["nothing"][0], False, steps=6)
    optimizer.buffers.tables.sent += 1
    _train(optimizer, params, CHANGES["nothing"][0], False, steps=6)
    assert optimizer._graph is not None
    assert optimizer._graph.captures == 2


@pytest.mark.parametrize("option", ["betas", "eps"])
def test_numbers_in_tensors_that_change_in_place_drop_the_graph(option: str) -> None:
    """The graph has their old values."""

    def change(optimizer: ParallelMuon, step: int) -> None:
        group = optimizer.param_groups[1]
        if step == 0:
            values = {"betas": (torch.tensor(0.9), torch.tensor(0.95)), "eps": torch.tensor(1e-8)}
            group[option] = values[option]
        if step == 9:
            (group["betas"][0] if option == "betas" else group["eps"]).fill_(0.5)

    optimizer, params = _make(True)
    _train(optimizer, params, change, False)
    assert optimizer._graph is not None
    assert optimizer._graph.captures == 2


def test_a_grad_scaler_runs_without_a_graph_and_a_graph_outlives_it() -> None:
    optimizer, params = _make(True)
    _train(optimizer, params, CHANGES["nothing"][0], False, steps=5)
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    _train(optimizer, params, CHANGES["nothing"][0], False, steps=5)
    assert "now without a graph: a GradScaler" in repr(optimizer)
    del optimizer.found_inf  # type: ignore[attr-defined]
    _train(optimizer, params, CHANGES["nothing"][0], False, steps=5)
    assert "(8 of 15 steps replayed, captured 1 times)" in repr(optimizer)


def test_refuses_other_words() -> None:
    with pytest.raises(ConfigError, match="cuda_graph must be 'auto', True or False, got 'always'"):
        ParallelMuon([nn.Parameter(torch.zeros(3, 3))], cuda_graph="always")
