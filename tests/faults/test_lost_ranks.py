"""A rank that is lost ends the others by a sentence with its name."""

from pathlib import Path

from tests.faults.ranks import lose_rank


def test_a_killed_rank_is_named_by_the_other(text_spec: str, tmp_path: Path) -> None:
    loss = lose_rank(text_spec, tmp_path, victim=0, after="step 1 ", steps=10_000)
    assert loss.complaint() == ""
    assert "its process was killed or crashed" in loss.errors[1][0]
    assert "--resume" in loss.errors[1][0]
    assert loss.seconds < 30
