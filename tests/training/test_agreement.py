"""Ranks that differ: each way is named before the first step, with the rank and the field, by the same error on all ranks."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import parbank
from parbank.config import override
from parbank.data.dataset import open_dataset
from parbank.display import Display
from parbank.errors import RankError
from parbank.model import GPT
from parbank.recipes import get_recipe
from parbank.runtime import Runtime, seed_everything, versions
from parbank.training import agreement
from parbank.training.config import RunConfig
from parbank.training.run import run
from tests.distributed import run_distributed_test

DIGESTS = "[0-9a-f]{12} instead of [0-9a-f]{12}"
WAYS = {
    "seed": r"seed 1 instead of 0",
    "learning rate": r"optim\.matrix_lr 0\.5 instead of 0\.\d+",
    "steps": r"budget\.steps 3 instead of 2",
    "minutes": r"budget\.minutes 1\.0 instead of null, budget\.steps null instead of 2",
    "batch": r"batch\.batch_tokens 1024 instead of \d+",
    "model": r"model\.softcap 15\.0 instead of 30\.0",
    "resume": r"--resume true instead of false",
    "software": r"version of torch 0\.1 instead of [\w.+]+",
    "code": f"code {DIGESTS}",
    "data": f"data {DIGESTS}",
    "checkpoint": f"step 1 instead of 2, checkpoint {DIGESTS}, starting weights {DIGESTS}",
    "starting weights": f"starting weights {DIGESTS}",
}
SETTINGS = {
    "seed": ["seed=1"],
    "learning rate": ["optim.matrix_lr=0.5"],
    "steps": ["budget.steps=3"],
    "minutes": ["budget.steps=null", "budget.minutes=1.0"],
    "batch": ["batch.batch_tokens=1024"],
    "model": ["model.softcap=15.0"],
}


def nano(spec: str, *settings: str) -> RunConfig:
    return override(get_recipe("nano"), f'data="{spec}"', "budget.steps=2", "train.warmup_steps=0", *settings)


def start_differently(folder: Path, spec: str, other: str) -> dict[str, str]:
    """The error of each way, on this rank. Rank 1 is the one that differs."""
    torch.set_num_threads(1)
    place = Runtime(device=torch.device("cpu"), rank=dist.get_rank(), world=2)
    said = {"none": start(nano(spec), place, folder / "none")}
    for way in WAYS:
        odd = place.rank == 1
        config = nano(other if odd and way == "data" else spec, *(SETTINGS.get(way, ()) if odd else ()))
        out = folder / ("resumed" if way == "checkpoint" else way)
        if way == "checkpoint" and odd:
            out = folder / "older"
        with fault(way, folder) if odd else nullcontext():
            said[way] = start(config, place, out, resume=way == "checkpoint" or (odd and way == "resume"))
    return said | {f"score: {way}": score(place, way) for way in ("none", "weights", "method")}


def score(place: Runtime, way: str) -> str:
    odd = place.rank == 1
    seed_everything(int(odd and way == "weights"))
    try:
        agreement.compare_scoring(GPT(get_recipe("nano").model), {"method": str(odd and way == "method")}, place)
    except RankError as error:
        return str(error)
    return ""


def start(config: RunConfig, place: Runtime, out: Path, *, resume: bool = False) -> str:
    with mock.patch("parbank.training.run._train"):  # the checks are all before it
        try:
            run(config, place, out, resume=resume, display=Display(enabled=False))
        except RankError as error:
            return str(error)
    return ""


@contextmanager
def fault(way: str, folder: Path) -> Iterator[None]:
    """Makes this rank's software or starting weights differ."""
    patches: dict[str, Callable[[], Any]] = {
        "software": lambda: mock.patch.object(agreement, "versions", return_value=versions() | {"torch": "0.1"}),
        "code": lambda: mock.patch.object(parbank, "__file__", str(folder / "parbank" / "__init__.py")),
        "starting weights": lambda: mock.patch(
            "parbank.training.trainer.seed_everything", lambda seed: seed_everything(seed + 1)
        ),
    }
    with patches.get(way, nullcontext)():
        yield


@pytest.fixture(scope="module")
def said(text_spec: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank said of each way, from one pair of processes."""
    folder = tmp_path_factory.mktemp("ranks")
    place = Runtime(device=torch.device("cpu"))
    run(nano(text_spec, "train.checkpoint_minutes=1e-9"), place, folder / "resumed", display=Display(enabled=False))
    shutil.copytree(folder / "resumed", folder / "older")
    (folder / "older" / "checkpoint" / "step_00000002.pt").unlink()
    shutil.copytree(Path(parbank.__file__).parent, folder / "parbank", ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "parbank" / "optim" / "schedules.py").open("a") as file:
        file.write("# another version\n")
    prepared = open_dataset(text_spec, vocab_size=320, say=lambda line: None).folder
    shutil.copytree(prepared, folder / "other")
    (folder / "other" / "manifest.json").unlink()
    with (folder / "other" / "text_train_000000.bin").open("r+b") as shard:
        shard.seek(-2, 2)
        shard.write(b"\x20\x00")
    return run_distributed_test(start_differently, 2, args=(folder, text_spec, f"shards:{folder / 'other'}"))


def test_equal_ranks_start(said: list[dict[str, str]]) -> None:
    assert [rank["none"] for rank in said] == ["", ""]
    assert [rank["score: none"] for rank in said] == ["", ""]


@pytest.mark.parametrize(
    ("way", "named"), [("weights", f"weights {DIGESTS}"), ("method", 'method "True" instead of "False"')]
)
def test_a_difference_between_ranks_that_score_is_named(way: str, named: str, said: list[dict[str, str]]) -> None:
    first, second = (rank[f"score: {way}"] for rank in said)
    assert first == second
    assert re.match(f"rank 1 differs from rank 0: {named}; start all ranks", first), first


@pytest.mark.parametrize("way", WAYS)
def test_a_difference_is_named(way: str, said: list[dict[str, str]]) -> None:
    first, second = (rank[way] for rank in said)
    assert first == second, "every rank says the same"
    expected = (
        f"rank 1 differs from rank 0: {WAYS[way]}; start all ranks with the same command, software, data and run folder"
    )
    assert re.fullmatch(expected, first), first


def test_many_differences_are_counted() -> None:
    class Four(Runtime):
        def gather(self, value: Any) -> list[Any]:
            return [value, value, *([{name: "1" for name in "abcdef"}] * 2)]

    with pytest.raises(RankError) as error:
        agreement.compare(dict.fromkeys("abcde", "0"), Four(device=torch.device("cpu"), world=4))
    assert str(error.value).startswith(
        "rank 2 differs from rank 0 (and so does rank 3): a 1 instead of 0, b 1 instead of 0, c 1 instead of 0, d 1 instead of 0 "
        "and 2 more; start"
    )


def test_a_digest_sees_every_bit_name_and_type() -> None:
    def digest(**tensors: torch.Tensor) -> str:
        return agreement.hash_tensors(tensors.items())

    weights = torch.randn(3, 4)
    other = weights.clone()
    other.view(torch.int32)[2, 3] ^= 1
    same = {digest(w=weights), digest(w=weights.clone()), digest(w=weights.T.contiguous().T)}
    assert len(same) == 1
    different = [
        digest(w=other),
        digest(v=weights),
        digest(w=weights.reshape(4, 3)),
        digest(w=weights.view(torch.int32)),
    ]
    assert len({*same, *different}) == 5
    assert digest(w=torch.tensor(1.0, dtype=torch.bfloat16)) != digest(w=torch.tensor(2.0, dtype=torch.bfloat16))
