"""On a GPU: `cuda_graph="auto"` beside the same training without a graph, one mishap a test."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parbank.graphs import recording
from parbank.optim import ParallelMuon
from parbank.optim.graph import IDLE, PATIENCE

pytestmark = pytest.mark.gpu

STEPS = PATIENCE + 16
WIDTH = 128


class Net(nn.Module):
    """Layers in a row; a forward may leave some out."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])

    def forward(self, x: Tensor, leave_out: tuple[int, ...] = ()) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number not in leave_out:
                x = x + torch.tanh(layer(x))
        return x


def _optimizer(net: nn.Module, cuda_graph: bool | str, **options: Any) -> ParallelMuon:
    """With and without a graph by the same arithmetic, for these tests feed the weights back into the gradients: a bias that
    is rounded otherwise ends as matrices that differ by 2e-4, by Newton-Schulz in float16. So cuBLAS makes the products,
    and AdamW's decay is a tensor: a number would be its kernel's part without a graph, and a pass of its own in one."""
    matrices = [param for param in net.parameters() if param.ndim == 2]
    rest = [param for param in net.parameters() if param.ndim == 1]
    decay = torch.full((), 0.1, device=rest[0].device)
    groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw", "lr": 0.01, "weight_decay": decay}]
    return ParallelMuon(groups, **{"method": "plain", "weight_decay": 0.1, **options}, cuda_graph=cuda_graph)


def _batch(step: int) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()


Train = Callable[[Net, ParallelMuon], Iterator[None]]
"""Prepares the gradients of one step after another."""


def _run(
    cuda_graph: bool | str, train: Train, net: Net | None = None, **options: Any
) -> tuple[ParallelMuon, list[Tensor]]:
    net = net or Net().cuda()
    optimizer = _optimizer(net, cuda_graph, **options)
    for _ in train(net, optimizer):
        optimizer.step()
    torch.cuda.synchronize()
    return optimizer, [param.detach() for param in net.parameters()]


def _compare(train: Train, **options: Any) -> Any:
    """Trains with "auto" and without a graph, compares the weights, and returns the pilot."""
    optimizer, found = _run("auto", train, **options)
    _, expected = _run(False, train, **options)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert optimizer._graph is not None
    print(repr(optimizer).splitlines()[-2])
    return optimizer._graph.pilot


def _usual(net: Net, optimizer: ParallelMuon) -> Iterator[None]:
    held = []
    for step in range(STEPS):
        optimizer.zero_grad()
        net(_batch(step)).square().mean().backward()
        held.append(torch.empty(1000 * step + 1, device="cuda"))  # so that new gradients land elsewhere
        yield


def test_the_usual_loop_is_replayed() -> None:
    assert _compare(_usual, max_norm=1.0).replays >= 10


# --- a capture that fails ---------------------------------------------------------------------------------------------


def _fail_in_a_capture() -> None:
    """Waiting for the device is forbidden in a capture, and ends it."""
    with recording(torch.cuda.CUDAGraph()):
        torch.ones(4, device="cuda").sum().item()


def test_a_capture_that_fails_leaves_the_stream() -> None:
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        _fail_in_a_capture()
    assert torch.cuda.current_stream() == before
    assert not torch.cuda.is_current_stream_capturing()


def test_after_a_capture_that_fails_another_succeeds() -> None:
    with pytest.raises(RuntimeError):
        _fail_in_a_capture()
    x, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    with recording(graph):
        x.add_(1)
    graph.replay()
    assert x.tolist() == [1.0] * 4


def test_after_a_capture_that_fails_there_are_random_numbers_and_replays_of_other_graphs() -> None:
    """PyTorch 2.11 keeps the default generator in the capture that failed."""
    x, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    with recording(graph):
        x.add_(torch.rand(4, device="cuda") + 1)
    with pytest.raises(RuntimeError):
        _fail_in_a_capture()
    assert torch.rand(4, device="cuda").max().item() < 1
    graph.replay()
    assert x.min().item() >= 1


def test_captures_that_fail_keep_no_memory() -> None:
    """Also of other streams' tensors, which the allocator holds back as long as it believes in a capture."""
    side = torch.cuda.Stream()

    def use_another_stream() -> None:
        x = torch.ones(2**20, device="cuda")
        x.record_stream(side)
        with torch.cuda.stream(side):
            x.add_(1)

    with pytest.raises(RuntimeError):
        _fail_in_a_capture()
    for _ in range(2):
        use_another_stream()
        torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        use_another_stream()
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**23


