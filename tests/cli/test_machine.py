"""`parbank recipes` and `parbank doctor`."""

import json
import os
import re

from parbank.config import walk
from parbank.recipes import RECIPES, get_recipe
from tests.cli.calls import Call


def test_recipes_are_listed_and_printed_whole(call: Call) -> None:
    answer = call("recipes")
    assert [line.split()[0] for line in answer.out.splitlines()] == list(RECIPES)
    for name in RECIPES:
        lines = call("recipes", name).out.splitlines()
        leaves = list(walk(get_recipe(name)))
        assert len(lines) == len(leaves)
        for line, (path, value, doc) in zip(lines, leaves):
            assert line == f"{path} = {json.dumps(value)}    # {doc}"
            assert doc, path


def test_doctor_reports_and_its_code_says_whether_something_is_broken(call: Call) -> None:
    answer = call("doctor")
    assert answer.code == ("BAD" in answer.out)
    for subject in ("Python", "PyTorch", "GPU", "Triton", "C compiler", "Memory", "Disk", "Cache", "Extras"):
        assert re.search(rf"^(ok  |note|BAD )  {subject} ", answer.out, re.MULTILINE), subject
    broken = dict(os.environ)
    try:
        os.environ["PARBANK_CACHE"] = "/dev/null/x"
        answer = call("doctor")
    finally:
        os.environ["PARBANK_CACHE"] = broken["PARBANK_CACHE"]
    assert answer.code == 1
    assert "BAD   Cache" in answer.out
    assert "-> set PARBANK_CACHE" in answer.out
