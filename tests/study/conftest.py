"""What the tests of studies share."""

from pathlib import Path

import pytest

from parbank.study.ship import make_study
from parbank.study.study import Study

ARMS = ("slow:optim.matrix_lr=0.0001,optim.embedding_lr=0.0001", "same:train.log_every=3")


@pytest.fixture
def study(text_spec: str) -> Study:
    """Two steps of nano with three seeds: an arm that is worse, and an arm that changes nothing."""
    settings = ["train.warmup_steps=0"]
    return make_study(
        "seeds",
        recipe="nano",
        data=text_spec,
        budget="6steps",
        seeds=3,
        extra=ARMS,
        settings=settings,
        score_tokens=2000,
    )


def values_of(folder: Path) -> dict[str, float]:
    from parbank.study.report import make_report

    return {job.key: result["value"] for job, result in make_report(folder).results.items()}
