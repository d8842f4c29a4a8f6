"""A plan for a text that was trained on before expects the score of that run, and is otherwise the same plan."""

import itertools
import json
import math
import os
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import parbank
from parbank.data.prepare import prepare_text
from parbank.data.progress import say_nothing
from parbank.errors import FileError
from parbank.plan import fit as fitting
from parbank.plan import history
from parbank.plan import plan as planning
from parbank.plan.candidates import Request
from parbank.plan.choose import Plan, make_plan
from parbank.plan.describe import describe_plan, plan_table
from parbank.plan.history import KEPT, Sizes, recall, remember
from parbank.plan.laws import LEAST_STEPS, load_laws
from parbank.plan.machine import Machine
from parbank.plan.notes import find_notes
from parbank.plan.plan import introduce, plan_run
from parbank.plan.texts import PlanText, read_text
from parbank.runtime import Runtime
from tests.plan.machines import CPU, H200

LAWS = load_laws()
TEXT = PlanText(name="text", bytes=182.8e6, hardness=3.233, digest="a")
ROOT = Path(__file__).resolve().parents[2]
PLACE = Runtime(device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def own_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARBANK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plan"


def plan_for(text: PlanText = TEXT, machine: Machine = H200, minutes: float = 2, **changes: Any) -> Plan:
    return make_plan(Request(minutes=minutes, max_bytes=16_000_000, text=text, **changes), machine, LAWS)


def summary_of(plan: Plan, factor: float = 1.1, **changes: Any) -> dict[str, Any]:
    """A run as the plan expected it, with a score that is off by a factor."""
    score = factor * (plan.best.score - plan.best.packing)
    return {
        "val_bpb_before_packing": score,
        "tokens": round(plan.best.tokens),
        "steps": round(plan.best.steps),
    } | changes


def write_text(folder: Path, module: str, count: int = 12) -> str:
    """Parts of a module of the standard library, one in four for validation; the spec."""
    text = (Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py").read_text()
    for number in range(count):
        path = folder / ("val" if number % 4 == 3 else "train") / f"{number:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text[3000 * number : 3000 * (number + 1)])
    return f"text:train={folder / 'train'},val={folder / 'val'}"


def plan_spec(spec: str, minutes: float = 1) -> Plan:
    return plan_run(
        [f"data={json.dumps(spec)}", f"budget.minutes={minutes}", "budget.max_bytes=300_000"], PLACE, threads=1
    )


def test_a_run_teaches_the_next_plan_of_its_text_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text ends the run after 142 steps, whatever the speed of this machine."""
    monkeypatch.setattr(planning, "look_at", lambda place, say: CPU)
    spec, other = (write_text(tmp_path / module, module) for module in ("argparse", "optparse"))
    before, before_other = plan_spec(spec), plan_spec(other)
    run = parbank.train(
        data=spec, minutes=1, max_bytes=300_000, out=tmp_path / "run", device="cpu", threads=1, quiet=True
    )
    measured = run.summary["val_bpb"]
    after = plan_spec(spec)
    assert abs(before.best.score - measured) > 4 * after.best.deviation, "something to learn"
    assert abs(after.best.score - measured) < 2 * after.best.deviation < before.best.deviation
    assert after.best.config == before.best.config
    assert after.known is not None
    assert "this text was trained on before, on 20" in introduce(after)
    assert plan_spec(other) == before_other
    # the same files, named otherwise, and then moved
    named = f"text:train={tmp_path}/argparse/train/*.txt,val={tmp_path}/argparse/val"
    assert plan_spec(named).best.score == after.best.score
    (tmp_path / "argparse").rename(tmp_path / "moved")
    assert plan_spec(spec.replace("argparse", "moved")).best.score == after.best.score
    (tmp_path / "moved" / "val" / "03.txt").write_text("Another text is scored. " * 100)
    assert plan_spec(spec.replace("argparse", "moved")).known is None


@pytest.mark.parametrize("machine", [CPU, H200])
@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        replace(TEXT, name="stdlib", bytes=30e6, hardness=2.1),
        replace(TEXT, bytes=2e5),
        replace(TEXT, bytes=1e6),
        replace(TEXT, vocab=700, bytes_per_token=2.2, bytes=5e6),
    ],
)
@pytest.mark.parametrize("fixed", [(), ("model.bigram_buckets=0",), ("tokenizer.case_operators=false",)])
def test_the_laws_say_the_same_of_a_past_run_as_of_a_coming_one(
    machine: Machine, text: PlanText, fixed: tuple[str, ...]
) -> None:
    """Of every candidate that a plan shows, before packing: else a factor would correct what is right."""
    plan = plan_for(text, machine, settings=fixed)
    laws = LAWS if machine.cuda else LAWS.for_text_on_a_cpu(text.bytes)
    for choice in (plan.best, *plan.others):
        found = history._expect(Sizes.of(choice.config, choice.tokens), plan, laws)
        assert found.score == pytest.approx(choice.score - choice.packing, abs=1e-9)


@pytest.mark.parametrize("machine", [CPU, H200])
@pytest.mark.parametrize("factor", [0.6, 1.117, 1.8])
def test_a_history_changes_no_choice_and_multiplies_every_score(machine: Machine, factor: float) -> None:
    for minutes, size in ((0.3, 182.8e6), (2, 182.8e6), (60, 2e6)):
        text = replace(TEXT, bytes=size, digest=f"{minutes} {size}")
        plain = plan_for(text, machine, minutes)
        remember(plain, summary_of(plain, factor))
        found = recall(plan_for(text, machine, minutes), LAWS)
        assert found.known is not None
        assert found.known.factor == pytest.approx(factor, rel=1e-4)
        pairs = [(found.best, plain.best), *zip(found.others, plain.others, strict=True)]
        for one, other in pairs:
            assert one.config == other.config
            assert (one.tokens, one.bits_per_weight, one.parameters) == (
                other.tokens, other.bits_per_weight, other.parameters
            )  # fmt: skip
            assert one.score == pytest.approx(min(8, factor * other.score), rel=1e-4)
        assert found.more_minutes <= found.best.score + 1e-9
        assert found.more_bytes <= found.best.score + 1e-9
        assert found.best.deviation < 0.5 * plain.best.deviation
        assert (found.known.score, found.known.deviation) == (plain.best.score, plain.best.deviation)


def test_two_minutes_on_an_h200_expect_what_they_scored() -> None:
    """docs/log/training.md: expected 0.952, measured 1.0632 before packing, and 1.0649 after."""
    plain = plan_for()
    remember(plain, summary_of(plain, val_bpb_before_packing=1.0632))
    found = recall(plan_for(), LAWS)
    assert found.best.score - found.best.packing == pytest.approx(1.0632, abs=1e-4)
    assert abs(found.best.score - 1.0649) < 2 * found.best.deviation < 0.03
    five = recall(plan_for(minutes=5), LAWS)
    assert five.best.deviation > 2 * found.best.deviation, "a longer run is less certain"
    assert five.best.score < found.best.score
    (note,) = [note for note in find_notes(found) if "trained on before" in note]
    assert "scored 1.063 bits per byte before packing, 1.1" in note
    table = plan_table(found)
    assert table["known"]["bpb"] == 1.0632
    assert table["known"]["score"] == plain.best.score
    assert f"note: {note}" in describe_plan(found)
    assert plan_table(plain)["known"] is None


def test_the_most_alike_run_counts_and_of_equal_ones_the_latest() -> None:
    short, long = plan_for(minutes=0.5), plan_for(minutes=8)
    for plan, factor in ((long, 1.3), (short, 1.0), (short, 1.1)):
        remember(plan, summary_of(plan, factor))
    factors = [recall(plan_for(minutes=minutes), LAWS).known.factor for minutes in (0.5, 0.6, 7)]  # type: ignore[union-attr]
    assert factors == pytest.approx([1.1, 1.1, 1.3], rel=1e-3)


def test_a_run_that_says_too_little_does_not_count() -> None:
    """A run of a tiny model far from the plan, and another kind of machine."""
    small = plan_for(minutes=0.02, settings=("model.width=64", "model.layers=2", "model.vocab_size=512"))
    remember(small, summary_of(small, steps=LEAST_STEPS))
    assert recall(small, LAWS).known is not None
    assert recall(plan_for(minutes=60), LAWS).known is None
    plan = plan_for(minutes=8)
    remember(plan, summary_of(plan))
    assert recall(plan_for(machine=CPU), LAWS).known is None


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({"steps": LEAST_STEPS - 1}, ()),
        ({"val_bpb_before_packing": math.nan}, ()),
        ({"val_bpb_before_packing": 8.1}, ()),
        ({"val_bpb_before_packing": 0.2}, ()),
        ({}, ("optim.matrix_lr=0.01",)),
        ({}, ("model.layers=1", "model.width=16")),
    ],
)
def test_runs_that_the_laws_do_not_describe_teach_nothing(changes: dict[str, Any], settings: tuple[str, ...]) -> None:
    plan = plan_for(settings=settings)
    remember(plan, summary_of(plan, **changes))
    assert recall(plan, LAWS) == plan


def test_a_text_without_a_digest_is_not_remembered(own_history: Path) -> None:
    plan = plan_for(replace(TEXT, digest=""))
    remember(plan, summary_of(plan))
    assert recall(plan, LAWS) == plan
    assert not own_history.exists()


def test_damaged_files_count_as_none(own_history: Path) -> None:
    plan = plan_for()
    remember(plan, summary_of(plan))
    (path,) = own_history.iterdir()
    (sound,) = json.loads(path.read_text())
    sizes = sound["sizes"]
    wrong: list[Any] = [
        {}, [], [1], None, "text", [[]], [sound | {"bpb": "1"}], [sound | {"bpb": -1.0}], [sound | {"bpb": 9.0}], [sound, {}],
        [sound | {"bpb": True}], [sound | {"on": "yesterday"}], [sound | {"on": 3}], [sound | {"sizes": []}],
        [{name: value for name, value in sound.items() if name != "on"}],
    ]  # fmt: skip
    wrong += [[sound | {"sizes": sizes | {name: value}}] for name in sizes for value in (None, -2, "3", 10**400, [])]
    wrong += [
        [sound | {"sizes": {name: value for name, value in sizes.items() if name != missing}}] for missing in sizes
    ]
    texts = [json.dumps(value) for value in wrong]
    texts += ["", "{", "[" * 100_000, path.read_text()[:-20], path.read_text().replace(str(sound["bpb"]), "NaN"), "\0"]
    for text in texts:
        path.write_text(text)
        assert recall(plan, LAWS) == plan, text[:200]
    path.write_bytes(b"\xff\xfe")
    assert recall(plan, LAWS) == plan
    remember(plan, summary_of(plan))
    assert recall(plan, LAWS).known is not None, "the next run replaces it"
    path.unlink()
    path.mkdir()
    assert recall(plan, LAWS) == plan
    remember(plan, summary_of(plan))


def test_a_cache_that_cannot_be_written_is_no_error(
    own_history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for()

    def refuse(*given: object) -> None:
        raise FileError("cannot write: Read-only file system")

    with monkeypatch.context() as full:
        full.setattr(history, "write_json", refuse)
        remember(plan, summary_of(plan))
    if os.getuid():  # root may write to any folder
        own_history.chmod(0o500)
        remember(plan, summary_of(plan))
        own_history.chmod(0o700)
    assert recall(plan, LAWS) == plan
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PARBANK_CACHE", str(tmp_path / "file" / "cache"))
    remember(plan, summary_of(plan))
    assert recall(plan, LAWS) == plan


def test_an_earlier_version_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for()
    remember(plan, summary_of(plan))
    monkeypatch.setattr(history, "VERSION", history.VERSION + 1)
    assert recall(plan, LAWS) == plan


def test_a_file_keeps_the_latest_runs(own_history: Path) -> None:
    plan = plan_for()
    for number in range(KEPT + 3):
        remember(plan, summary_of(plan, 1 + number / 100))
    (path,) = own_history.iterdir()
    assert len(json.loads(path.read_text())) == KEPT
    assert recall(plan, LAWS).known.factor == pytest.approx(1 + (KEPT + 2) / 100, rel=1e-4)  # type: ignore[union-attr]


def test_runs_that_end_at_once_leave_a_whole_file() -> None:
    """One of them may be forgotten."""
    plan = plan_for()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: remember(plan, summary_of(plan, 1.1)), range(20)))
    found = recall(plan, LAWS)
    assert found.known is not None
    assert found.known.factor == pytest.approx(1.1, rel=1e-4)


def test_a_digest_is_of_what_is_read_and_scored(tmp_path: Path) -> None:
    spec = write_text(tmp_path, "argparse")
    train = f"text:{tmp_path}/train"
    digests = [read_text(one).digest for one in (spec, f"{spec},holdout=dev", train, f"{train}/*.txt,holdout=dev")]
    assert digests[1] == digests[3], "validation text that is not scored does not count"
    assert len(set(digests)) == 3
    assert read_text(train).digest == read_text(f"text:{tmp_path}/train/*.txt").digest
    (tmp_path / "train" / "00.txt").write_text("x")
    assert read_text(train).digest not in digests


def test_shards_are_known_by_their_tokens(tmp_path: Path) -> None:
    spec = write_text(tmp_path / "text", "argparse")
    for name, vocab in (("a", 400), ("b", 400), ("c", 500)):
        prepare_text([spec], tmp_path / name, vocab_size=vocab, say=say_nothing)
    one, same, other = (read_text(f"shards:{tmp_path / name}").digest for name in "abc")
    assert one == same != other


def off(one: dict[str, Any], other: dict[str, Any]) -> float:
    """By how much the score of a run misses what another run and the laws say of it, over the deviation to expect."""
    here, there = fitting.make_cases([one]), fitting.make_cases([other])
    ratio = one["bpb"] / other["bpb"] * LAWS.score(there)[0] / LAWS.score(here)[0]
    deviation = LAWS.transfer(here, there, options=False, windows=0.0, past_windows=0.0)[0]
    return float(math.log(ratio) / deviation)


def test_runs_predict_each_other_within_the_deviation_that_is_said() -> None:
    """Runs of the fit, and runs of twelve texts that the fit has not seen."""
    rows = [row for row in fitting.read_rows(fitting.RUNS)[0] if row.get("grid") != "epochs"]
    kinds = [(fitting.level(row), row.get("device"), row.get("options")) for row in rows]
    fitted = [off(rows[a], rows[b]) for a, b in itertools.permutations(range(len(rows)), 2) if kinds[a] == kinds[b]]
    (path,) = (ROOT / "benchmarks" / "results" / "text_difficulty").glob("*/result.json")
    runs = json.loads(path.read_text())["runs"]
    unseen = [off(a, b) for a, b in itertools.permutations(runs, 2) if a["text"] == b["text"]]
    assert len(fitted) > 200
    assert len(unseen) == 24
    for found, most in ((fitted, 1.0), (unseen, 1.2)):
        assert math.sqrt(np.mean(np.square(found))) < most
        assert np.quantile(np.abs(found), 0.8) < 2
