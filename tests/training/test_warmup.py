"""Compiled code is kept where it is said to be, and a second start finds it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import parbank
from parbank.config import override
from parbank.model import GPT
from parbank.ops.fp8 import Parts
from parbank.recipes import get_recipe
from parbank.runtime import Runtime, seed_everything
from parbank.training import warmup
from parbank.training.compiled import (
    IMPORTED,
    INDUCTOR,
    TRITON,
    Lookups,
    compile_folder,
    keep_compiled_graphs,
    note_kernels,
    use_compile_cache,
)
from parbank.training.trainer import Trainer, new_model
from parbank.training.warmup import compile_aside, random_data, warm_up

ROOT = Path(__file__).resolve().parents[2]
CPU = Runtime(device=torch.device("cpu"))


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of its own, and neither variable set; what a test sets is undone."""
    for name in (INDUCTOR, TRITON):
        monkeypatch.setenv(name, "")  # remembers what was there, also where the test sets it
        monkeypatch.delenv(name)
    monkeypatch.setenv("PARBANK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_caches_go_to_parbanks_own(clean: Path) -> None:
    folder = use_compile_cache()
    assert folder == compile_folder()
    assert folder.parent == clean
    assert folder.is_dir()
    assert os.environ[INDUCTOR] == str(folder / "inductor")
    assert os.environ[TRITON] == str(folder / "triton")


@pytest.mark.parametrize("name", [INDUCTOR, TRITON])
def test_what_the_user_set_stays(name: str, clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/mine")
    use_compile_cache()
    assert os.environ[name] == "/mine"
    other = ({INDUCTOR, TRITON} - {name}).pop()
    assert os.environ[other].startswith(str(clean))


def test_a_cache_that_cannot_be_written_is_no_obstacle(clean: Path) -> None:
    clean.write_text("a file where the folder should be")
    assert use_compile_cache() is None
    assert INDUCTOR not in os.environ
    assert TRITON not in os.environ


def test_other_ops_have_another_folder(clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = compile_folder()
    copy = tmp_path / "parbank"
    shutil.copytree(Path(parbank.__file__).parent / "ops", copy / "ops")
    (copy / "__init__.py").touch()
    monkeypatch.setattr(parbank, "__file__", str(copy / "__init__.py"))
    assert compile_folder() == before, "the same source elsewhere is the same"
    changed = copy / "ops" / "norm.py"
    changed.write_text(changed.read_text(encoding="utf-8") + "# a change\n", encoding="utf-8")
    assert compile_folder() != before


def test_pytorch_looks_where_it_is_told(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables must be the ones PyTorch and Triton read, in the version that is installed."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    monkeypatch.delenv(INDUCTOR, raising=False)  # the import may have set it: see the next test
    folder = use_compile_cache()
    assert folder is not None
    assert cache_dir() == str(folder / "inductor")
    assert triton_cache_dir(0) == str(folder / "triton")


def test_nothing_chooses_a_folder_before_we_do() -> None:
    """Importing Inductor sets the variable, which then looks as if the user had: nothing of ours may import it early."""
    environment = {name: value for name, value in os.environ.items() if name not in (INDUCTOR, TRITON)}
    code = "import os, parbank.cli, parbank.training.run, parbank.training.load; print(*os.environ)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {INDUCTOR, TRITON} & set(done.stdout.split())


def test_the_functions_marked_cacheable_exist(clean: Path) -> None:
    from torch._inductor import config
    from torch.nn import attention

    before = config.unsafe_marked_cacheable_functions
    try:
        keep_compiled_graphs()
        names = config.unsafe_marked_cacheable_functions.keys() - before.keys()
    finally:
        config.unsafe_marked_cacheable_functions = before
    assert names
    for name in names:
        assert callable(getattr(attention, name.removeprefix("torch.nn.attention.")))


@pytest.mark.parametrize("fp8", ["off", "mlp+head"])
def test_pytorch_agrees_to_cache_the_models_graph(fp8: Parts, clean: Path) -> None:
    """One function that AOTAutograd does not know, anywhere in the model, and every start is nearly as slow as the first."""
    import torch._functorch.config as functorch
    from torch._functorch._aot_autograd.autograd_cache import check_cacheable
    from torch._inductor import config

    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    model = GPT(get_recipe("nano").model)
    model.fp8 = fp8
    tokens = torch.randint(0, 320, (2, 65), generator=torch.Generator().manual_seed(0))
    torch.compile(model, dynamic=False, backend=keep)(tokens[:, :-1], tokens[:, 1:])
    (graph,) = graphs
    before = config.unsafe_marked_cacheable_functions
    try:
        keep_compiled_graphs()
        check_cacheable(graph)
    finally:
        config.unsafe_marked_cacheable_functions = before
        functorch.autograd_cache_allow_custom_autograd_functions = False
        torch._dynamo.reset()


def test_on_a_cpu_there_is_nothing_to_compile() -> None:
    said: list[str] = []
    assert warm_up(get_recipe("golf"), CPU, said.append) is None
    assert len(said) == 1
    assert "nothing to compile for golf" in said[0]


def test_random_data_serves_a_trainer(tmp_path: Path) -> None:
    """Every shape of the recipe, and no token the model does not have."""
    config = override(get_recipe("nano"), "train.warmup_steps=2")
    data = random_data(config, config.batch.batch_tokens)
    tokens = data.train.read(0, len(data.train))
    assert len(np.unique(tokens)) > config.model.vocab_size / 2
    assert int(tokens.max()) < config.model.vocab_size
    trainer = Trainer(config, CPU, data, tmp_path / "never made")
    trainer.warm_up()
    assert trainer.step == 0
    trainer.close()
    assert not (tmp_path / "never made").exists()
    assert len(random_data(config, 1).train) == config.batch.sequence_length + 1


def test_a_start_is_warm_only_where_all_was_found() -> None:
    starts = {(0, 0): "none", (2, 0): "warm", (0, 2): "cold", (1, 1): "cold"}
    assert {key: Lookups(*key).start for key in starts} == starts


def parbank_in(cache: Path, *arguments: str) -> str:
    """What `parbank` printed, in a process of its own with a cache of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in (INDUCTOR, TRITON)}
    environment |= {
        "PARBANK_CACHE": str(cache),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "parbank", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_command_on_a_cpu(tmp_path: Path) -> None:
    said = parbank_in(tmp_path, "warmup", "--recipe", "nano", "--set", "model.width=64", "--device", "cpu")
    assert "nothing to compile for nano" in said


@pytest.mark.gpu
@pytest.mark.slow
def test_a_second_start_is_warm(text_spec: str, tmp_path: Path) -> None:
    """In bfloat16, as the other recipes train: calibration and scoring then find the kernels of training."""
    cache, out = tmp_path / "cache", tmp_path / "run"
    recipe = ("--recipe", "nano", "--set", "train.precision=bfloat16")
    said = parbank_in(cache, "warmup", *recipe)
    assert " 0 found" in said, said
    parbank_in(cache, "train", *recipe, "--data", text_spec, "--out", str(out))
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["compile_cache"] == "warm", "the warm-up compiles exactly what training needs"


def test_kernels_are_compiled_or_loaded_aside(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU never. On a GPU in a thread, and its end is waited for; a caller learns whether it compiles."""
    with compile_aside(get_recipe("nano"), CPU, print) as kernels:
        assert not kernels.compiles
    assert not kernels.ready
    rehearsed: list[bool] = []
    monkeypatch.setattr(warmup, "can_rehearse", lambda: True)
    monkeypatch.setattr(warmup, "_rehearse_alone", lambda config, runtime, cold: rehearsed.append(cold))
    cuda = Runtime(device=torch.device("cuda", 0))
    folder = use_compile_cache()
    assert folder is not None
    with compile_aside(get_recipe("nano"), cuda, lambda line: None) as kernels:
        assert kernels.compiles
    assert kernels.ready
    (folder / "triton" / "a kernel").mkdir(parents=True)
    with compile_aside(get_recipe("nano"), cuda, lambda line: None) as kernels:
        assert not kernels.compiles, "kept kernels are only loaded"
    with compile_aside(get_recipe("demo"), cuda, lambda line: None) as kernels:
        assert kernels.compiles, "those of another model are of no use"
    note_kernels(IMPORTED)
    with compile_aside(get_recipe("golf"), cuda, lambda line: None) as kernels:
        assert not kernels.compiles
    assert rehearsed == [True, False, True, False]


def test_kernels_that_do_not_compile_ahead_are_left_to_the_warm_up(
    clean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: object, runtime: object, cold: bool) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(warmup, "can_rehearse", lambda: True)
    monkeypatch.setattr(warmup, "_rehearse_alone", fail)
    said: list[str] = []
    with compile_aside(get_recipe("nano"), Runtime(device=torch.device("cuda", 0)), said.append) as kernels:
        pass
    assert not kernels.ready
    assert "no such instruction" in said[-1]


def test_a_throwaway_trainer_leaves_the_random_numbers_alone(clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is built beside the model that is trained, whose weights depend on the seed alone."""
    config = get_recipe("nano")
    expected = new_model(config).state_dict()
    monkeypatch.setattr(Trainer, "rehearse", lambda self, then: None)
    seed_everything(config.seed)
    warmup._rehearse_alone(config, CPU, cold=False)
    found = GPT(config.model).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
