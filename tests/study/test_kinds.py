"""Studies that train nothing: packing and scoring of stored runs, and kernels."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from parbank.data.shards import TokenSet
from parbank.errors import ConfigError, DeviceError, ParbankError
from parbank.eval.methods import make_method
from parbank.eval.score import Scored
from parbank.runtime import Runtime
from parbank.study import kinds
from parbank.study.engine import run_study
from parbank.study.kernels import KERNELS, Bench, claim_of
from parbank.study.kinds import KINDS
from parbank.study.kinds.stored import cut_into_parts
from parbank.study.report import correlate, make_report
from parbank.study.ship import make_study
from parbank.study.study import BASE, Job
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
    run_study(study, folder, device="cpu", quiet=True)
    return [folder / "runs" / f"base.{seed}" for seed in range(2)]


def test_packing_of_one_checkpoint_is_compared_on_parts_of_the_text(stored: list[Path], tmp_path: Path) -> None:
    study = make_study(
        "published-quantisation", checkpoints=map(str, stored[:1]), seeds=3, arms=["int5-rows"], score_tokens=4000
    )
    assert study.base.data.endswith("holdout=dev"), "the text that the run did not train on"
    report = run_study(study, tmp_path / "s", device="cpu", quiet=True)
    assert not report.failures
    assert report.comparisons["int5-rows"].pairs == 3
    results = report.results
    assert len({results[Job(BASE, seed)]["value"] for seed in range(3)}) == 3
    # the same file as `parbank pack` makes
    _, packed = pack_checkpoint(stored[0], 60_000, tmp_path / "x.pbk")
    assert results[Job(BASE, 0)]["bytes"] == packed.size
    assert results[Job("int5-rows", 0)]["bytes"] != packed.size
    text = report.text()
    assert "One checkpoint: a run is one part of the text." in text
    assert "Before packing: " in text
    with pytest.raises(ConfigError, match="would only cut the same text finer"):
        KINDS["packing"].check(report.study.with_more(seeds=2, results=6))


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
    report = run_study(few, tmp_path / "s", device="cpu", quiet=True)
    assert not report.failures
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
    monkeypatch.setattr(kinds.kernels, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    study = make_study("published-kernels", arms=["twice", "fp8-mlp"], seeds=4)
    report = run_study(study, tmp_path / "s", device="cpu", quiet=True)
    found = report.comparisons["twice"]
    assert found.verdict == "worse"
    assert found.mean == pytest.approx(101.5)
    assert {job.arm for job in report.failures} == {"fp8-mlp"}
    assert "FP8 needs an NVIDIA GPU" in report.text()
    assert "%" in report.text()
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
        run_study(study, tmp_path / name, device="cpu", quiet=True)
    short, long = make_report(tmp_path / "short"), make_report(tmp_path / "long")
    assert correlate(short, short) == "rank correlation of 3 arms (Spearman): +1.00"
    assert correlate(short, long).endswith("-1.00; one of them does not rank the other")
