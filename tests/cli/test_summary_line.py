"""The lines that a run ends with add up what the track counts."""

from pathlib import Path

import pytest

from parbank.cli.train import _print_summary

SUMMARY = {
    "artifact_bytes": 1_500_000, "code_bytes": 100_000, "max_bytes": 2_000_000, "steps": 1234, "train_seconds": 60.0,
    "setup_seconds": 2.0, "tokens_per_second": 5000.0, "data_wait_seconds": 0.6, "val_bpb": 1.25,
    "val_bpb_before_packing": 1.2, "compressors_bpb": {"xz -9": 2.0}, "sample": "a\x1b[2Jb",
}  # fmt: skip


def test_code_counts_towards_the_cap(capsys: pytest.CaptureFixture[str]) -> None:
    _print_summary(SUMMARY, Path("runs/one"))
    said = capsys.readouterr().out
    assert "1,600,000 bytes with 100,000 of code, 80.0% of the cap 2,000,000" in said
    assert "1.2500 (1.2000 before packing)" in said
    assert "1.00% of the time waiting for data" in said
    assert "\x1b" not in said, "a sample must not move the cursor"


def test_compressors_that_all_failed_have_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    _print_summary(SUMMARY, Path("runs/one"))
    assert "xz -9 2.0000 bpb on the same text" in capsys.readouterr().out
    _print_summary(SUMMARY | {"compressors_bpb": {}}, Path("runs/one"))
    assert "compressors" not in capsys.readouterr().out