def test_an_optimizer_whose_captures_fail_trains_on() -> None:
    def train(net: Net, optimizer: ParallelMuon) -> Iterator[None]:
        run = optimizer.run

        def wait_in_a_capture() -> None:
            run()
            if torch.cuda.is_current_stream_capturing():
                optimizer.buffers.grad_norm.item()

        optimizer.run = wait_in_a_capture  # type: ignore[method-assign]
        yield from _usual(net, optimizer)

    pilot = _compare(train)
    assert pilot.gave_up.startswith("2 captures failed")
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


# --- devices, streams and threads --------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("cuda_graph", [False, True, "auto"])
def test_parameters_on_a_gpu_that_is_not_the_current_one(cuda_graph: bool | str) -> None:
    ends = []
    for device in ("cuda:0", "cuda:1"):
        net = Net().to(device)
        optimizer = _optimizer(net, cuda_graph, method="auto")
        for step in range(STEPS):
            optimizer.zero_grad()
            net(_batch(step).to(device)).square().mean().backward()
            optimizer.step()
        assert torch.cuda.current_device() == 0
        ends.append([param.detach().cpu() for param in net.parameters()])
    for a, b in zip(*ends):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_loader_that_copies_during_a_capture() -> None:
    """A thread copies from pinned memory on its own stream, waits for it, and never stops."""
    batches: queue.Queue[Tensor] = queue.Queue(maxsize=4)
    done = threading.Event()

    def load() -> None:
        stream = torch.cuda.Stream()
        while not done.is_set():
            with torch.cuda.stream(stream):
                batch = torch.randn(16, WIDTH).pin_memory().to("cuda", non_blocking=True)
            stream.synchronize()
            try:
                batches.put(batch, timeout=0.1)
            except queue.Full:
                continue

    thread = threading.Thread(target=load)
    thread.start()
    try:
        net = Net().cuda()
        optimizer = _optimizer(net, "auto")
        for _ in range(STEPS):
            optimizer.zero_grad()
            net(batches.get()).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
    finally:
        done.set()
        thread.join()
    assert optimizer._graph is not None
    assert optimizer._graph.captures >= 1, repr(optimizer)


def test_two_optimizers_in_two_threads() -> None:
    nets = [Net().cuda() for _ in range(2)]  # here: the generator of weights is the process's
    expected = _run(False, _usual)[1]
    results: dict[int, tuple[ParallelMuon, list[Tensor]]] = {}
    torch.cuda.synchronize()

    def train(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results[number] = _run("auto", _usual, nets[number])

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    for optimizer, found in results.values():
        assert optimizer._graph is not None
        assert optimizer._graph.captures >= 1, repr(optimizer)
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# --- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [False, True])
def test_layers_that_a_backward_leaves_out(clip: bool) -> None:
    """clip_grad_norm_ writes to the zeros of their gradients."""

    def train(net: Net, optimizer: ParallelMuon) -> Iterator[None]:
        held = []
        for step in range(2 * STEPS):
            optimizer.zero_grad()
            net(_batch(step), (1, 4) if step % 12 == 11 else ()).square().mean().backward()
            held.append(torch.empty(1000 * step + 1, device="cuda"))
            if clip:  # at a norm that cuts nothing: norms with and without zeros may round otherwise
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1e3)
            yield

    assert _compare(train).replays >= 10


def test_experts_that_come_and_go_end_the_attempts() -> None:
    def train(net: Net, optimizer: ParallelMuon) -> Iterator[None]:
        for step in range(IDLE + PATIENCE):
            optimizer.zero_grad()
            net(_batch(step), (step % 6, (step + 1) % 6)).square().mean().backward()
            yield

    assert "steps in a row without a replay" in _compare(train).gave_up


def test_gradients_that_are_written_through_data() -> None:
    """autograd does not hear of it."""

    def train(net: Net, optimizer: ParallelMuon) -> Iterator[None]:
        yield from _usual(net, optimizer)
        for step in range(8):
            optimizer.zero_grad()
            for number, param in enumerate(net.parameters()):
                generator = torch.Generator().manual_seed(100 * step + number)
                grad = torch.randn(param.shape, generator=generator).cuda()
                if param.grad is None:
                    param.grad = grad
                else:
                    param.grad.data.copy_(grad)
            yield

    _compare(train)


