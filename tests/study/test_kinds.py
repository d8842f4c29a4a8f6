"""Studies that train nothing: packing and scoring of stored runs, and kernels."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parbank.data.shards import TokenSet
from parbank.display import Display
from parbank.errors import ArtifactError, ConfigError, DeviceError, ParbankError
from parbank.eval.methods import make_method
from parbank.eval.score import Scored
from parbank.runtime import Runtime
from parbank.statistics import compare
from parbank.study import kinds
from parbank.study.engine import forget_failures, run_study
from parbank.study.kernels import KERNELS, Bench, claim_of
from parbank.study.kinds import KINDS
from parbank.study.kinds.stored import Packing, cut_into_parts
from parbank.study.noise import Noise
from parbank.study.report import Report, correlate, make_report
from parbank.study.ship import make_study
from parbank.study.study import BASE, Arm, Job, Study
from parbank.training.load import load_trained
from parbank.training.pack import pack_checkpoint

CPU = Runtime(device=torch.device("cpu"))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, text_spec: str) -> list[Path]:
    """Two runs of nano with their checkpoints, as `study run --keep` leaves them."""
    folder = tmp_path_factory.mktemp("stored")
    settings = ["train.warmup_steps=0", "budget.max_bytes=60000", "quant.calibration_tokens=1024"]
    study = make_study(
        "seeds",
        recipe="nano",
        data=text_spec,
        budget="8steps",
        seeds=2,
        settings=settings,
        score_tokens=1000,
        keep=True,
    )
    run_study(study, folder, device="cpu", workers=0, quiet=True)
    return [folder / "runs" / f"base.{seed}" for seed in range(2)]


def test_packing_of_one_checkpoint_is_compared_on_parts_of_the_text(stored: list[Path], tmp_path: Path) -> None:
    study = make_study(
        "published-quantisation", checkpoints=map(str, stored[:1]), seeds=3, arms=["int5-rows"], score_tokens=4000
    )
    assert study.base.data.endswith("holdout=dev"), "the text that the run did not train on"
    report = run_study(study, tmp_path / "s", device="cpu", workers=0, quiet=True)
    assert not report.failures
    assert report.comparisons["int5-rows"].pairs == 3
    results = report.results
    assert len({results[Job(BASE, seed)]["value"] for seed in range(3)}) == 3
    # the same file as `parbank pack` makes
    _, packed = pack_checkpoint(stored[0], 60_000, tmp_path / "x.pbk")
    assert results[Job(BASE, 0)]["bytes"] == packed.size
    assert results[Job("int5-rows", 0)]["bytes"] != packed.size
    text = report.text()
    assert "One checkpoint: a run is one part of the text, and `mean` is the score of the whole text." in text
    assert "Soft rounding, which was published beside these, changes training." in text
    assert "published-rounding" in text
    # the mean is comparable with the score before packing, which is that of the whole text as well
    whole = results[Job(BASE, 0)]["whole"]
    assert f"Before packing: {results[Job(BASE, 0)]['unpacked']:.4f} on the whole text." in text
    assert f"| base      | 3    | {whole:.4f} |" in text
    assert whole == pytest.approx(score_of(tmp_path / "x.pbk", study.base.data, 4000), rel=1e-6)
    values = [results[Job(BASE, seed)]["value"] for seed in range(3)]
    assert min(values) < whole < max(values)
    assert whole != pytest.approx(np.mean(values), rel=1e-6), "parts differ in length: their mean is another number"
    for result in results.values():
        assert result["gpu"] == {}, "no GPU here; on one, its clock and power"
        assert result["recompilations"] == 0
    with pytest.raises(ConfigError, match="would only cut the same text finer"):
        KINDS["packing"].check(report.study.with_more(seeds=2, results=6))


def score_of(path: Path, data: str, count: int) -> float:
    from parbank.data.validation import open_validation
    from parbank.training.load import load_model

    loaded = load_model(path, CPU.device)
    tokens = open_validation(data, loaded.tokenizer, say=lambda line: None).tokens
    method = make_method("chunked", context=loaded.context)
    return method.score(loaded.model, TokenSet([tokens.read(0, count)]), CPU).total(loaded.tokenizer).bpb


def test_more_seeds_are_not_asked_for_where_they_are_refused(stored: list[Path], tmp_path: Path) -> None:
    study = make_study("published-quantisation", checkpoints=map(str, stored[:1]), seeds=2, arms=["int5-rows"])
    compared = compare({"int5-rows": [0.1, -0.2]}, target=0.01)
    report = Report(study, {}, {}, {}, Noise(0.1, ""), compared)
    assert report.verdict("int5-rows") == "undecided: this text cannot show 0.0100"
    several = replace(report, study=replace(study, checkpoints=tuple(map(str, stored))))
    assert several.verdict("int5-rows").startswith("too few checkpoints: ")
    with pytest.raises(ConfigError, match="2 are given, and --seeds 5; leave --seeds out"):
        make_study("published-quantisation", checkpoints=map(str, stored), seeds=5)


def test_a_packing_that_fails_is_tried_twice_and_not_for_every_seed(
    stored: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def evaluate(self: Packing, study: Study, arm: Arm, checkpoint: str) -> tuple[object, ...]:
        tried.append(arm.name)
        if arm.name != BASE:
            raise ArtifactError("does not fit the cap")
        scored = Scored(np.arange(31, dtype=np.uint16), np.ones(30, np.float32))
        return scored, ByteTokenizer(), {}

    monkeypatch.setattr(Packing, "evaluate", evaluate)
    study = make_study("published-quantisation", checkpoints=map(str, stored[:1]), seeds=5, arms=["int5-rows"])
    report = run_study(study, tmp_path / "s", device="cpu", workers=0, quiet=True)
    assert tried.count("int5-rows") == 2
    assert tried.count(BASE) == 1
    failed = [note for note in report.notes() if note.startswith("Failed")]
    assert len(failed) == 1
    assert "int5-rows, seeds 0, 1, 2, 3, 4: EvaluationError: ArtifactError: does not fit the cap" in failed[0]
    assert forget_failures(tmp_path / "s") == 5
    run_study(None, tmp_path / "s", device="cpu", workers=0, quiet=True)
    assert tried.count("int5-rows") == 4, "asked to, it tries again"


def test_arms_that_calibrate_alike_share_it_and_its_seconds_are_nobodys(stored: list[Path], tmp_path: Path) -> None:
    """Before, an arm without calibration threw the others' away, and the first arm's seconds held it."""
    kind = Packing(CPU, tmp_path, Display(enabled=False))
    made = []
    for count in ("1024", "0", "1024", "0"):
        kind.keep(lambda: made.append(1), "calibration", "run", count)
    assert len(made) == 2
    kind.keep(lambda: made.append(1), "calibration", "another run", "1024")
    assert list(kind.kept) == [("calibration", "another run", "1024")]


def test_what_needs_training_is_refused(stored: list[Path]) -> None:
    for setting in ("model.width=64", "quant.qat_share=0.2"):
        study = make_study("published-quantisation", checkpoints=map(str, stored), extra=[f"other:{setting}"])
        with pytest.raises(ConfigError, match=f"arm other: {setting} would need another training"):
            KINDS["packing"].check(study)
    with pytest.raises(ConfigError, match="say which by --checkpoint RUN"):
        make_study("published-quantisation")


def test_scoring_of_several_checkpoints_pairs_them(stored: list[Path], tmp_path: Path) -> None:
    study = make_study("ttt-grid", checkpoints=map(str, stored), score_tokens=600)
    assert study.seeds == (0, 1)
    assert {arm.name for arm in study.arms} >= {"sgd", "low-rank"}
    few = make_study(
        "ttt-grid", checkpoints=map(str, stored), arms=[], extra=["quick:method=ttt,chunk=64,lr=0.01"], score_tokens=600
    )
    report = run_study(few, tmp_path / "s", device="cpu", workers=0, quiet=True)
    assert not report.failures
    assert all({"gpu", "recompilations", "tokens_per_second"} <= set(result) for result in report.results.values())
    assert not any("nothing was learnt" in note for note in report.notes())
    model, tokenizer, config = load_trained(stored[1], CPU.device)
    from parbank.data.validation import open_validation

    tokens = open_validation(config.data, tokenizer, say=lambda line: None).tokens
    text = TokenSet([tokens.read(0, 600)])
    expected = make_method("streaming", context=config.batch.sequence_length).score(model, text, CPU).total(tokenizer)
    assert report.results[Job(BASE, 1)]["value"] == pytest.approx(expected.bpb, rel=1e-9)
    assert report.comparisons["quick"].pairs == 2
    assert report.results[Job("quick", 0)]["value"] != report.results[Job(BASE, 0)]["value"]
    with pytest.raises(ConfigError, match="is not a setting of ttt"):
        KINDS["scoring"].check(make_study("ttt-grid", checkpoints=map(str, stored), extra=["x:method=ttt,lrr=1"]))


def test_an_arm_that_learnt_nothing_is_named(stored: list[Path], tmp_path: Path) -> None:
    """Otherwise "equal in every pair" would read as a verdict on the method."""
    arm = ["whole:method=ttt,chunk=4096"]
    study = make_study("ttt-grid", checkpoints=map(str, stored[:1]), seeds=2, arms=[], extra=arm, score_tokens=400)
    report = run_study(study, tmp_path / "s", device="cpu", workers=0, quiet=True)
    assert report.verdict("whole") == "equal in every pair"
    (note,) = [note for note in report.notes() if note.startswith("whole: nothing was learnt")]
    assert "one chunk of 399 tokens" in note


class ByteTokenizer:
    """A token is a byte, and 0 opens a document without being one."""

    bos_id = 0

    def count_bytes(self, tokens: np.ndarray, before: np.ndarray) -> np.ndarray:
        return (tokens != 0).astype(np.int32)


def test_parts_are_whole_documents_and_add_up() -> None:
    documents = [np.arange(1, n) % 7 + 1 for n in (40, 10, 33, 5, 60, 21)]
    tokens = np.concatenate([piece for d in documents for piece in ([0], d)]).astype(np.uint16)
    nats = np.random.default_rng(1).random(len(tokens) - 1).astype(np.float32)
    scored, tokenizer = Scored(tokens, nats), ByteTokenizer()
    for count in (1, 2, 3):
        parts = cut_into_parts(scored, tokenizer, count)  # type: ignore[arg-type]
        assert len(parts) == count
    whole = nats.astype(np.float64).sum() / np.log(2) / (tokens[1:] != 0).sum()
    assert cut_into_parts(scored, tokenizer, 1) == [pytest.approx(whole)]  # type: ignore[arg-type]
    first, second = cut_into_parts(scored, tokenizer, 2)  # type: ignore[arg-type]
    cut = 40 + 10 + 33  # where the next document begins: the nearest to the middle, 84
    assert first == pytest.approx(nats[:cut].astype(np.float64).sum() / np.log(2) / (tokens[1 : cut + 1] != 0).sum())
    assert second == pytest.approx(nats[cut:].astype(np.float64).sum() / np.log(2) / (tokens[cut + 1 :] != 0).sum())
    for broken in (np.nan, -0.5):
        with pytest.raises(ParbankError, match="token 4"):
            cut_into_parts(Scored(tokens, np.where(np.arange(len(nats)) == 3, broken, nats)), tokenizer, 2)  # type: ignore[arg-type]


def test_kernels_are_timed_beside_what_they_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair whose challenger takes twice the time is worse; what needs a GPU is reported."""
    clock = [0.0]

    def twice(bench: Bench) -> tuple[object, object]:
        """By a clock of the test's own: a busy machine must not change the result."""

        def spend(seconds: float) -> None:
            clock[0] += seconds

        return lambda: spend(0.002 + bench.seed * 1e-5), lambda: spend(0.001)

    monkeypatch.setitem(KERNELS, "twice", twice)  # type: ignore[arg-type]
    monkeypatch.setattr(kinds.kernels, "PORTABLE", {"twice"})
    monkeypatch.setattr(kinds.kernels, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    study = make_study("published-kernels", arms=["twice", "fused-mlp-forward"], seeds=4)
    report = run_study(study, tmp_path / "s", device="cpu", workers=0, quiet=True)
    found = report.comparisons["twice"]
    assert found.verdict == "worse"
    assert found.mean == pytest.approx(101.5)
    assert {job.arm for job in report.failures} == {"fused-mlp-forward"}
    assert "a CPU does not have: it needs an NVIDIA GPU" in report.text()
    assert (
        "A difference is a share of the time of the code that the arm would replace, below zero is faster."
        in report.text()
    )
    assert all({"gpu", "recompilations"} <= set(result) for result in report.results.values())
    assert not any(job.arm == BASE for job in report.states)


def test_pairs_compute_the_same() -> None:
    """On a CPU, where both are PyTorch: the challenger may not be faster by doing less."""
    bench = Bench(torch.device("cpu"), 3)
    checked = 0
    for name, pair in KERNELS.items():
        assert len(claim_of(name)) > 40
        try:
            challenger, incumbent = pair(bench)
        except DeviceError:
            continue
        for a, b in zip(as_list(challenger()), as_list(incumbent()), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        checked += 1
    assert checked == 5


class Additions(TorchDispatchMode):
    """Counts sums of two tensors."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += function in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
        return function(*args, **(kwargs or {}))


def test_what_is_replaced_does_no_more_than_it_must() -> None:
    """Residual and norm apart: the sum is computed once, and its gradient is too."""
    counts = []
    for call in KERNELS["norm-with-residual"](Bench(torch.device("cpu"), 3)):
        with Additions() as additions:
            call()
        counts.append(additions.count)
    assert counts[0] == counts[1]


def as_list(value: object) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)  # type: ignore[call-overload]


def test_two_studies_are_compared_by_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from parbank.study.kinds.training import Training

    order = {"base": 0, "swa": 1, "value-residual": 2, "no-softcap": 3}
    for name, sign in (("short", 1), ("long", -1)):
        monkeypatch.setattr(
            Training,
            "measure",
            lambda self, study, job, sign=sign: {"value": 1 + sign * order[job.arm] + job.seed / 10},
        )
        study = make_study("seeds", recipe="nano", arms=[arm for arm in order if arm != "base"], seeds=2)
        run_study(study, tmp_path / name, device="cpu", workers=0, quiet=True)
    short, long = make_report(tmp_path / "short"), make_report(tmp_path / "long")
    assert correlate(short, short) == "rank correlation of 3 arms (Spearman): +1.00"
    assert correlate(short, long).endswith("-1.00; one of them does not rank the other")
