"""Several models by document: the mean is the difference of the scores, and noise alone gets no verdict."""

import numpy as np
import pytest

from parbank.errors import DataError
from parbank.eval.paired import FEWEST, _spread, compare_documents, compare_models


def draw(documents: int = 200, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 5000, documents)
    return sizes, 1.5 * sizes + generator.normal(0, 20, documents), generator


def test_the_mean_is_the_difference_of_the_scores_and_the_interval_that_of_two_models() -> None:
    sizes, base, generator = draw()
    other = base + generator.normal(3, 30, len(base))
    found = compare_models(sizes.tolist(), base.tolist(), {"b": other.tolist()})["b"]
    assert found.bpb == pytest.approx(other.sum() / sizes.sum() - base.sum() / sizes.sum())
    alone = compare_documents(sizes.tolist(), other.tolist(), base.tolist())
    assert (found.bpb, found.low, found.high) == pytest.approx((alone.bpb, alone.low, alone.high))
    assert found.documents == alone.documents


def test_a_shift_of_every_byte_is_found_and_noise_is_not() -> None:
    sizes, base, generator = draw()
    noise = generator.normal(0, 20, len(base))
    others = {"better": base + noise - 0.01 * sizes, "worse": base + 0.01 * sizes, "same": base + noise - noise.mean()}
    found = compare_models(sizes.tolist(), base.tolist(), {name: bits.tolist() for name, bits in others.items()})
    assert [found[name].verdict for name in others] == ["better", "worse", "no difference"]
    assert found["same"].describe().startswith("no difference of more than 0.0")


def test_the_deviation_is_that_of_the_ratio() -> None:
    """Against repeated draws of documents: the standard error must be that of the scores' difference."""
    generator = np.random.default_rng(1)
    errors, differences = [], []
    for _ in range(300):
        sizes = generator.integers(1, 5000, 100)
        values = _spread(sizes, 0.02 * sizes + generator.normal(0, 30, 100))
        differences.append(values.mean())
        errors.append(values.std(ddof=1) / 10)
    assert np.mean(errors) == pytest.approx(np.std(differences), rel=0.1)


def test_documents_without_bytes_do_not_count_and_few_get_no_verdict() -> None:
    sizes = [0, 10, 20]
    found = compare_models(sizes, [5.0, 10.0, 30.0], {"b": [6.0, 11.0, 31.0]})["b"]
    assert (found.documents, found.bpb, found.low) == (2, pytest.approx(2 / 30), None)
    assert found.describe() == f"too few documents: 2 of {FEWEST}"
    with pytest.raises(DataError, match="different documents"):
        compare_models(sizes, [1.0, 2.0, 3.0], {"b": [1.0]})
    equal = compare_models([1] * FEWEST, [1.0] * FEWEST, {"b": [1.0] * FEWEST})["b"]
    assert equal.describe() == "equal"
