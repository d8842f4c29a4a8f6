"""Plans are valid and monotone over the whole range, and keep the settings that were given."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parbank.data.tokenizer import TokenizerConfig
from parbank.display import Display
from parbank.errors import ConfigError, DataError
from parbank.plan.candidates import LEAST_TEXT, TABLES, Request, make_model
from parbank.plan.choose import LEAST_BITS, decay_factor, make_plan
from parbank.plan.describe import describe_plan, plan_table
from parbank.plan.laws import load_laws
from parbank.plan.machine import Machine
from parbank.plan.notes import find_notes
from parbank.plan.plan import introduce, plan_run
from parbank.plan.texts import PlanText
from parbank.recipes import demo
from parbank.runtime import Runtime
from parbank.training.checks import check_size
from tests.plan.machines import CPU, GPU, H200

LAWS = load_laws()
STDLIB = PlanText(name="stdlib", bytes=30e6, hardness=2.1)


def logarithmic(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(0, 1).map(lambda share: low * (high / low) ** share)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """20 seconds to ten hours, 200 kB to 64 MB, 1 MB to 10 GB of text."""
    text = PlanText(name="text", bytes=draw(logarithmic(1e6, 1e10)), hardness=draw(st.floats(0.8, 4.0)))
    return Request(minutes=draw(logarithmic(1 / 3, 600)), max_bytes=int(draw(logarithmic(2e5, 64e6))), text=text)


@settings(max_examples=12, deadline=None)
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
    assert config.budget.most_steps is None or config.budget.most_steps >= 1
    assert (best.epochs - 1) * best.parameters / request.text.bytes <= (4 if machine.cuda else 9) or best.steps <= 1
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


def test_code_that_counts_is_left_out_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    code = 190_000
    monkeypatch.setattr("parbank.plan.choose.code_bytes", lambda: code)
    counted = ("budget.count_code=true",)
    plain = Request(minutes=30, max_bytes=400_000, text=STDLIB)
    best = make_plan(plain, GPU, LAWS).best
    wider = replace(plain, max_bytes=plain.max_bytes + code)
    assert make_plan(replace(wider, settings=counted), GPU, LAWS).best.config.model == best.config.model
    assert make_plan(wider, GPU, LAWS).best.parameters > best.parameters
    with pytest.raises(ConfigError, match="the smallest needs about"):
        make_plan(replace(plain, max_bytes=code, settings=counted), GPU, LAWS)


def test_too_small_a_cap_or_memory_is_refused_with_the_smallest_size() -> None:
    with pytest.raises(ConfigError, match=r"the smallest needs about [\d,]+ bytes: raise --max-bytes"):
        make_plan(Request(minutes=3, max_bytes=20_000, text=STDLIB), CPU, LAWS)
    with pytest.raises(ConfigError, match="memory"):
        make_plan(Request(minutes=3, max_bytes=2_000_000, text=STDLIB), replace(CPU, memory_bytes=1e6), LAWS)


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        (
            ("model.heads=7", "model.width=512"),
            r"--set model\.heads=7, --set model\.width=512: .* multiple of model\.heads \(7\)",
        ),
        (("model.layers=0", 'data="stdlib"'), r"fits --set model\.layers=0: model\.layers must be at least 1, got 0"),
        (("model.vocab_size=1",), "a vocabulary of 1 tokens cannot be trained; choose"),
        (("batch.batch_tokens=1000", "batch.sequence_length=512"), r"--set batch\.batch_tokens=1000, .* multiple of"),
    ],
)
def test_settings_that_leave_no_candidate_are_named_with_the_reason(fixed: tuple[str, ...], said: str) -> None:
    with pytest.raises((ConfigError, DataError), match=said) as found:
        make_plan(Request(minutes=3, max_bytes=2_000_000, text=STDLIB, settings=fixed), CPU, LAWS)
    assert "stdlib" not in str(found.value)


@pytest.mark.parametrize("size", [1, 12, LEAST_TEXT - 1])
def test_too_little_text_is_refused_by_name(size: float) -> None:
    request = Request(minutes=3, max_bytes=2_000_000, text=replace(STDLIB, bytes=size))
    with pytest.raises(ConfigError, match=rf"about {size:,} bytes to train on; a plan needs 20,000 at least"):
        make_plan(request, CPU, LAWS)


@pytest.mark.parametrize("machine", [CPU, replace(CPU, rates=tuple(1e4 * rate for rate in CPU.rates))])
@pytest.mark.parametrize(("size", "hardness"), [(LEAST_TEXT, 2.0), (3e6, 0.02), (3e6, 7.9), (1e10, 4.0)])
def test_an_expected_score_is_one_that_a_model_can_have(machine: Machine, size: float, hardness: float) -> None:
    """Whatever the text, and with next to no step: 0 to 8 bits per byte, and the interval, too."""
    text = PlanText(name="text", bytes=size, hardness=hardness)
    for minutes in (1 / 60, 1, 60):
        best = make_plan(Request(minutes=minutes, max_bytes=2_000_000, text=text), machine, LAWS).best
        assert 0 < best.score <= 8
        assert best.score - 2 * best.deviation >= 0
        if best.steps < 3:
            assert best.config.model.width == 64, "with a handful of steps the smallest learns most"


def test_a_larger_cap_buys_larger_tables() -> None:
    """They cost bytes and hardly any time."""
    corpus = PlanText(name="corpus", bytes=182.8e6, hardness=3.233)
    for machine in (CPU, H200):
        caps = [400_000, 1_000_000, 4_000_000, 64_000_000]
        plans = [make_plan(Request(minutes=3, max_bytes=cap, text=corpus), machine, LAWS).best for cap in caps]
        rows = [plan.config.model.bigram_buckets for plan in plans]
        assert rows == sorted(rows)
        assert rows[-1] > rows[0]
        assert set(rows) <= set(TABLES)
        scores = [plan.score for plan in plans]
        assert scores == sorted(scores, reverse=True)


def test_a_plan_says_which_settings_its_score_does_not_know() -> None:
    known = (
        "budget.minutes=3",
        "model.layers=2",
        "model.vocab_size=1536",
        "train.log_every=7",
        "seed=3",
        'data="stdlib"',
    )
    unknown = (
        "optim.matrix_weight_decay=0.2",
        "tokenizer.case_operators=true",
        "model.isolate_documents=true",
        "train.dropout=0.1",
    )
    free, fixed = (
        make_plan(Request(minutes=3, max_bytes=2_000_000, text=STDLIB, settings=given), CPU, LAWS)
        for given in (known, known + unknown)
    )
    assert fixed.best.score == free.best.score
    assert not any("does not know" in note for note in find_notes(free))
    (note,) = [note for note in find_notes(fixed) if "does not know" in note]
    assert all(setting.partition("=")[0] in note for setting in unknown)
    assert "model.layers" not in note
    assert note in plan_table(fixed)["notes"]


def test_a_busy_machine_is_named_in_the_plan_and_changes_nothing_else() -> None:
    request = Request(minutes=3, max_bytes=2_000_000, text=STDLIB)
    busy = replace(CPU, others=6.0, threads=2, calm=False)
    calm, found = (make_plan(request, machine, LAWS) for machine in (CPU, busy))
    assert found.best == calm.best
    notes = [note for note in plan_table(found)["notes"] if note not in plan_table(calm)["notes"]]
    assert len(notes) == 2
    assert "other processes want 6.0 cores" in notes[0]
    assert "about 25% of its steps" in notes[0]
    assert "the gain of 2 threads over one is assumed" in notes[1]
    assert all(f"note: {note}" in describe_plan(found) for note in notes)
    one = make_plan(request, replace(busy, threads=1), LAWS)
    assert not any("gain of" in note for note in find_notes(one)), "one thread has no gain to measure"


def test_twice_the_minutes_count_with_the_passes_that_they_compile() -> None:
    one, two = (
        make_plan(Request(minutes=minutes, max_bytes=2_000_000, text=STDLIB, compile_minutes=2.0), CPU, LAWS)
        for minutes in (1, 2)
    )
    assert one.more_minutes == pytest.approx(two.best.score)
    assert two.less_minutes == pytest.approx(one.best.score)
    never = make_plan(Request(minutes=2, max_bytes=2_000_000, text=STDLIB), CPU, LAWS)
    assert never.best.score > two.best.score


def test_minutes_that_buy_nothing_are_named() -> None:
    text = PlanText(name="text", bytes=1e10, hardness=3.233)
    long, short = (
        make_plan(Request(minutes=minutes, max_bytes=200_000, text=text), H200, LAWS) for minutes in (70, 0.5)
    )
    assert any("half of the minutes would score within 0.001" in note for note in find_notes(long))
    assert not any("half of the minutes" in note for note in find_notes(short))


@pytest.mark.parametrize("rate", [0.96, 1.0, 1.04])
def test_two_minutes_on_an_h200_give_the_shape_that_was_measured_there(rate: float) -> None:
    """benchmarks/results/study_screen50: 7 layers with MLPs of 4 times the width lead 8 with 3 times."""
    corpus = PlanText(name="corpus", bytes=182.8e6, hardness=3.233)
    machine = replace(H200, rates=tuple(rate * r for r in H200.rates))
    config = make_plan(Request(minutes=2, max_bytes=16_000_000, text=corpus), machine, LAWS).best.config
    model = config.model
    assert (model.layers, model.width, model.heads, model.vocab_size) == (7, 512, 4, 8192)
    assert (model.mlp_multiple, model.rope_dims, config.tokenizer.case_operators) == (4.0, 32, True)
    assert 0.04 <= config.optim.matrix_weight_decay < 0.06
    assert (config.batch.batch_tokens, config.batch.sequence_length) == (65_536, 2048)
    assert config.budget.minutes == 2


def test_a_24_gb_card_gets_smaller_passes_of_the_same_batch() -> None:
    request = Request(minutes=10, max_bytes=16_000_000, text=replace(STDLIB, bytes=2e9))
    large, small = (make_plan(request, replace(GPU, memory_bytes=size), LAWS).best.config for size in (140e9, 6e9))
    assert small.batch.micro_batch_tokens < large.batch.micro_batch_tokens
    assert small.batch.batch_tokens % small.batch.micro_batch_tokens == 0


# As `parbank train --minutes 2` and `parbank.train(minutes=2)` give them.
TWO_MINUTES = ("budget.minutes=2", "budget.steps=None", "budget.tokens=None")


@pytest.mark.parametrize("machine", [CPU, GPU])
@pytest.mark.parametrize("size", [3e5, 1e6, 3e6])
def test_a_small_text_ends_the_clock_before_it_is_known_by_heart(machine: Machine, size: float) -> None:
    """After a number of steps: a machine that is slower than the probe found it has the rest of the clock for them."""
    minutes = 60 if machine is CPU else 2
    request = Request(minutes=minutes, max_bytes=2_000_000, text=replace(STDLIB, bytes=size), settings=TWO_MINUTES)
    plan = make_plan(request, machine, LAWS)
    budget = plan.best.config.budget
    assert budget.minutes == minutes
    assert budget.most_steps is not None
    assert budget.most_steps == pytest.approx(plan.best.steps, abs=0.5)
    assert 300 < budget.most_steps < 60_000, "a whole schedule"
    assert plan.best.epochs < 40
    assert any(f"ends after {budget.most_steps:,} steps, about" in note for note in find_notes(plan))
    assert "learns it by heart" in introduce(plan), "a run that ends early says so at its start"
    large = make_plan(replace(request, text=replace(STDLIB, bytes=1e10)), machine, LAWS)
    assert large.best.config.budget.most_steps is None
    assert not any("by heart" in note for note in find_notes(large))


@pytest.mark.parametrize(("size", "epochs"), [(3e4, 3), (7e4, 4.5), (2e5, 5)])
def test_a_plan_for_a_cpu_repeats_a_small_text(size: float, epochs: float) -> None:
    """docs/log/training.md: the plan ended 30 kB after 27 steps, about one epoch, where four scored 0.4 to 0.9 better. A GPU, on
    which nothing was measured, keeps its plan."""
    request = Request(minutes=1, max_bytes=2_000_000, text=replace(STDLIB, name="text", bytes=size))
    best = make_plan(request, CPU, LAWS).best
    assert epochs < best.epochs < 2 * epochs
    assert best.config.optim.matrix_weight_decay > 0.1
    assert best.deviation > 0.15 * best.score, "small texts are unlike each other"
    other = replace(
        LAWS,
        cpu_texts=replace(LAWS.cpu_texts, small_R=1.0, small_O=1.0, middle_R=1.0, middle_O=1.0, spread=1.0, few=9.0),
    )
    assert make_plan(request, GPU, LAWS) == make_plan(request, GPU, other)


@pytest.mark.parametrize(("size", "epochs"), [(5e5, 6), (1e6, 4), (2e6, 1.5)])
def test_a_minute_on_two_cores_is_used_for_a_middle_text(size: float, epochs: float) -> None:
    """docs/log/training.md: a plan ended 500 kB after half of its minute, and took the smallest vocabulary for all three texts. It
    thought the tokens half as long again as they are."""
    two_cores = replace(CPU, rates=(1.3e-3, 1.1e-12, 5.7e-8, 1.0e-8, 1.9e-12, 2.7e-9))
    request = Request(minutes=1, max_bytes=16_000_000, text=PlanText(name="text", bytes=size, hardness=3.15))
    best = make_plan(request, two_cores, LAWS).best
    assert best.config.budget.most_steps is None
    assert best.config.model.vocab_size >= 512
    assert epochs < best.epochs < 2 * epochs


def test_demo_is_still_what_a_plan_would_choose() -> None:
    """Three minutes, two megabytes and the standard library, on a CPU of about 32,000 tokens/s."""
    two_cores = replace(CPU, rates=(1.5e-3, 1.9e-12, 7e-8, 4e-9, 2.6e-12, 2.2e-9))
    request = Request(minutes=3, max_bytes=2_000_000, text=PlanText(name="stdlib", bytes=30.9e6, hardness=2.05))
    config = make_plan(replace(request, compile_minutes=2.0), two_cores, LAWS).best.config
    assert config.model == demo().model
    assert (config.batch, config.tokenizer, config.optim) == (demo().batch, demo().tokenizer, demo().optim)
    assert config.budget.most_steps is None


def test_decay_of_a_gpu_is_full_after_few_epochs() -> None:
    """benchmarks/results/study_screen50: 0.1 against 0.04 in 1,500 steps over 2.25 epochs."""
    assert 0.04 * decay_factor(2.25, 1500, 183e6, cuda=True) == pytest.approx(0.1, abs=0.01)
    assert decay_factor(1.0, 1500, 183e6, cuda=True) == 1.0


def test_decay_for_a_small_text_grows_with_the_epochs_alone() -> None:
    """benchmarks/results/study_repeats_decay: 0.16 against 0.04 in 1,020 steps over 5 epochs. docs/log/training.md: 0.16 and 0.3
    against 0.07 in 2,343 steps over 12 epochs. On a GPU, and for a large text, decay falls with the steps, as before."""
    assert decay_factor(5.0, 1020, 4e5, cuda=False) == pytest.approx(4.0)
    assert decay_factor(12.2, 2343, 5e5, cuda=False) == decay_factor(9.0, 100, 5e5, cuda=False) == pytest.approx(8.0)
    assert decay_factor(0.7, 1020, 5e5, cuda=False) == decay_factor(1.0, 300, 5e5, cuda=False) == 1.0
    assert decay_factor(5.2, 4080, 5e5, cuda=True) == decay_factor(5.2, 4080, 1e7, cuda=False) == 1.0
    assert decay_factor(9.0, 1020, 5e5, cuda=True) == decay_factor(9.0, 1020, 1e7, cuda=False) == 4.0
    grows = [decay_factor(epochs, 1020, 5e5, cuda=False) for epochs in (1, 2, 3, 4, 5, 7, 8, 9)]
    assert all(before < after for before, after in pairwise(grows))


def test_decay_of_a_plan_follows_the_repeats() -> None:
    plans = {
        (machine.cuda, size): make_plan(
            Request(minutes=10, max_bytes=2_000_000, text=replace(STDLIB, bytes=size)), machine, LAWS
        ).best
        for machine in (CPU, GPU)
        for size in (1e6, 1e9)
    }
    decays = {at: best.config.optim.matrix_weight_decay for at, best in plans.items()}
    few = plans[False, 1e6]
    assert few.epochs > 2
    assert decays[False, 1e6] == pytest.approx(0.04 * decay_factor(few.epochs, few.steps, 1e6, cuda=False), abs=0.001)
    assert decays[False, 1e6] > 0.06
    assert few.config.optim.adam_weight_decay == decays[False, 1e6]
    assert decays[False, 1e9] == decays[True, 1e9] == 0.04, "a text that is seen once"
    repeated = plans[True, 1e6]
    expected = 0.04 * decay_factor(repeated.epochs, repeated.steps, 1e6, cuda=True)
    assert decays[True, 1e6] == pytest.approx(expected, abs=0.001)
    fixed = Request(
        minutes=10, max_bytes=2_000_000, text=replace(STDLIB, bytes=1e6), settings=("optim.matrix_weight_decay=0.01",)
    )
    assert make_plan(fixed, CPU, LAWS).best.config.optim.matrix_weight_decay == 0.01


@pytest.mark.parametrize("machine", [CPU, GPU])
@pytest.mark.parametrize("size", [20_000, 1e5, 1e6, 1e7])
def test_no_model_is_larger_than_its_text(machine: Machine, size: float) -> None:
    """The law alone would see 100 kB once with 39 million parameters."""
    for minutes in (1, 60):
        best = make_plan(
            Request(minutes=minutes, max_bytes=64_000_000, text=replace(STDLIB, bytes=size)), machine, LAWS
        ).best
        assert best.parameters <= max(size, 200_000)
        assert best.config.model.vocab_size >= 2 * best.config.model.width or best.config.model.vocab_size == 320


def test_tokens_that_are_ready_fix_the_vocabulary() -> None:
    text = PlanText(name="shards", bytes=5e6, hardness=2.0, vocab=700, bytes_per_token=2.2)
    assert make_plan(Request(minutes=3, max_bytes=2_000_000, text=text), CPU, LAWS).best.config.model.vocab_size == 700


def test_a_plan_for_a_cpu_has_the_options_of_demo() -> None:
    """Case operators, and short windows first; both count in what it expects."""
    request = Request(minutes=3, max_bytes=2_000_000, text=STDLIB)
    plan = make_plan(request, CPU, LAWS).best
    assert plan.config.tokenizer == demo().tokenizer == TokenizerConfig(case_operators=True)
    assert plan.config.batch.stages == ((0.4, plan.config.batch.sequence_length // 2, plan.config.batch.batch_tokens),)
    for without in ("tokenizer.case_operators=false", "batch.stages=[]"):
        fixed = [f"model.{name}={getattr(plan.config.model, name)}" for name in ("layers", "width", "vocab_size")]
        other = make_plan(replace(request, settings=(without, *fixed)), CPU, LAWS).best
        assert other.score > plan.score + 0.005
    tokens = replace(STDLIB, vocab=1024, bytes_per_token=2.5)
    assert not make_plan(replace(request, text=tokens), CPU, LAWS).best.config.tokenizer.case_operators


def test_a_plan_for_a_gpu_counts_on_case_operators() -> None:
    """benchmarks/results/study_screen50."""
    request = Request(minutes=3, max_bytes=16_000_000, text=STDLIB)
    plan = make_plan(request, GPU, LAWS).best
    assert plan.config.tokenizer.case_operators
    fixed = [f"model.{name}={getattr(plan.config.model, name)}" for name in ("layers", "width", "vocab_size")]
    without = replace(request, settings=("tokenizer.case_operators=false", *fixed))
    assert make_plan(without, GPU, LAWS).best.score > plan.score + 0.005


def test_a_head_of_its_own_where_a_gpu_has_bytes_for_it() -> None:
    """benchmarks/results/study_screen50b."""
    request = Request(minutes=2, max_bytes=64_000_000, text=replace(STDLIB, bytes=200e6))
    plan = make_plan(request, GPU, LAWS)
    assert not plan.best.config.model.tied
    assert "a head of its own; " in describe_plan(plan)
    assert "embedding as the head" in describe_plan(plan)
    fixed = make_plan(replace(request, settings=("model.tied=true",)), GPU, LAWS).best
    assert fixed.config.model.tied
    assert fixed.score > plan.best.score
    small = replace(request, max_bytes=1_000_000)
    assert make_plan(small, GPU, LAWS).best.config.model.tied
    assert not make_plan(replace(small, settings=("model.tied=false",)), GPU, LAWS).best.config.model.tied
    assert make_plan(replace(request, text=STDLIB), CPU, LAWS).best.config.model.tied, "measured on a GPU alone"


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_a_head_of_its_own_is_known_where_it_was_measured(machine: Machine) -> None:
    request = Request(minutes=3, max_bytes=8_000_000, text=STDLIB, settings=("model.tied=false",))
    said = any("does not know model.tied" in note for note in find_notes(make_plan(request, machine, LAWS)))
    assert said == (not machine.cuda)


def test_what_else_the_second_screen_found_is_planned_on_a_gpu_alone() -> None:
    request = Request(minutes=2, max_bytes=4_000_000, text=STDLIB)
    gpu, cpu = (make_plan(request, machine, LAWS).best.config for machine in (GPU, CPU))
    assert (gpu.model.qk_gain, gpu.optim.final_lr) == (3.0, 0.05)
    assert (cpu.model.qk_gain, cpu.optim.final_lr) == (demo().model.qk_gain, demo().optim.final_lr) == (1.5, 0.0)


def test_heads_of_a_gpu_rotate_a_quarter_of_their_channels() -> None:
    shapes = {width: make_model(6, width, 4096, {}, cuda=True) for width in (320, 384, 512, 1024)}
    assert {model.head_width: model.rope_dims for model in shapes.values()} == {64: 16, 128: 32}
    assert {width: model.mlp_multiple for width, model in shapes.items()} == {320: 3.0, 384: 3.0, 512: 4.0, 1024: 4.0}
    assert make_model(6, 512, 4096, {"model.mlp_multiple": 3.0}, cuda=True).mlp_multiple == 3.0


def test_a_plan_says_where_it_leaves_the_data_and_what_it_considered() -> None:
    text = replace(STDLIB, bytes=9e9, hardness=4.0)
    plan = make_plan(Request(minutes=3, max_bytes=2_000_000, text=text), CPU, LAWS)
    (note,) = [note for note in find_notes(plan) if "bytes of text" in note]
    assert re.fullmatch(r"9,000,000,000 bytes of text lie outside .* \([\d,]+ to [\d,]+\): extrapolated", note)
    said = describe_plan(plan)
    for word in ("vocabulary", "layers of", "tables", "batch", "learning rates", "decay", "averaging", "bits per weight",
                 "epochs", "twice the minutes", "twice the bytes", "considered", "note: "):  # fmt: skip
        assert word in said
    assert re.search(r"in windows of \d+, ", said)
    table = plan_table(plan)
    assert table["config"]["recipe"] == "auto"
    assert table["expected"]["score"] == plan.best.score
    assert len(table["others"]) == len(plan.others) > 0


def test_a_plan_takes_mixed_lengths_for_a_batch_that_is_given() -> None:
    mixed = ("batch.sequence_length=512", "batch.batch_tokens=8192", "batch.mixed_lengths=[256,512]")
    stages = "batch.stages=[[0.4,[128,512],8192]]"
    request = Request(minutes=3, max_bytes=2_000_000, text=STDLIB, settings=(*mixed, stages))
    plan = make_plan(request, CPU, LAWS)
    assert plan.best.config.batch.mixed_lengths == (256, 512)
    said = describe_plan(plan)
    assert "8,192 tokens in windows of 256 and 512, " in said
    assert "; 40% of the time at 128 and 512" in said
    with pytest.raises(ConfigError, match=r"set batch\.sequence_length and batch\.batch_tokens, too"):
        plan_run(mixed[1:], Runtime(device=torch.device("cpu")))
