"""The whole step as one CUDA graph: about forty launches become one.

A graph replays the same kernels on the same memory. Between replays, values in memory may change: gradients, weights,
state, and the table of hyperparameters. The signature holds everything else: every address, the layout, and the
numbers that an algorithm takes by value (`Algorithm.constants`). When it changes, the step runs without a graph until
the signature has been stable for CALM steps, and is then captured again. Those steps also compile kernels, fill tables
and create the state.

Gradients that are set to None and created by every backward may have new addresses each time. After PATIENCE such
moves they get fixed memory (`fixed`): one copy, and from then on the optimizer's `zero_grad()` fills them with zeros in
place, and backward adds to them. If other code sets them to None all the same, "auto" gives that memory back, for it
would be a second copy of all gradients.

cuda_graph="auto" captures where that is safe and pays, and otherwise runs launch by launch: on a CPU, on several ranks,
with a GradScaler, inside a capture of the caller's, after FAILURES captures that failed, after IDLE steps without a
replay, where graphs are dropped after a few replays again and again, and where gradients are written by other code than
backward. cuda_graph=True asks for a graph: where there can be none, it is an error.

`Pilot` decides, and knows nothing of CUDA; `GraphedStep` acts.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from parbank.errors import DeviceError
from parbank.graphs import Recorded, recording, replay
from parbank.optim.algorithm import find_algorithm
from parbank.optim.dtensor import is_sharded
from parbank.optim.fixed import FixedGradients

if TYPE_CHECKING:
    from parbank.optim.parallel_muon import ParallelMuon

CALM = 2  # the first step makes the state, so that the second has the addresses of all later ones
PATIENCE = 8  # moves of gradients before they get fixed memory
FAILURES = 2  # captures that may fail before "auto" gives up
TRIALS = 8  # captures after which "auto" asks whether they pay:
WORTH = 8  # replays that one capture must bring on average; it takes about as long as so many steps without a graph
IDLE = 64  # steps in a row without a replay after which "auto" gives up; they use kernels that are slow to launch

_log = logging.getLogger("parbank")


class Signature(NamedTuple):
    """Everything that a captured step depends on besides values in memory."""

    weights: Sequence[Any]
    gradients: Sequence[Any]
    states: Sequence[Any]
    options: Sequence[Any]
    layout: Sequence[Any]
    buffers: Sequence[Any]

    def differences(self, other: "Signature") -> str:
        """The names of the parts that differ."""
        return ", ".join(name for name, a, b in zip(self._fields, self, other) if a != b)


class Pilot:
    """Decides for each step: run it launch by launch, capture it, or replay the capture."""

    def __init__(self, *, required: bool) -> None:
        """`required`: never give up."""
        self.required = required
        self.captures = 0
        """How often the step has been captured: more than a few times a run means that something keeps changing."""
        self.replays = 0
        self.steps = 0
        self.gave_up = ""
        """Why no further capture is tried; empty while captures are."""
        self.moved: set[int] = set()
        """The numbers of the parameters whose gradients have moved."""
        self._signature: Signature | None = None
        self._changed = ""
        self._calm = 0
        self._moves = 0
        self._idle = 0
        self._failures = 0
        self._recorded = False
        self._stretch = 0
        """Replays of the current graph."""
        self._trials = self._gains = 0
        """Captures and replays since gradients last got other memory."""

    @property
    def gradients_move(self) -> bool:
        """Whether gradients have moved so often, without a long run of replays, that they should get fixed memory."""
        return self._moves >= PATIENCE

    def decide(self, signature: Signature) -> str:
        """ "run", "capture" or "replay"."""
        self.steps += 1
        if self.gave_up:
            return "run"
        if signature != self._signature:
            self._note(signature)
            self._signature, self._calm, self._stretch, self._recorded = signature, 0, 0, False
        if self._recorded:
            return "replay"
        self._idle += 1
        if not self.required and self._idle > IDLE:
            self.give_up(f"{IDLE} steps in a row without a replay; last changed: {self._changed}")
            return "run"
        if self._calm < CALM:
            self._calm += 1
            return "run"
        if not self.required and self._trials >= TRIALS and self._gains < WORTH * self._trials:
            self.give_up(f"{self._trials} captures brought {self._gains} replays")
            return "run"
        return "capture"

    def _note(self, signature: Signature) -> None:
        """Notes what has changed."""
        if self._signature is None:
            return
        self._changed = signature.differences(self._signature)
        if self._recorded:
            _log.info("the optimizer's CUDA graph is dropped: changed %s", self._changed)
        pairs = enumerate(zip(self._signature.gradients, signature.gradients))
        moved = {number for number, (a, b) in pairs if a is not None and b is not None and a != b}
        self.moved |= moved
        self._moves += bool(moved)

    def ran(self, signature: Signature) -> None:
        """After a step without a graph. The first step makes the state: its addresses belong to the next signature."""
        self._signature = signature

    def captured(self) -> None:
        self._recorded = True
        self.captures += 1
        self._trials += 1
        _log.info("optimizer step captured as a CUDA graph (capture %d)", self.captures)

    def failed(self, cause: str) -> None:
        """After a capture that failed: another is tried after as many calm steps, and no third."""
        self._failures += 1
        self._calm = 0
        if self._failures >= FAILURES:
            self.give_up(f"{self._failures} captures failed: {cause}")

    def replayed(self) -> None:
        self.replays += 1
        self._gains += 1
        self._stretch += 1
        self._idle = 0
        if self._stretch >= WORTH:
            self._moves = 0

    def gradients_settled(self) -> None:
        """Gradients have got fixed memory: what was tried before says nothing about what follows."""
        self.moved.clear()
        self._moves = self._trials = self._gains = 0

    def give_up(self, reason: str) -> None:
        self.gave_up = reason
        _log.info("the optimizer runs without a CUDA graph from here on: %s", reason)


def capture_on_cuda(work: Callable[[], None]) -> Recorded:
    """Records the launches of a function; nothing is computed yet."""
    graph = torch.cuda.CUDAGraph()
    with recording(graph):
        work()
    return graph


class GraphedStep:
    """Runs an optimizer's step: eagerly while addresses or settings change, then from a graph."""

    def __init__(
        self,
        optimizer: "ParallelMuon",
        *,
        required: bool,
        capture: Callable[[Callable[[], None]], Recorded] = capture_on_cuda,
    ) -> None:
        self._optimizer = optimizer
        self._capture = capture
        self._recorded: Recorded | None = None
        self._fixed = FixedGradients()
        self._may_hold = True
        """Whether gradients may get fixed memory: not if other code takes them out of it."""
        self.pilot = Pilot(required=required)
        self.obstacle = ""
        """Why the last step could not use a graph; empty if it could."""

    @property
    def captures(self) -> int:
        return self.pilot.captures

    @property
    def active(self) -> bool:
        """Whether steps are captured, or on their way to it: they then use the kernels and the memory of a capture."""
        return not (self.obstacle or self.pilot.gave_up)

    def describe(self) -> str:
        """One line for people: what the graph does."""
        pilot = self.pilot
        counts = f"{pilot.replays} of {pilot.steps} steps replayed, captured {pilot.captures} times"
        reason = self.obstacle or pilot.gave_up
        return f"{counts}; now without a graph: {reason}" if reason else counts

    def step(self) -> None:
        optimizer, pilot = self._optimizer, self.pilot
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._find_unused()
        self.obstacle = self._find_obstacle(params)
        if not self.active:  # a graph outlives an obstacle: the next step without one replays it
            pilot.steps += 1
            optimizer.run()
            return
        self._settle_gradients(params)
        action = pilot.decide(self._sign(params))
        if action == "capture" and not self._record():
            action = "run"
        if action == "run":
            self._recorded = None
            if pilot.gave_up:
                self._forget()
            optimizer.run()
            pilot.ran(self._sign(params))
            return
        assert self._recorded is not None
        replay(self._recorded)
        pilot.replayed()

    def _find_obstacle(self, params: list[Tensor]) -> str:
        """Why this step cannot use a graph. An error where one was asked for and there can be none."""
        if getattr(self._optimizer, "found_inf", None) is not None:
            if self.pilot.required:
                raise DeviceError(
                    "cuda_graph=True cannot work with a GradScaler, which brings new tensors every step; train in bfloat16 "
                    "without a scaler, or pass cuda_graph='auto'"
                )
            return "a GradScaler brings new tensors every step"
        if self._capture is not capture_on_cuda:
            return ""
        if not params or not params[0].is_cuda:
            if not params:
                return "there are no parameters"
            if self.pilot.required:
                raise DeviceError(
                    f"cuda_graph=True needs parameters on a GPU, and they are on {params[0].device}; "
                    "move the model there first, or leave it out"
                )
            return f"the parameters are on {params[0].device}"
        if self.pilot.required:
            return ""
        if any(map(is_sharded, params)):
            return "the parameters are DTensors"
        if self._optimizer.ranks.world > 1:
            return "several ranks; cuda_graph=True captures their collectives, too"
        return "the caller captures a graph" if torch.cuda.is_current_stream_capturing() else ""

    def _record(self) -> bool:
        """Captures the step. False where that failed and need not succeed."""
        try:
            self._recorded = self._capture(self._optimizer.run)
        except RuntimeError as error:
            if self.pilot.required:
                raise DeviceError(
                    "the optimizer step could not be captured as a CUDA graph; extra_captured must not wait for the device "
                    f"or copy from ordinary host memory. Leave out cuda_graph=True to run without. The cause: {error}"
                ) from error
            self.pilot.failed(str(error).strip().partition("\n")[0])
            return False
        self.pilot.captured()
        return True

    def _find_unused(self) -> None:
        """Sets gradients to None that were filled with zeros and that no code has written since."""
        if self._fixed and self._fixed.drop_unused() and not self.pilot.required:
            self.pilot.give_up("gradients are written by other code than backward")
            self._forget()

    def _settle_gradients(self, params: list[Tensor]) -> None:
        """Keeps gradients that move at fixed addresses."""
        if self.pilot.gradients_move and self._may_hold:
            self._fixed.hold([params[number] for number in sorted(self.pilot.moved) if number < len(params)])
            self.pilot.gradients_settled()
        if self._fixed and not self._fixed.bring_back(always=self.pilot.required):
            self._fixed.release()
            self._may_hold = False
            _log.info(
                "gradients move and are set to None by other code than the optimizer's zero_grad(), which would keep them in "
                "place: a CUDA graph would need a second copy of them, and is used only if they stop moving"
            )

    def _forget(self) -> None:
        """Gives back the memory of the graph and of gradients."""
        self._recorded = None
        self._fixed.release()

    def zero_gradients(self, params: list[Tensor]) -> list[Tensor]:
        """Fills the gradients that lie at fixed addresses with zeros. Returns the parameters whose gradients do not."""
        return self._fixed.zero(params) if self._fixed else params

    def _sign(self, params: list[Tensor]) -> Signature:
        """Short on purpose: every replay waits for it. A weight's dtype and strides are in the layout, or cannot change at one
        address; new gradients at an old address may have another memory order."""
        optimizer = self._optimizer
        numbers = [(group["maximize"], find_algorithm(group).constants(group)) for group in optimizer.param_groups]
        clips = optimizer.max_norm is not None  # decides the order of the step
        states = [held.values() for param in params if (held := optimizer.state.get(param))]
        grads = [param.grad for param in params]
        return Signature(
            weights=[param.data_ptr() for param in params],
            gradients=[None if grad is None else (grad.data_ptr(), grad.stride(), grad.dtype) for grad in grads],
            states=[value.data_ptr() for values in states for value in values if isinstance(value, Tensor)],
            options=[numbers, optimizer.reduce_gradients, clips, id(optimizer.extra_captured)],
            layout=optimizer.layout_key(),
            buffers=optimizer.buffers.addresses(),
        )
