"""ParallelMuon: Muon for matrices and AdamW for the rest, as one optimizer for one rank and for many. (Muon: Jordan et
al.; the parallel step: parameter-golf #399.)

This file is the optimizer as a user sees it. `step` is what a step does. `layout` decides which blocks form a batch and
which rank owns them. `communication` has the collectives; `algorithms` (behind the interface in `algorithm`),
`newton_schulz` and `update` the arithmetic; `state` the contents of a checkpoint.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from parbank.config import require
from parbank.errors import ConfigError
from parbank.gpu import on_device
from parbank.optim import backward, loading, state, step
from parbank.optim.agreement import Agreement
from parbank.optim.algorithm import MatrixAlgorithm, find_algorithm, is_matrix_group
from parbank.optim.algorithms import ALGORITHMS
from parbank.optim.banking import zero_bank_grads
from parbank.optim.buffers import Buffers
from parbank.optim.collect import check_gradients
from parbank.optim.communication import Ranks
from parbank.optim.graph import GraphedStep
from parbank.optim.groups import are_sharded, check_group, check_names, complete_group, follow_schedulers, name_params
from parbank.optim.hyper import check_max_norm
from parbank.optim.layout import LAYOUT_OPTIONS, Batch, plan_batches
from parbank.optim.meeting import Meeting
from parbank.optim.newton_schulz import Coefficients
from parbank.optim.skipped import SkipWatch

ADD_ON_ALL = "a step needs the same groups on every rank: add the group on every rank"


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of PyTorch's optimizer without the decorator that excludes it from torch.compile.

    At its first call the decorator imports the compiler, which takes seconds. If no other code has imported it, nothing
    is being compiled.
    """
    return method if "torch._dynamo" in sys.modules else getattr(method, "__wrapped__", method)


