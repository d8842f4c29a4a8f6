"""Plans are valid and monotone over the whole range, and keep the settings that were given."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parbank.errors import ConfigError
from parbank.plan.choose import LEAST_BITS, Request, make_plan
from parbank.plan.describe import describe_plan, plan_table
from parbank.plan.laws import load_laws
from parbank.plan.texts import Text
from parbank.training.checks import check_size
from parbank.training.display import Display
from tests.plan.machines import CPU, GPU

LAWS = load_laws()
STDLIB = Text(name="stdlib", bytes=30e6, hardness=2.1)


def logarithmic(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(0, 1).map(lambda share: low * (high / low) ** share)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """20 seconds to ten hours, 200 kB to 64 MB, 1 MB to 10 GB of text."""
    text = Text(name="text", bytes=draw(logarithmic(1e6, 1e10)), hardness=draw(st.floats(0.8, 4.0)))
    return Request(minutes=draw(logarithmic(1 / 3, 600)), max_bytes=int(draw(logarithmic(2e5, 64e6))), text=text)


@settings(max_examples=20, deadline=None)
@given(
    requests(),
    st.sampled_from([CPU, GPU]),
    st.sampled_from([1, 2, 3, 6, 8]),
    logarithmic(1.5e9, 140e9),
    st.floats(1, 4),
)
def test_every_plan_is_valid_and_more_is_never_worse(
    request: Request, kind: object, ranks: int, memory: float, more: float
) -> None:
    machine = replace(kind, ranks=ranks, memory_bytes=memory)  # type: ignore[type-var]
    plan = make_plan(request, machine, LAWS)
    best, config = plan.best, plan.best.config
    assert best.tokens > 0
    assert 0 < best.score < 10
    assert best.deviation > 0
    assert best.bits_per_weight >= LEAST_BITS
    assert config.budget.minutes == request.minutes
    assert config.budget.max_bytes == request.max_bytes
    assert config.batch.micro_sequences(ranks) >= 1
    passes = config.batch.batch_tokens // (ranks * config.batch.micro_batch_tokens)
    assert passes * ranks * config.batch.micro_batch_tokens == config.batch.batch_tokens
    check_size(config, Display(enabled=False))
    assert plan.more_minutes <= best.score + 1e-9
    assert plan.more_bytes <= best.score + 1e-9
    for wider in (
        replace(request, minutes=more * request.minutes), replace(request, max_bytes=int(more * request.max_bytes))
    ):  # fmt: skip
        assert make_plan(wider, machine, LAWS).best.score <= best.score + 1e-9


def test_more_time_makes_a_larger_model_and_a_small_cap_a_smaller_one() -> None:
    short, long = (
        make_plan(Request(minutes=minutes, max_bytes=16_000_000, text=STDLIB), GPU, LAWS).best for minutes in (0.05, 30)
    )
    small = make_plan(Request(minutes=30, max_bytes=400_000, text=STDLIB), GPU, LAWS).best
    assert short.parameters < long.parameters / 2
    assert short.score > long.score
    assert small.parameters < long.parameters / 4
    assert small.score > long.score
    many = Request(minutes=60, max_bytes=16_000_000, text=replace(STDLIB, bytes=1e10))
    few = make_plan(replace(many, minutes=0.05), GPU, LAWS).best
    assert make_plan(many, GPU, LAWS).best.config.batch.batch_tokens > few.config.batch.batch_tokens


@pytest.mark.parametrize(
    "fixed",
    [
        ("model.vocab_size=2048",), ("model.width=320", "model.heads=5", "model.kv_heads=1"), ("model.layers=5",),
        ("batch.batch_tokens=4096", "batch.sequence_length=512"), ("optim.matrix_lr=0.01", "seed=3"),
        ("model.mlp_multiple=4", "model.bigram_buckets=4096"), ('average.use="none"',),
    ],
)  # fmt: skip
def test_settings_are_kept_and_the_rest_is_planned_around_them(fixed: tuple[str, ...]) -> None:
    from parbank.config import override

    request = Request(minutes=3, max_bytes=2_000_000, text=STDLIB, settings=fixed)
    config = make_plan(request, CPU, LAWS).best.config
    assert override(config, *fixed) == config
    assert config.recipe == "auto"


def test_a_narrow_choice_is_counted_with_its_settings() -> None:
    free, wide = (
        make_plan(Request(minutes=3, max_bytes=2_000_000, text=STDLIB, settings=fixed), CPU, LAWS)
        for fixed in ((), ("model.width=384", "model.layers=4"))
    )
    assert wide.best.score >= free.best.score
    assert wide.candidates < free.candidates
    assert wide.best.tokens_per_second < free.best.tokens_per_second or free.best.config.model.width >= 384


def test_too_small_a_cap_or_memory_is_refused_with_the_smallest_size() -> None:
    with pytest.raises(ConfigError, match=r"the smallest needs about [\d,]+ bytes: raise --max-bytes"):
        make_plan(Request(minutes=3, max_bytes=20_000, text=STDLIB), CPU, LAWS)
    with pytest.raises(ConfigError, match="memory"):
        make_plan(Request(minutes=3, max_bytes=2_000_000, text=STDLIB), replace(CPU, memory_bytes=1e6), LAWS)
    contrary = Request(minutes=3, max_bytes=2_000_000, text=STDLIB, settings=("model.heads=7", "model.width=512"))
    with pytest.raises(ConfigError, match="multiple of the heads"):
        make_plan(contrary, CPU, LAWS)


def test_a_24_gb_card_gets_smaller_passes_of_the_same_batch() -> None:
    request = Request(minutes=10, max_bytes=16_000_000, text=replace(STDLIB, bytes=2e9))
    large, small = (make_plan(request, replace(GPU, memory_bytes=size), LAWS).best.config for size in (140e9, 6e9))
    assert small.batch.micro_batch_tokens < large.batch.micro_batch_tokens
    assert small.batch.batch_tokens % small.batch.micro_batch_tokens == 0


def test_tokens_that_are_ready_fix_the_vocabulary() -> None:
    text = Text(name="shards", bytes=5e6, hardness=2.0, vocab=700, bytes_per_token=2.2)
    assert make_plan(Request(minutes=3, max_bytes=2_000_000, text=text), CPU, LAWS).best.config.model.vocab_size == 700


def test_a_plan_says_where_it_leaves_the_data_and_what_it_considered() -> None:
    text = replace(STDLIB, bytes=9e9, hardness=4.0)
    plan = make_plan(Request(minutes=3, max_bytes=2_000_000, text=text), CPU, LAWS)
    assert any("extrapolated" in note and "bytes of text" in note for note in plan.notes)
    said = describe_plan(plan)
    for word in ("vocabulary", "layers of", "tables", "batch", "learning rates", "decay", "averaging", "bits per weight",
                 "epochs", "twice the minutes", "twice the bytes", "considered", "note: "):  # fmt: skip
        assert word in said
    table = plan_table(plan)
    assert table["config"]["recipe"] == "auto"
    assert table["expected"]["score"] == plan.best.score
    assert len(table["others"]) == len(plan.others) > 0
