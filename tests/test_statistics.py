"""The statistics of studies, against tables, against simulation, and against the promise of 5% and 80%."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist, stdev
from types import ModuleType

import pytest

from parbank.statistics import (
    compare,
    holm,
    pairs_needed,
    quantile,
    rank_correlation,
    rejection,
    smallest_difference,
    tail,
)

PAIRS = json.loads(Path(__file__).with_name("nano_pairs.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("alpha", "freedom", "t"),
    # tables of Student's distribution, two-sided
    [(0.05, 1, 12.7062), (0.05, 2, 4.30265), (0.05, 3, 3.18245), (0.05, 7, 2.36462), (0.01, 4, 4.60409),
     (0.001, 9, 4.78091), (0.1, 30, 1.69726), (0.05, 120, 1.97993)],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(alpha: float, freedom: int, t: float) -> None:
    assert quantile(alpha, freedom) == pytest.approx(t, rel=2e-5)
    assert tail(quantile(alpha, freedom), freedom) == pytest.approx(alpha, rel=1e-9)


@pytest.mark.parametrize(
    ("t", "freedom", "p"),
    # beyond t of some 25 the complement 1 - P would be zero; 1 degree of freedom: 2/pi atan(1/t), 2: 1 - t / sqrt(2 + t^2)
    [(1e6, 1, 6.366197723673691e-07), (1e6, 2, 9.999999999985001e-13), (50, 30, 1.871541765922271e-30),
     (25, 100, 8.231980897006e-45), (50, 1000, 2.758672412325172e-274), (0.1, 5, 0.9242301411546604),
     (1.73, 20, 0.09903353814), (1.74, 20, 0.09722568636)],
)  # fmt: skip
def test_tails_are_right_however_small(t: float, freedom: int, p: float) -> None:
    assert tail(t, freedom) == pytest.approx(p, rel=1e-9, abs=0)


def test_many_degrees_of_freedom_are_the_normal_distribution() -> None:
    assert quantile(0.05, 5000) == pytest.approx(NormalDist().inv_cdf(0.975), rel=1e-3)
    assert rejection(2.0, 1.96, 5000) == pytest.approx(1 - NormalDist().cdf(-0.04), abs=2e-3)


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 30])
def test_without_a_shift_a_test_rejects_at_its_level(freedom: int) -> None:
    """The integral for power, and the series for quantiles, are two ways to the same number."""
    for alpha in (0.05, 0.01):
        assert rejection(0.0, quantile(alpha, freedom), freedom) == pytest.approx(alpha, rel=1e-4)


@pytest.mark.parametrize("t", [25.0, 60.0, 1e3, 1e6])
def test_the_smallest_p_values_keep_their_digits(t: float) -> None:
    """1 - x would be 0 from t = 25 on, and Holm's order among such arms that of their names."""
    assert tail(t, 1) == pytest.approx(2 / math.pi * math.atan(1 / t), rel=1e-12)
    assert tail(t, 2) == pytest.approx(2 / (2 + t * t + t * math.sqrt(2 + t * t)), rel=1e-12)


def test_strong_arms_are_ordered_by_their_strength() -> None:
    generator = random.Random(0)
    noise = [generator.gauss(0, 1) for _ in range(400)]
    arms = {name: [shift + x for x in noise] for name, shift in (("weak", 1.5), ("strong", 3.0))}
    found = compare(arms, target=1.0)
    assert 0 < found["strong"].p < found["weak"].p < 1e-80
    widths = {name: one.high - one.low for name, one in found.items()}
    assert widths["strong"] > widths["weak"], "the strongest has the strictest level, whatever its place in the table"


def test_holm_goes_on_while_it_rejects() -> None:
    levels = holm({"a": 0.04, "b": 0.001, "c": 0.02, "d": 0.9})
    assert levels == {"b": 0.05 / 4, "c": 0.05 / 3, "a": 0.05 / 3, "d": 0.05 / 3}
    assert holm({"a": 0.04, "b": 0.001}) == {"b": 0.025, "a": 0.05}  # alone it would have its 5%


@pytest.mark.parametrize("repeats", [1, 200])
@pytest.mark.parametrize("order", [("weak", "strong"), ("strong", "weak")])
def test_holm_takes_the_strongest_arm_first_also_where_p_is_no_float(repeats: int, order: tuple[str, str]) -> None:
    """The first of two has the wider interval. With a thousand pairs, p of both is 0."""
    noise, effects = [-0.001, 0.001, 0.0, 0.0005, -0.0005] * repeats, {"weak": 1.0, "strong": 2.0}
    found = compare({name: [effects[name] + x for x in noise] for name in order}, target=1.0)
    assert repeats == 1 or found["weak"].p == found["strong"].p == 0.0
    assert found["strong"].high - found["strong"].low > 1.01 * (found["weak"].high - found["weak"].low)


def test_an_interval_leaves_zero_out_exactly_when_there_is_a_verdict() -> None:
    generator = random.Random(1)
    for _ in range(300):
        arms = {name: [generator.gauss(generator.choice((0, 1)), 1) for _ in range(5)] for name in "abcd"}
        for found in compare(arms, target=2.0).values():
            decided = found.verdict in ("better", "worse")
            assert decided == (not found.low <= 0 <= found.high)
            assert found.verdict != "better" or found.high < 0
            assert found.verdict != "worse" or found.low > 0


