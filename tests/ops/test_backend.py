"""Which implementation runs: by hand, by environment, and on machines that lack something."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parbank import ops
from parbank.errors import ConfigError, ParbankError
from parbank.ops import backend, configs

ROOT = Path(__file__).resolve().parents[2]
# Hides Triton from the import system, as on a machine that has none.
HIDE_TRITON = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name.split(".")[0] == "triton" else find(name, *a)
sys.modules["triton"] = None
"""
CALL = """
import logging, torch
logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
from parbank import ops
from parbank.ops import backend
x = torch.randn(2, 6, 4)
print(backend.active_backend(), torch.equal(ops.xxt(x), x @ x.mT), tuple(ops.rms_norm(x).shape))
"""


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PARBANK_OPS")}
    clean |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **env}
    return subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("prelude", ["", HIDE_TRITON], ids=["no GPU", "no Triton"])
def test_a_lesser_machine_runs_the_reference_and_says_so_once(prelude: str) -> None:
    result = run(prelude + CALL)
    assert result.stdout.strip() == "reference True (2, 6, 4)", result.stderr
    assert result.stderr.count("ops run in plain PyTorch") == 1


@pytest.mark.parametrize(
    ("prelude", "remedy"),
    [
        ("import sys\nsys.path.insert(0, {broken!r})\n", "too little memory: end other programs"),
        ("import sys\nsys.modules['triton.tools.tensor_descriptor'] = None\n", "the kernels need 3.6 or later"),
    ],
    ids=["cannot be loaded", "has no descriptors"],
)
def test_a_broken_triton_is_warned_of_once_and_the_reference_runs(prelude: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text('raise ImportError("libtriton.so: failed to map segment from shared object")')
    quiet = CALL.replace("logging.basicConfig", "dict")  # nobody has set up logging: a warning shows all the same
    result = run(prelude.format(broken=str(tmp_path)) + quiet)
    assert result.stdout.strip() == "reference True (2, 6, 4)", result.stderr
    assert result.stderr.count("the installed Triton cannot be used") == 1
    assert remedy in result.stderr


def test_the_interpreter_is_on_where_triton_has_it_on() -> None:
    code = "from parbank.ops import backend\nimport triton\nprint(backend.INTERPRETED, triton.knobs.runtime.interpret)"
    assert run(code, TRITON_INTERPRET="true").stdout.split() == ["True", "True"]


@pytest.mark.parametrize(
    ("prelude", "reason"), [("", "no CUDA device"), (HIDE_TRITON, "pip install")], ids=["no GPU", "no Triton"]
)
def test_asked_for_but_missing_is_an_error_with_a_remedy(prelude: str, reason: str) -> None:
    code = (
        prelude + CALL.replace("print", "try:\n    print") + "except Exception as e:\n    print(type(e).__name__, e)\n"
    )
    result = run(code, PARBANK_OPS="triton")
    assert result.stdout.startswith("DeviceError PARBANK_OPS"), result.stderr
    assert reason in result.stdout
    assert "'auto' or 'reference'" in result.stdout


def test_a_misspelt_environment_names_the_choices() -> None:
    result = run(CALL, PARBANK_OPS="trition")
    said = "ConfigError: PARBANK_OPS: unknown ops backend 'trition'; use one of auto, triton, reference"
    assert said in result.stderr


def test_use_backend_restores_what_was(device: torch.device) -> None:
    assert backend.active_backend() == "triton"
    with backend.use_backend("reference"):
        assert backend.active_backend() == "reference"
        assert not backend.use_triton(torch.zeros(2, device=device))
    assert backend.active_backend() == "triton"
    with pytest.raises(RuntimeError, match="on purpose"), backend.use_backend("reference"):
        raise RuntimeError("on purpose")
    assert backend.active_backend() == "triton"
    with pytest.raises(ConfigError, match="cuda"):
        backend.set_backend("cuda")
    assert backend.active_backend() == "triton"


def test_by_name_refuses_what_the_kernels_do_not_take(device: torch.device) -> None:
    wide = torch.zeros(4, 4, dtype=torch.float64, device=device)
    with pytest.raises(ParbankError, match=r"float64.*auto"):
        ops.xxt(wide)
    with backend.use_backend("auto"):
        assert ops.xxt(wide).dtype == torch.float64


def test_interpreter_only_when_asked_for_by_name() -> None:
    if torch.cuda.is_available():
        pytest.skip("the kernels run on the GPU here")
    with backend.use_backend("auto"):
        assert backend.active_backend() == "reference"


@pytest.mark.gpu
def test_auto_takes_the_kernels_tensor_by_tensor() -> None:
    with backend.use_backend("auto"):
        assert backend.use_triton(torch.zeros(2, device="cuda"), None)
        assert not backend.use_triton(torch.zeros(2))
        assert not backend.use_triton(torch.zeros(2, device="cuda", dtype=torch.float64))


class TestConfigs:
    def test_rows_are_chosen_by_limit(self) -> None:
        small, large = configs.Launch({"BLOCK": 1}), configs.Launch({"BLOCK": 2}, 8, 4, {"maxnreg": 128})
        configs.register("test_op", sm80=[(10, small), (configs.ANY, large)])
        cpu = torch.device("cpu")
        try:
            assert [configs.choose("test_op", size, cpu) for size in (1, 10, 11)] == [small, small, large]
            with configs.force("test_op", large):
                assert configs.choose("test_op", 1, cpu) is large
            assert configs.choose("test_op", 1, cpu) is small
            assert configs.tables()["test_op"]["sm100"][1][1].kwargs() == {
                "BLOCK": 2,
                "num_warps": 8,
                "num_stages": 4,
                "maxnreg": 128,
            }
        finally:
            configs._tables.pop("test_op")

    def test_limits_rise(self) -> None:
        for op, tables in configs.tables().items():
            for arch, rows in tables.items():
                limits = [limit for limit, _ in rows]
                assert limits == sorted(set(limits)), (op, arch)