def test_a_backward_in_the_callers_own_graph() -> None:
    """Its replays call no hooks; gradients stay where it writes them."""

    def train(net: Net, optimizer: ParallelMuon) -> Iterator[None]:
        x, side = _batch(0), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # as PyTorch asks for before a capture
            for _ in range(3):
                net(x).square().mean().backward()
        torch.cuda.current_stream().wait_stream(side)
        optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            net(x).square().mean().backward()
        for step in range(STEPS):
            x.copy_(_batch(step))
            optimizer.zero_grad(set_to_none=False)
            graph.replay()
            yield

    assert _compare(train).replays >= 10


@pytest.mark.filterwarnings("ignore:TensorFloat32")  # Inductor would rather round the products
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # that of Inductor, made to set its pool of memory up
def test_a_model_under_reduce_overhead() -> None:
    """PyTorch's own graphs write gradients into memory that their next replay may use again."""

    def train(net: Net, optimizer: ParallelMuon) -> Iterator[None]:
        compiled = torch.compile(net, mode="reduce-overhead")
        for step in range(STEPS):
            optimizer.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            compiled(_batch(step)).square().mean().backward()
            yield

    _compare(train)


# --- contexts and values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["auto", "plain", "symmetric", "gram"])
def test_a_step_inside_autocast(method: str) -> None:
    ends = []
    for enabled in (False, True):
        net = Net().cuda()
        optimizer = _optimizer(net, "auto", method=method)
        for step in range(STEPS):
            optimizer.zero_grad()
            net(_batch(step)).square().mean().backward()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=enabled):
                optimizer.step()
        ends.append([param.detach() for param in net.parameters()])
    for a, b in zip(*ends):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_grad_scaler_that_is_turned_on_and_off() -> None:
    def train(net: Net, optimizer: ParallelMuon) -> Iterator[None]:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**4)
        for step in range(3 * STEPS):
            optimizer.zero_grad()
            loss = net(_batch(step)).square().mean()
            if step // 8 % 2:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                yield

    assert _compare(train).captures >= 1


def _train_with_rates_on_the_gpu(cuda_graph: bool | str) -> tuple[ParallelMuon, list[Tensor]]:
    net = Net().cuda()
    optimizer = _optimizer(net, cuda_graph)
    rates = [torch.full((), rate, device="cuda") for rate in (0.02, 0.01)]
    for group, rate in zip(optimizer.param_groups, rates):
        group.update(lr=rate, weight_decay=torch.full((), 0.1, device="cuda"))
    for step in range(STEPS):
        optimizer.zero_grad()
        net(_batch(step)).square().mean().backward()
        for rate in rates:
            rate.mul_(0.9)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step >= STEPS - 4 else "default")
        optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
    return optimizer, [param.detach() for param in net.parameters()]


def test_a_learning_rate_on_the_gpu() -> None:
    """Changed in place between steps; no replay waits for it."""
    try:
        optimizer, found = _train_with_rates_on_the_gpu("auto")
        _, expected = _train_with_rates_on_the_gpu(False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer._graph is not None
    assert optimizer._graph.pilot.replays >= 4, repr(optimizer)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# --- memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [{}, {"set_to_none": True}], ids=["zero_grad()", "set_to_none=True"])
def test_there_is_no_second_copy_of_gradients_that_move(zero: dict[str, bool]) -> None:
    """After backward there are parameters, gradients and momentum, and at most a tenth more."""
    params = [nn.Parameter(torch.randn(512, 512, device="cuda")) for _ in range(48)]
    optimizer = ParallelMuon(params, cuda_graph="auto")
    gradients = momentum = 4 * sum(param.numel() for param in params)
    before, held = torch.cuda.memory_allocated(), []
    for step in range(STEPS):
        optimizer.zero_grad(**zero)
        held.append(torch.empty(1000 * step + 1, device="cuda"))
        torch.stack([(param * param).sum() for param in params]).sum().backward()
        torch.cuda.synchronize()
        pads = 4 * sum(pad.numel() for pad in held)
        used = torch.cuda.memory_allocated() - before - pads
        optimizer.step()
    assert used < gradients + 1.1 * momentum, repr(optimizer)
