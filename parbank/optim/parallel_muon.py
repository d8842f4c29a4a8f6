"""ParallelMuon: Muon for matrices and AdamW for the rest, as one optimizer for one rank and for many. (Muon: Jordan et
al.; the parallel step: parameter-golf #399.)

A step, for any number of ranks:

1. collect: reduces the gradients of each batch to the rank that owns them, while AdamW runs; then one norm over all
   gradients, on the device.
2. orthogonalize: batch by batch, the owner updates the momentum, runs Newton-Schulz, and sends the updates while the
   next batch is computed. With a clip AdamW runs here, during the last all-gather: the clip is global, so that no
   update can begin before the last gradient has arrived.
3. apply: every rank subtracts the same updates from the same weights.

`layout` decides which blocks form a batch and which rank owns them. `communication` has the collectives; `algorithms`
(behind the interface in `algorithm`), `newton_schulz` and `update` the arithmetic; `state` the contents of a
checkpoint.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from parbank.config import require
from parbank.errors import ConfigError
from parbank.optim import backward, kernels, loading, state, update
from parbank.optim.agreement import Agreement
from parbank.optim.algorithm import ElementwiseAlgorithm, MatrixAlgorithm, Settings, Work, find_algorithm
from parbank.optim.algorithms import ALGORITHMS
from parbank.optim.banking import zero_bank_grads
from parbank.optim.collect import SCALES_DIFFER, Collected, Small, check_gradients, collect, measure, place_gradients
from parbank.optim.communication import Ranks, wait
from parbank.optim.dtensor import is_sharded
from parbank.optim.graph import GraphedStep
from parbank.optim.groups import check_group, complete_group, find_raised, follow_schedulers, negate
from parbank.optim.hyper import DECAY, LR, HyperTable, send
from parbank.optim.layout import LAYOUT_OPTIONS, Batch, Piece, plan_batches
from parbank.optim.memory import Views
from parbank.optim.newton_schulz import Coefficients
from parbank.optim.sharded import step_dtensors
from parbank.optim.skipped import SkipWatch
from parbank.optim.update import Control


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of PyTorch's optimizer without the decorator that excludes it from torch.compile.

    At its first call the decorator imports the compiler, which takes 3 s. If no other code has imported it, nothing
    is being compiled.
    """
    return method if "torch._dynamo" in sys.modules else getattr(method, "__wrapped__", method)