def test_verdicts_in_words() -> None:
    steady = {"base again": [0.0001, -0.0001, 0.0, 0.0], "good": [-0.01, -0.011, -0.0105, -0.0099]}
    found = compare(steady, target=0.001)
    assert found["good"].describe() == "better"
    assert found["base again"].describe() == "no difference of more than 0.0001 shown"
    (noisy,) = compare({"noisy": [0.01, -0.012, 0.004, -0.001]}, target=0.001).values()
    assert noisy.verdict == "too few seeds"
    assert noisy.describe() == f"too few seeds: {noisy.more} more would show 0.0010"
    alone = compare({"arm": [-0.03]}, target=math.inf, assumed_sd=0.001)["arm"]
    assert alone.describe() == "too few seeds: an interval needs two at least"
    sd = stdev([0.01, -0.012, 0.004, -0.001])
    assert smallest_difference(sd=sd, pairs=4 + noisy.more) <= 0.001 < smallest_difference(sd=sd, pairs=3 + noisy.more)


def test_no_number_of_seeds_is_named_that_would_not_do() -> None:
    """The search for a number ends at MOST_PAIRS, whose power was 10% here."""
    (hopeless,) = compare({"arm": [1.0, -1.2, 0.4, -0.1]}, target=0.001).values()
    assert hopeless.more is None
    assert hopeless.describe() == "too few seeds: more than 1,000 more would show 0.0010"
    assert pairs_needed(0.001, sd=1.0) is None
    wanted = pairs_needed(0.1, sd=1.0)
    assert wanted is not None
    assert smallest_difference(sd=1.0, pairs=wanted) <= 0.1 < smallest_difference(sd=1.0, pairs=wanted - 1)
    edge = smallest_difference(sd=1.0, pairs=1000)
    assert pairs_needed(edge, sd=1.0) == 1000


def test_too_few_pairs_and_equal_pairs_give_no_verdict_by_accident() -> None:
    found = compare({"none": [], "one": [-5.0], "equal": [0.0, 0.0, 0.0]}, target=0.2, assumed_sd=1.0)
    assert [found[name].verdict for name in found] == ["too few seeds", "too few seeds", "no difference"]
    assert found["equal"].describe() == "equal in every pair"
    wanted = pairs_needed(0.2, sd=1.0, comparisons=3)
    assert wanted is not None
    assert found["one"].more == wanted - 1
    assert math.isinf(found["one"].high)
    constant = compare({"constant": [0.25, 0.25]}, target=0.1)["constant"]
    assert constant.verdict == "worse"  # no noise at all: the same difference twice is one


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 2, 4], [1, 3, 2, 4]) == pytest.approx(0.9487, abs=1e-4)
    assert math.isnan(rank_correlation([1, 1, 1], [1, 2, 3]))


Benchmark = Callable[[str], ModuleType]


@pytest.mark.parametrize("draw", ["stored pairs", "normal"])
@pytest.mark.parametrize("seeds", [3, 4, 8])
def test_base_against_base_gets_a_verdict_in_5_of_100_studies(benchmark: Benchmark, draw: str, seeds: int) -> None:
    noise = benchmark("study_noise")
    share = noise.false_verdicts(noise.DRAWS[draw](PAIRS["bpb"]), arms=1, seeds=seeds)
    least, most = noise.binomial(0.05)
    assert least <= share <= most, share


@pytest.mark.parametrize("draw", ["stored pairs", "normal"])
def test_twelve_arms_without_effect_get_no_more_verdicts_than_one(benchmark: Benchmark, draw: str) -> None:
    """Without Holm's correction some arm would get one in 46 of 100 studies."""
    noise = benchmark("study_noise")
    share = noise.false_verdicts(noise.DRAWS[draw](PAIRS["bpb"]), arms=12, seeds=4)
    assert share <= noise.binomial(0.05)[1], share


@pytest.mark.parametrize("draw", ["stored pairs", "normal"])
@pytest.mark.parametrize(("arms", "seeds"), [(1, 4), (1, 8), (6, 4), (12, 8)])
def test_the_smallest_difference_is_seen_in_80_of_100_studies(
    benchmark: Benchmark, draw: str, arms: int, seeds: int
) -> None:
    noise = benchmark("study_noise")
    pairs = PAIRS["bpb"]
    share = noise.seen(noise.DRAWS[draw](pairs), sd=noise.spread(pairs), arms=arms, seeds=seeds)
    least, most = noise.binomial(0.8)
    assert least <= share <= most or (arms > 1 and 0.8 < share < 0.83), share


@pytest.mark.parametrize("draw", ["stored pairs", "normal"])
def test_simulated_noise_has_the_deviation_of_the_pairs(benchmark: Benchmark, draw: str) -> None:
    noise, generator = benchmark("study_noise"), random.Random(1)
    drawn = [noise.DRAWS[draw](PAIRS["bpb"])(generator) for _ in range(20_000)]
    assert stdev(drawn) == pytest.approx(noise.spread(PAIRS["bpb"]), rel=0.02)
    assert abs(sum(drawn) / len(drawn)) < 3 * stdev(drawn) / math.sqrt(len(drawn))


def test_the_noise_is_that_of_thirty_pairs_of_real_runs(benchmark: Benchmark) -> None:
    assert len(PAIRS["bpb"]) == 30
    assert PAIRS["recipe"] == "nano"
    assert 0 < benchmark("study_noise").spread(PAIRS["bpb"]) < 0.2
