"""The benchmark of quantisation stores its rows as `parbank pack` does, and runs the rows it is asked for."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from parbank.artifact.contents import pack_contents
from parbank.artifact.pack import pack_tensors
from parbank.errors import ConfigError
from parbank.quant.roles import role


@pytest.fixture
def quantisation(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("quantisation")


def test_a_row_is_the_file_that_its_settings_pack(quantisation: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding.weight": (40, 128), "up.weight": (48, 128), "odd.weight": (32, 100), "gain": (128,)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    roles = {name: role(name, shape) for name, shape in shapes.items()}
    files = {}
    for name, config in {"plain": quantisation.ROWS, **quantisation.SETTINGS}.items():
        files[name] = pack_contents(quantisation.quantise(arrays, config), roles, {}, {}, coder=config.coder)
        assert files[name] == pack_tensors(tensors, config).data, name
    assert len(set(files.values())) == len(files), "every row shows something of its own"


def test_only_takes_parts_of_names(quantisation: ModuleType) -> None:
    rows = {"float16": print, "int6 rows, GPTQ": print, "int6 rows, late QAT, soft": print}
    assert list(quantisation.choose(rows, [])) == list(rows)
    assert list(quantisation.choose(rows, ["soft", "float"])) == ["float16", "int6 rows, late QAT, soft"]
    with pytest.raises(ConfigError, match=r"'QTA'.*float16; int6 rows, GPTQ"):
        quantisation.choose(rows, ["GPTQ", "QTA"])
