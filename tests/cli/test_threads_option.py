"""`--threads` on every command that computes."""

import json
from pathlib import Path

import pytest
import torch

from tests.cli.calls import Call, train_arguments


@pytest.mark.parametrize("number", ["0", "99999"])
def test_a_number_that_makes_no_sense_is_refused_before_any_work(
    call: Call, trained: Path, text_spec: str, tmp_path: Path, number: str
) -> None:
    commands = [
        train_arguments(text_spec, tmp_path / "run"),
        ["eval", trained, "--data", text_spec],
        ["pack", trained, "--max-bytes", "200kB", "--out", tmp_path / "model.pbk"],
        ["sample", trained, "--tokens", "1"],
    ]
    for command in commands:
        answer = call(*command, "--threads", number)
        assert answer.code == 2
        assert f"--threads is a number from 1 to 1024, got {number}; this process may use" in answer.err
    assert not list(tmp_path.iterdir())


def test_threads_that_were_asked_for_are_used(
    call: Call, text_spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    assert call(*train_arguments(text_spec, out, steps=2), "--threads", "2").code == 0
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert (summary["threads"]["first"], summary["threads"]["last"]) == (2, 2)
    used: list[int] = []
    real = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda number: (used.append(number), real(number))[1])
    before = torch.get_num_threads()
    for command in (
        ["eval", out, "--data", text_spec],
        ["pack", out, "--max-bytes", "200kB"],
        ["sample", out, "--tokens", "1"],
    ):
        used.clear()
        assert call(*command, "--threads", "3").code == 0
        assert (used[0], used[-1]) == (3, before)
