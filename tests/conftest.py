"""Read by pytest before it collects any room."""

import functools
import importlib
import os
import signal
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, settings

# Triton decides when a kernel is decorated whether it is interpreted, and any room may be the first to import the ops.
# The interpreter is used only where a test asks for the Triton backend by name (tests/ops); `auto` stays with the
# reference.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# A shell starts its background jobs deaf to Ctrl-C, and their children with them. Several tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: one that fails belongs to the change that made it, not to whoever runs CI next. For others:
# pytest --hypothesis-profile=default. An example may take as long as it takes: a busy machine stalls any process for seconds.
settings.register_profile("parbank", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("parbank")

# Two threads of OpenMP on tensors of a few kilobytes cost far more than they bring.
torch.set_num_threads(1)


MODULES = (
    "argparse",
    "ast",
    "calendar",
    "codecs",
    "dataclasses",
    "difflib",
    "enum",
    "inspect",
    "locale",
    "optparse",
    "random",
    "uuid",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none: the one place that decides it."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def text_spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Real text in a few seconds' worth: a dozen modules of the standard library, two of them for validation."""
    folder = tmp_path_factory.mktemp("text")
    for split, names in (("train", MODULES[:-2]), ("val", MODULES[-2:])):
        (folder / split).mkdir()
        for name in names:
            source = Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py"
            (folder / split / source.name).write_bytes(source.read_bytes())
    return f"text:train={folder / 'train'},val={folder / 'val'},glob=*"


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Prepared data goes to a folder of the test session, never to the user's cache."""
    os.environ["PARBANK_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a script of benchmarks/ by its name, as the scripts import each other."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The graphs that trainers compile, by a compiler that runs them as they are. Graphs of other tests are forgotten."""
    graphs: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiles = functools.partial(torch.compile, dynamic=False, backend=note)
    monkeypatch.setattr("parbank.training.trainer.find_compiler", lambda: "c++")
    monkeypatch.setattr("parbank.training.trainer.compile_model", lambda model, threads: compiles(model))
    torch._dynamo.reset()
    return graphs
