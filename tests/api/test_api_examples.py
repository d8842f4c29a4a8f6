"""The example in each door's docstring runs and gives what it shows."""

import doctest
import inspect
from pathlib import Path

import pytest

import parbank
from parbank.data.tokenizer import Tokenizer

DOORS = [  # in the order of the story that the examples tell
    "train", "Run", "load", "Model", "pack", "split_parameters", "ParallelMuon", "bank", "orthogonalize", "Prefetcher", "ops",
]  # fmt: skip


def test_the_examples_of_the_doors_run(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").symlink_to(home / "books")
    assert {*DOORS, "__version__"} == set(dir(parbank))
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.REPORT_NDIFF)
    for name, door in {**{name: getattr(parbank, name) for name in DOORS}, "Tokenizer": Tokenizer}.items():
        text = inspect.getdoc(door)
        assert text is not None
        example = doctest.DocTestParser().get_doctest(text, {"parbank": parbank}, name, None, None)
        assert example.examples, f"{name} has no example"
        report: list[str] = []
        runner.run(example, out=report.append)
        assert not report, "".join(report)
    assert runner.failures == 0