class ParallelMuon(torch.optim.Optimizer):
    """Muon on batches of matrices, AdamW on everything else, over any number of ranks.

    params: parameters or groups, as for any optimizer; `split_parameters(model)` makes the groups. A group has
    algorithm="muon" (the default), "adamw" or another registered one (see `parbank.optim.algorithm`), and may set any of
    the options below for itself. Floats in groups may change before any step.

    Muon: lr, momentum, nesterov, weight_decay, cautious (decay only where the update shrinks the weight), ns_steps,
    coefficients ("quintic", "polar_express", a triple or a list of triples), method, lr_scale ("spectral", "rms" or None),
    num_heads (orthogonalise each head's rows by themselves), split_sizes (the same for blocks of rows of these heights, as
    in a joint query, key and value), normuon and row_beta (normalise each neuron's update),
    equilibrate (normalise each neuron's row before Newton-Schulz),
    transposed (per matrix of a stack: the logical matrix is the transpose of the stored one), flatten (take a 3-D weight as
    one convolution, not as a stack).
    AdamW: adam_lr, betas, eps, weight_decay. Both: maximize (go along the gradient, not against it).

    max_norm clips the gradient by its norm over all parameters and all ranks. process_group: the ranks to work with; by
    default all of them. reduce_gradients=False says that gradients are already equal on all ranks (DDP): the work is
    split and nothing is reduced. cuda_graph="auto" replays the step as one CUDA graph once it is stable, on one GPU; what it
    did is in `repr(optimizer)`. True asks for a graph, and False for none. extra_captured is called at the end of each step,
    with cuda_graph=True inside the graph: an average of the weights, for instance.

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
        self._adam_lr = adam_lr
        self.max_norm = max_norm
        self.reduce_gradients = reduce_gradients
        self.extra_captured = extra_captured
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
        self._device = torch.device("cpu")
        self._hyper = HyperTable(self._device)
        self._constants: dict[tuple[float, ...], Tensor] = {}
        self._tables = kernels.Tables()
        self._staging: dict[int, Tensor] = {}
        self._views = Views()
        self._layouts = 0
        self._agreement = Agreement()
        self.begun: backward.Reductions | None = None
        self._watch = SkipWatch()
        self.last_grad_norm = torch.zeros((), dtype=torch.float32, device=self._device)
        self.last_skipped = torch.zeros((), dtype=torch.bool, device=self._device)
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int64, device=self._device)

    # --- groups and state ----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        complete_group(param_group, self.defaults, self._adam_lr)
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
        prepared: dict[str, Any] = {}

        def prepare(_: Any, given: dict[str, Any]) -> dict[str, Any]:
            prepared.update(loading.prepare(self, given))
            return prepared

        def load(_: Any) -> None:
            state.load(self, prepared)
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
        self._reset_counters()

    def _reset_counters(self) -> None:
        self._watch = SkipWatch()
        for counter in (self.last_grad_norm, self.last_skipped, self.skipped_in_a_row):
            counter.zero_()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """As for any optimizer. By default, gradients that a CUDA graph reads or that lie in a bank stay in place."""
        backward.drop(self)
        if set_to_none is not None or self._cuda_graph is True:
            _plain(torch.optim.Optimizer.zero_grad)(self, set_to_none=bool(set_to_none))
            return
        if self._graph is not None and self._graph.holds_gradients and self._graph.active:
            self._graph.zero_gradients()
            return
        for param in zero_bank_grads([param for group in self.param_groups for param in group["params"]]):
            param.grad = None

    def reducing(self) -> AbstractContextManager[None]:
        """On several ranks, reduces matrices' gradients while backward runs: `with opt.reducing(): loss.backward()`.

        Around the last backward before a step, on every rank; leave the gradients alone until `step()`.
        """
        if self._ranks.world == 1 or not self.reduce_gradients or self._sharded():
            return nullcontext()
        self._agree()
        return backward.reducing(self)

    def __getstate__(self) -> dict[str, Any]:
        state.warn_of_copy(self)
        kept = {key: getattr(self, key) for key in ("_adam_lr", "max_norm", "reduce_gradients", "_cuda_graph")}
        return {**super().__getstate__(), **kept}

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
        """The current layout: on one rank, of the parameters with a gradient; on several, of all, so that ranks agree."""
        params = None
        if self._ranks.world == 1:
            params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        key = (self.layout_key(), self.reduce_gradients, None if params is None else tuple(map(id, params)))
        if self._layout is None or self._layout[0] != key:
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

    def fixed_addresses(self) -> tuple[int, ...]:
        """Memory that a captured step reads and that is neither a parameter's nor its state's; the layout's by its number."""
        kept = (self._hyper.values, self.last_grad_norm, self.last_skipped, self.skipped_in_a_row)
        return (self._layouts, *(tensor.data_ptr() for tensor in kept))

    def forget_layout(self) -> None:
        """Plans a new layout at the next step. The state must be whole."""
        self._layout = None
        self._constants.clear()
        self._tables.clear()
        self._staging.clear()
        self._views.clear()
        self._layouts += 1

    def _constant(self, values: Sequence[float]) -> Tensor:
        """Constant numbers on the device, sent once: a captured step must not send any."""
        key = tuple(values)
        if key not in self._constants:
            self._constants[key] = send(values, torch.float32, self._device)
        return self._constants[key]

    def _sharded(self) -> bool:
        """Whether the parameters are DTensors (FSDP2, tensor parallelism), whose gradients are reduced elsewhere."""
        kinds = {is_sharded(param) for group in self.param_groups for param in group["params"]}
        if len(kinds) == 2 and self.reduce_gradients and self._ranks.world > 1:
            raise ConfigError(
                "some parameters are sharded by FSDP2, which reduces their gradients, and some are plain tensors, whose gradients "
                "are not reduced; call fully_shard on the whole model, or reduce them yourself and pass reduce_gradients=False"
            )
        return True in kinds

    def _agree(self) -> None:
        """Compares ranks, at the first step and now and then."""
        if self._ranks.world > 1:
            self._agreement.look(self, self._ranks)

    @property
    def _captured(self) -> bool:
        """Whether this step is captured or prepares a capture."""
        return self._graph is not None and self._graph.active

    def _settle(self) -> None:
        """Follows the parameters to their device."""
        self._ranks.check()
        device = check_gradients(self.param_groups)
        if device != self._device:
            self._device = device
            self._hyper = HyperTable(device)
            self._constants.clear()
            for name in ("last_grad_norm", "last_skipped", "skipped_in_a_row"):
                setattr(self, name, getattr(self, name).to(device))

    # --- the step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step. Returns the result of the closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settle()
        follow_schedulers(self.param_groups)
        self._agree()
        self._hyper.refresh(self.param_groups, self.max_norm)
        if self._graph is not None:
            self._graph.step()
        else:
            self.run()
        if self.extra_captured is not None and self._cuda_graph is not True:
            self.extra_captured()
        if getattr(self, "found_inf", None) is None:  # a GradScaler skips steps as it searches for its scale
            self._watch.look(self.skipped_in_a_row, self.param_groups)
        return loss

    def run(self) -> None:
        """The step itself, on the current gradients and hyperparameters: the part that a CUDA graph captures."""
        raised = find_raised(self.param_groups)
        negate(raised)
        self._run()
        negate(raised)  # exact: gradients are as if nothing had been done
        if self.extra_captured is not None and self._cuda_graph is True:
            self.extra_captured()

    def _run(self) -> None:
        batches = self.batches()
        pieces = [batch.pieces(self._ranks.rank) for batch in batches]
        sharded = self._sharded()
        if sharded:
            place_gradients(self.param_groups, self._ranks.world, self.reduce_gradients)
        reduce = self.reduce_gradients and not sharded
        staging = self._staging if self._captured else None
        early = self.max_norm is None
        others = [batch.others(self._ranks.rank) for batch in batches]
        needed = [mine + rest for mine, rest in zip(pieces, others)]
        options = (self._ranks, reduce, self._constant, staging, early, backward.take(self, batches))
        collected = collect(self.param_groups, batches, needed, *options)
        require(getattr(self, "grad_scale", None) is None or collected.divisor == 1, SCALES_DIFFER)
        if collected.spoilt is not None:
            factor = torch.full((), 1 / collected.divisor, dtype=torch.float32, device=self._device)
            values = torch.stack([1 - collected.spoilt.float(), factor])
            self._step_small(collected, values)
        control = self._measure(collected)
        flying: list[tuple[Batch, Tensor, list[Any]]] = []
        for number, (batch, mine, rest) in enumerate(zip(batches, pieces, others)):
            grads, collected.pieces[number] = collected.pieces[number], []  # freed with this batch
            flying.append((batch, *self._share_updates(batch, mine, grads[: len(mine)], control)))
            if batch.whole and batch.world > 1:
                batch.algorithm.follow(self._work(batch, rest, grads[len(mine) :], control))
                state.share_vectors(self, batch)
            # One batch in flight while the next is worked on; on one rank, none.
            while len(flying) > (self._ranks.world > 1):
                self._apply(*flying.pop(0), control)
        if collected.spoilt is None:
            self._step_small(collected, control.values)
        if sharded:
            step_dtensors(self.param_groups, self.state, control)
        for batch, updates, works in flying:
            self._apply(batch, updates, works, control)

    def _measure(self, collected: Collected) -> Control:
        """The global norm, the clip, and whether the step is taken: all on the device."""
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        norm, values = measure(collected, self._ranks, self._hyper.max_norm, grad_scale, found_inf)
        skipped = values[0] == 0
        self.last_grad_norm.copy_(norm)
        self.last_skipped.copy_(skipped)
        self.skipped_in_a_row.add_(1).mul_(skipped)
        active = collected.active
        if active is None:
            active = self._constant([1.0] * sum(len(group["params"]) for group in self.param_groups))
        return Control(values, self._hyper.values, active)

    def _share_updates(
        self, batch: Batch, pieces: list[Piece], grads: list[Tensor], control: Control
    ) -> tuple[Tensor, list[Any]]:
        """Finds the updates of the blocks that this rank owns, and starts sharing them: all updates of the batch, on the way."""
        state.init_state(self.state, batch, pieces)
        return self._ranks.gather(batch.algorithm.directions(self._work(batch, pieces, grads, control)), batch)

    def _work(self, batch: Batch, pieces: list[Piece], grads: list[Tensor], control: Control) -> Work:
        def blocks(name: str) -> list[Tensor]:
            held = [state.tensor_of(self.state, name, piece.member, batch) for piece in pieces]
            key = (id(batch), name, id(pieces))  # the batch keeps its lists of pieces
            return self._views.get(key, held, lambda: state.find_blocks(self.state, name, pieces, batch))

        return Work(batch, pieces, grads, control, blocks, self._tables, captured=self._captured)

    def _step_small(self, collected: Collected, values: Tensor) -> None:
        """The groups of element-wise algorithms; `values` as in Control."""
        for small in collected.small:
            self._step_group(small, values)

    def _step_group(self, small: Small, values: Tensor) -> None:
        """Steps one group. A parameter without a gradient here may have one on another rank: then it is stepped
        separately."""
        group, hyper = self.param_groups[small.group], self._hyper.values[small.group]
        algorithm = find_algorithm(group)
        assert isinstance(algorithm, ElementwiseAlgorithm)
        for param in small.params:
            algorithm.prepare_state(self.state[param], param)
        taken, factor = values
        together = [n for n, flag in enumerate(small.flags) if flag is None]
        alone = [n for n, flag in enumerate(small.flags) if flag is not None]
        for numbers in [together, *([n] for n in alone)]:
            flag = small.flags[numbers[0]] if numbers else None
            mine = taken if flag is None else taken * (flag > 0)
            settings = Settings(hyper[LR], hyper[DECAY], factor, mine, captured=self._captured)
            params = [small.params[n] for n in numbers]
            grads = [small.grads[n] for n in numbers]
            algorithm.step(params, grads, [self.state[param] for param in params], group, settings)

    def _apply(self, batch: Batch, updates: Tensor, works: list[Any], control: Control) -> None:
        """Subtracts the updates of a batch from the weights, once they have arrived."""
        wait(works)
        weights = [member.param for member in batch.members]
        params = self._views.get(
            (id(batch), "weights"), weights, lambda: [member.blocks(member.param) for member in batch.members]
        )
        low = [
            member.blocks(self.state[member.param]["low_bits"]) if member.param.dtype == torch.bfloat16 else None
            for member in batch.members
        ]
        scales = self._constant(batch.scales)
        if kernels.use_kernels(batch, control):
            kernels.apply(batch, updates, params, low, scales, control, self._tables)
        else:
            update.apply(batch, updates, params, low, scales, control)