class ParallelMuon(torch.optim.Optimizer):
    """Muon on batches of matrices, AdamW on everything else, over any number of ranks.

    params: parameters or groups, as for any optimizer; `split_parameters(model)` makes the groups. A group has
    algorithm="muon" (the default), "adamw" or another registered one (see `parbank.optim.algorithm`), and may set any of
    the options below for itself. Floats in groups may change before any step.

    Options of Muon:

    - lr, momentum, nesterov: `buf = momentum * buf + grad`; the update is `grad + momentum * buf`, or `buf`.
    - weight_decay, cautious: decoupled decay; cautious decays only where the update shrinks the weight.
    - ns_steps, coefficients: steps of Newton-Schulz; "quintic", "polar_express", a triple or a list of triples.
    - method: "auto", or "plain", "symmetric" or "gram": the same result by other products.
    - lr_scale: a factor for the shape. "spectral": `max(1, rows / cols)^0.5`; "rms": `0.2 max(rows, cols)^0.5`; None.
    - num_heads: orthogonalise each head's rows by themselves. split_sizes, of a group: the same for blocks of rows of these
      heights, as in a joint query, key and value.
    - normuon, row_beta: divide each neuron's update by its running RMS, and keep the matrix's norm.
    - equilibrate: divide each neuron's row by its norm before Newton-Schulz.
    - transposed, of a group: for each matrix of a stack, whether it is stored transposed.
    - flatten, of a group: take a 3-D weight as one convolution, not as a stack.

    Options of AdamW: adam_lr, betas, eps, weight_decay. maximize, of both: go along the gradient, not against it.

    Options of the whole step:

    - max_norm: clips the gradient by its norm over all parameters and all ranks; None for no clip.
    - process_group: the ranks to work with; by default all of them.
    - reduce_gradients=False: gradients are already equal on all ranks (DDP). The work is split and nothing is reduced.
    - cuda_graph: True replays the step as one CUDA graph, on one GPU. "auto" does so once the step is stable, and
      `repr(optimizer)` says what it did.
    - extra_captured: called at the end of each step, with cuda_graph=True inside the graph: an average of the weights, for
      instance.

    After a step, as 0-d tensors on the device: last_grad_norm (before the clip), last_skipped (the gradient was not finite
    and nothing was changed), skipped_in_a_row. Gradients are used up: their values after a step mean nothing.
    With several ranks, step, state_dict, load_state_dict and add_param_group are collective: call them on every rank.
    With reduce_gradients=False every rank holds the whole state, and one rank may call state_dict alone.

        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
        >>> optimizer = parbank.ParallelMuon(parbank.split_parameters(model, lr=0.02, adam_lr=3e-4), max_norm=1.0)
        >>> model(torch.randn(4, 8)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> optimizer.last_skipped.item()
        False
    """

    _part: tuple[int, int] | None = None
    """Of a copy or an unpickled optimizer: (rank, ranks) where its state is the part of one rank."""

    # GradScaler then passes scale and overflow as tensors, without waiting for the device.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        cautious: bool = False,
        ns_steps: int = 5,
        coefficients: Coefficients = "quintic",
        lr_scale: str | None = "spectral",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        *,
        maximize: bool = False,
        adam_lr: float | Tensor = 3e-4,
        normuon: bool = False,
        row_beta: float = 0.95,
        equilibrate: bool = False,
        num_heads: int | None = None,
        method: str = "auto",
        max_norm: float | None = None,
        process_group: Any = None,
        reduce_gradients: bool = True,
        cuda_graph: bool | str = False,
        extra_captured: Callable[[], None] | None = None,
    ) -> None:
        defaults = {
            "algorithm": "muon",
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "cautious": cautious,
            "ns_steps": ns_steps,
            "coefficients": coefficients,
            "lr_scale": lr_scale,
            "betas": betas,
            "eps": eps,
            "maximize": maximize,
            "normuon": normuon,
            "row_beta": row_beta,
            "equilibrate": equilibrate,
            "num_heads": num_heads,
            "split_sizes": None,
            "method": method,
            "transposed": None,
            "flatten": False,
        }
        if not isinstance(params, Iterable) or isinstance(params, nn.Module):
            raise ConfigError(
                f"ParallelMuon takes parameters or groups of them, got a {type(params).__name__}; "
                "split_parameters(model) makes the groups of a model"
            )
        self._adam_lr = adam_lr
        self.max_norm = max_norm
        self.reduce_gradients = reduce_gradients
        self.extra_captured = extra_captured
        check_max_norm(max_norm)
        require(
            extra_captured is None or callable(extra_captured),
            f"extra_captured must be callable, got {extra_captured!r}",
        )
        for name in ("muon", "adamw"):  # whose options these are
            ALGORITHMS[name].check_options(defaults)
        self._start(process_group)
        super().__init__(params, defaults)
        require(cuda_graph in (True, False, "auto"), f"cuda_graph must be 'auto', True or False, got {cuda_graph!r}")
        self._cuda_graph = cuda_graph
        self._graph = self._make_graph()

    def _make_graph(self) -> GraphedStep | None:
        return GraphedStep(self, required=self._cuda_graph is True) if self._cuda_graph else None

    def _start(self, process_group: Any) -> None:
        """Creates everything that a copy of this optimizer cannot share."""
        self._ranks = Ranks(process_group)
        self._layout: tuple[Any, list[Batch]] | None = None
        self.buffers = Buffers()
        self._agreement = Agreement()
        self.begun: backward.Reductions | None = None
        self._watch = SkipWatch()

    # --- groups and state ----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        usable = isinstance(param_group, dict) and "params" in param_group
        require(usable, f"a parameter group is a dict with 'params', got {param_group!r}")
        complete_group(param_group, self.defaults, self._adam_lr)
        check_names(param_group, self.defaults)
        name_params(param_group, self.param_groups)
        if self._layout is not None and self._ranks.world > 1:  # later than the first step, which compares ranks
            Meeting(self._ranks, "ParallelMuon.add_param_group()", ADD_ON_ALL).wait()
            self._agreement = Agreement()
        _plain(torch.optim.Optimizer.add_param_group)(self, param_group)
        try:
            check_group(self.param_groups[-1])
        except ConfigError:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """As for any optimizer, with whole tensors: it loads on any number of ranks. Collective with reduce_gradients=True."""
        # Before the user's hooks, which then see whole tensors.
        handle = self.register_state_dict_post_hook(lambda _, saved: state.complete(self, saved), prepend=True)
        try:
            return _plain(torch.optim.Optimizer.state_dict)(self)
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state written on any number of ranks; each rank keeps its part. Collective.

        Options that the state lacks stay as they are. States of torch.optim.AdamW and torch.optim.Muon load, too.
        """
        if not isinstance(state_dict, dict):
            loading.check_form(state_dict)
        prepared: dict[str, Any] = {}

        def prepare(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            prepared.update(loading.prepare(self, given))
            return prepared

        def load(_: Any) -> None:
            self._part = None
            state.load(self, prepared)
            if self._ranks.world > 1:
                self._agreement.remember(self.param_groups, prepared)
            self._reset_counters()

        # After the user's hooks that may change the state, and before those that see the result.
        handles = [
            self.register_load_state_dict_pre_hook(prepare),
            self.register_load_state_dict_post_hook(load, prepend=True),
        ]
        try:
            _plain(torch.optim.Optimizer.load_state_dict)(self, state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def reset(self) -> None:
        """Forgets momentum, moments, step counts and skipped steps, as in a new optimizer."""
        self.state.clear()
        self._part = None
        self._reset_counters()

    def _reset_counters(self) -> None:
        self._watch = SkipWatch()
        self.buffers.reset_counters()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As for any optimizer. By default, gradients that a CUDA graph reads or that lie in a bank stay in place."""
        backward.drop(self)
        if set_to_none is not None or self._cuda_graph is True:
            _plain(torch.optim.Optimizer.zero_grad)(self, set_to_none=bool(set_to_none))
            return
        params = [param for group in self.param_groups for param in group["params"]]
        if self._graph is not None:
            params = self._graph.zero_gradients(params)
        for param in zero_bank_grads(params):
            param.grad = None

    def reducing(self) -> AbstractContextManager[None]:
        """On several ranks, reduces matrices' gradients while backward runs: `with opt.reducing(): loss.backward()`.

        Around the last backward before a step, on every rank; leave the gradients alone until `step()`.
        """
        if self._ranks.world == 1 or not self.reduce_gradients or are_sharded(self.param_groups, reduces=True):
            return nullcontext()
        self._agree()
        return backward.reducing(self)

    def __getstate__(self) -> dict[str, Any]:
        state.warn_of_copy(self)
        kept = {key: getattr(self, key) for key in ("_adam_lr", "max_norm", "reduce_gradients", "_cuda_graph")}
        batches = self._layout[1] if self._layout else []
        return {**super().__getstate__(), **kept, "_part": state.find_part(self._ranks, batches, self.state)}

    def __setstate__(self, values: dict[str, Any]) -> None:
        super().__setstate__(values)
        if "_ranks" not in self.__dict__:  # a copy or an unpickled optimizer: process groups and graphs are not copied
            self._cuda_graph = getattr(self, "_cuda_graph", False)
            self.extra_captured, self._graph = None, self._make_graph()
            self._start(None)
        for group in self.param_groups:
            complete_group(group, self.defaults, self._adam_lr)

    def __repr__(self) -> str:
        lines = super().__repr__()
        graph = str(self._cuda_graph) if self._graph is None else f"{self._cuda_graph} ({self._graph.describe()})"
        return f"{lines[:-1]}cuda_graph: {graph}\n)"

    # --- layout --------------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Ranks:
        return self._ranks

    def batches(self) -> list[Batch]:
        """The current layout: on one rank, of the matrices with a gradient; on several, of all, so that ranks agree."""
        params = None
        if self._ranks.world == 1:
            matrices = [p for group in self.param_groups if is_matrix_group(group) for p in group["params"]]
            params = [p for p in matrices if p.grad is not None]
        key = (self.layout_key(), self.reduce_gradients, None if params is None else tuple(map(id, params)))
        if self._layout is None or self._layout[0] != key:
            state.check_part(self._ranks, self._part)
            old = self._layout
            for group in self.param_groups:  # its options may have changed
                check_group(group)
            state.check_shapes(self, old[1] if old else [])
            moved = state.gather(self, old[1]) if old and self.state and self._ranks.world > 1 else {}
            self.forget_layout()
            equal = not self.reduce_gradients
            self._layout = (key, plan_batches(self.param_groups, params, self._ranks.world, equal))
            state.scatter(self, moved)
            state.arrange_state(self, self._layout[1])
        return self._layout[1]

    def layout_key(self) -> tuple[Any, ...]:
        """Everything besides gradients that a layout depends on, to detect a change."""
        key: list[Any] = []
        for group in self.param_groups:
            algorithm = find_algorithm(group)
            if isinstance(algorithm, MatrixAlgorithm):
                options = tuple(group[name] for name in (*LAYOUT_OPTIONS, *algorithm.layout_options))
                key.append((algorithm, options, tuple((id(p), p.dtype, p.shape, p.stride()) for p in group["params"])))
            else:
                key.append(len(group["params"]))
        return tuple(key)

    def forget_layout(self) -> None:
        """Plans a new layout at the next step. The state must be whole."""
        self._layout = None
        self.buffers.forget_layout()

    def _agree(self) -> None:
        """Compares ranks, at the first step and now and then."""
        if self._ranks.world > 1:
            self._agreement.look(self, self._ranks)

    @property
    def last_grad_norm(self) -> Tensor:
        """The norm of all gradients at the last step, before the clip: 0-d, on the device, a copy that later steps leave alone."""
        return self.buffers.grad_norm.clone()

    @property
    def last_skipped(self) -> Tensor:
        """Whether the last step was skipped; a copy, as above."""
        return self.buffers.skipped.clone()

    @property
    def skipped_in_a_row(self) -> Tensor:
        """How many steps up to the last were skipped in a row; a copy, as above."""
        return self.buffers.skipped_in_a_row.clone()

    # --- the step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step. Returns the result of the closure. Inside `torch.compile` it runs as it is, after a graph break."""
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._step_with)(closure)
        return self._step_with(closure)

    def _step_with(self, closure: Callable[[], float] | None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._ranks.check()
        device = check_gradients(self.param_groups)
        with on_device(device):  # Triton and captures use the current device, which need not be the parameters'
            self._step(device)
        return loss

    def _step(self, device: torch.device) -> None:
        self.buffers.move(device)
        follow_schedulers(self.param_groups)
        self._agree()
        self.buffers.hyper.refresh(self.param_groups, self.max_norm)
        if self._graph is not None:
            self._graph.step()
        else:
            self.run()
        if self.extra_captured is not None and self._cuda_graph is not True:
            self.extra_captured()
        if getattr(self, "found_inf", None) is None:  # a GradScaler skips steps as it searches for its scale
            self._watch.look(self.buffers.skipped_in_a_row, self.param_groups)

    def run(self) -> None:
        """The step itself, on the current gradients and hyperparameters: the part that a CUDA graph captures."""
        # A step that prepares a capture uses its kernels and its memory.
        self.buffers.captured = self._graph is not None and self._graph.active
        step.run(self)
        if self.extra_captured is not None and self._cuda_graph is True:
            self.extra_captured()
