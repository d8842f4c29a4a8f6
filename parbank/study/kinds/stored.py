"""Studies on stored checkpoints: nothing is trained.

With several checkpoints, a seed is a checkpoint, and its value the score of the whole text. With one checkpoint, the text
is scored once for each arm and cut into parts; a seed is a part. Then the verdict is about this checkpoint on text like
this one, and says nothing about other runs. Every result also has `whole`, the score of the whole text.

An arm that cannot be evaluated fails for every seed. It is tried as often as a run is, and not once more for each seed.
"""

import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from parbank.artifact.pack import read_tensors
from parbank.config import override, parse_json, require
from parbank.data.tokenizer import Tokenizer
from parbank.data.validation import open_validation
from parbank.errors import ParbankError
from parbank.eval.methods import make_method
from parbank.eval.methods.base import Method
from parbank.eval.score import Scored
from parbank.files import locked, write_json
from parbank.model import GPT
from parbank.quant.calibration import Calibration
from parbank.study.kinds.base import Kind
from parbank.study.kinds.training import first_tokens
from parbank.study.queue import FAILED, TRIES
from parbank.study.study import Arm, Job, Study, parse_assignment
from parbank.training.compiled import use_compile_cache
from parbank.training.config import RunConfig
from parbank.training.load import load_model, load_trained
from parbank.training.pack import calibrate_model, open_training_tokens, pack_run


class EvaluationError(ParbankError):
    """An arm that could not be evaluated for an earlier seed."""


class Stored(Kind):
    """Evaluates every arm once for each checkpoint, keeps that in the folder, and hands out one seed's share of it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        use_compile_cache()

    @classmethod
    def check(cls, study: Study) -> None:
        require(
            bool(study.checkpoints),
            f"the study {study.name} works on stored runs; say which by --checkpoint RUN, once for each",
        )
        several = len(study.checkpoints) > 1
        require(
            not several or len(study.seeds) == len(study.checkpoints),
            f"with several checkpoints each is a seed: {len(study.checkpoints)} are given, and {len(study.seeds)} seeds; leave "
            "--seeds out",
        )
        require(
            not any(added.seeds for added in study.added),
            "more seeds would only cut the same text finer; give more checkpoints to a new study",
        )
        for arm in study.arms:
            cls.check_arm(study, arm)

    @classmethod
    @abstractmethod
    def check_arm(cls, study: Study, arm: Arm) -> None:
        """Raises an error for settings that cannot be run."""

    @abstractmethod
    def evaluate(self, study: Study, arm: Arm, checkpoint: str) -> tuple[Scored, Tokenizer, dict[str, Any]]:
        """The cost of every token under an arm, and more to store."""

    def measure(self, study: Study, job: Job) -> dict[str, Any]:
        began = time.perf_counter()
        several = len(study.checkpoints) > 1
        number = study.seeds.index(job.seed)
        source = number if several else 0
        path = self.folder / "evaluated" / f"{job.arm}.{source}.json"
        path.parent.mkdir(exist_ok=True)
        with locked(path.with_name(f".{path.stem}.lock"), path, wait=self.display.say):
            if not path.exists():
                self._evaluate_into(path, study, study.arm(job.arm), source)
        found = parse_json(path.read_bytes())
        value = found.pop("parts")[0 if several else number]
        return found | {"value": value, "wall_seconds": time.perf_counter() - began}

    def _evaluate_into(self, path: Path, study: Study, arm: Arm, source: int) -> None:
        failed = self.folder / FAILED / f"{arm.name}.{source}.json"
        errors: list[str] = parse_json(failed.read_bytes())["errors"] if failed.exists() else []
        if len(errors) >= TRIES:
            raise EvaluationError(errors[-1])
        try:
            scored, tokenizer, about = self.evaluate(study, arm, study.checkpoints[source])
            parts = cut_into_parts(scored, tokenizer, 1 if len(study.checkpoints) > 1 else len(study.seeds))
        except Exception as error:
            failed.parent.mkdir(exist_ok=True)
            write_json(failed, {"errors": [*errors, f"{type(error).__name__}: {error}"]})
            raise
        write_json(path, about | {"parts": parts, "whole": scored.total(tokenizer).bpb})

    def keep(self, make: Callable[[], Any], kind: str, source: str, *more: str) -> Any:
        """The result of `make`, cached for later jobs with the same key. Of each kind, only results of the last source, a
        checkpoint or a tokenizer, are kept."""
        key = (kind, source, *more)
        if key not in self.kept:
            for other in [other for other in self.kept if other[0] == kind and other[1] != source]:
                del self.kept[other]
            self.kept[key] = make()
        return self.kept[key]

    def score(self, study: Study, model: GPT, tokenizer: Tokenizer, method: Method) -> Scored:
        data, say = study.base.data, self.display.say
        tokens = self.keep(lambda: open_validation(data, tokenizer, say=say).tokens, "text", tokenizer.fingerprint)
        return method.score(model, first_tokens(tokens, study.score_tokens), self.runtime, tokenizer=tokenizer)


def cut_into_parts(scored: Scored, tokenizer: Tokenizer, count: int) -> list[float]:
    """Bits per byte of parts of about equal length, cut where documents begin if there are enough of them."""
    scored.refuse_faults()
    sizes = scored.byte_counts(tokenizer)
    starts = np.flatnonzero(scored.tokens[:-1] == tokenizer.bos_id)
    cuts = [0]
    for n in range(1, count):
        place = n * len(scored.nats) // count
        nearest = int(starts[np.abs(starts - place).argmin()]) if len(starts) else place
        cuts.append(nearest if nearest > cuts[-1] else max(place, cuts[-1] + 1))
    bounds = zip(cuts, [*cuts[1:], len(scored.nats)])
    nats = scored.nats.astype(np.float64)
    return [float(nats[a:b].sum() / np.log(2) / max(1, sizes[a:b].sum(dtype=np.int64))) for a, b in bounds]


class Packing(Stored):
    """Packs a checkpoint under its cap by other settings of quant, and scores the packed file by chunks."""

    name = "packing"

    @classmethod
    def check_arm(cls, study: Study, arm: Arm) -> None:
        for setting in arm.settings:
            require(
                setting.startswith(("quant.", "budget.max_bytes")) and not setting.startswith("quant.qat_"),
                f"arm {arm.name}: {setting} would need another training; a study of packing changes quant and budget.max_bytes",
            )
        override(study.base, *arm.settings)

    def evaluate(self, study: Study, arm: Arm, checkpoint: str) -> tuple[Scored, Tokenizer, dict[str, Any]]:
        model, tokenizer, own = self.keep(lambda: self._load(checkpoint), "model", checkpoint)
        asked = override(study.base, *arm.settings)
        config = replace(own, quant=asked.quant, budget=asked.budget, data=asked.data)
        method = make_method("chunked", context=own.batch.sequence_length)
        unpacked = self.keep(
            lambda: self.score(study, model, tokenizer, method).total(tokenizer).bpb, "plain", checkpoint
        )
        measured = self._calibrate(
            model, config, tokenizer, checkpoint
        )  # shared by arms: not in the seconds of the first
        path = self.folder / "packed" / f"{arm.name}.{study.checkpoints.index(checkpoint)}.pbk"
        with self.watching() as seen:
            began = time.perf_counter()
            packed = pack_run(model, config, tokenizer, measured, path)
            seconds = time.perf_counter() - began
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        try:
            model.load_state_dict(read_tensors(path))
            scored = self.score(study, model, tokenizer, method)
        finally:
            model.load_state_dict(before)
        return scored, tokenizer, seen | {"seconds": seconds, "bytes": packed.size, "unpacked": unpacked}

    def _load(self, checkpoint: str) -> tuple[GPT, Tokenizer, RunConfig]:
        return load_trained(Path(checkpoint), self.runtime.device)

    def _calibrate(self, model: GPT, config: RunConfig, tokenizer: Tokenizer, checkpoint: str) -> Calibration | None:
        """Once for each checkpoint and number of tokens: most arms calibrate alike."""
        count = config.quant.calibration_tokens

        def make() -> Calibration | None:
            context, say = config.batch.sequence_length, self.display.say
            tokens = open_training_tokens(config.data, tokenizer, context=context, count=count, say=say)
            return calibrate_model(model, config, tokens, self.runtime, self.bar)

        return self.keep(make, "calibration", checkpoint, str(count), config.quant.method)


class Scoring(Stored):
    """Scores a checkpoint or an artifact by other methods. An arm's settings are those of `parbank eval`, with `method`."""

    name = "scoring"
    METHOD = "streaming"
    """The method of the base."""

    @classmethod
    def check_arm(cls, study: Study, arm: Arm) -> None:
        cls._method(arm, study.base.batch.sequence_length)

    @classmethod
    def _method(cls, arm: Arm, context: int) -> Method:
        settings = {"method": cls.METHOD, "context": context} | dict(map(parse_assignment, arm.settings))
        return make_method(str(settings.pop("method")), **settings)

    def evaluate(self, study: Study, arm: Arm, checkpoint: str) -> tuple[Scored, Tokenizer, dict[str, Any]]:
        loaded = self.keep(lambda: load_model(Path(checkpoint), self.runtime.device), "model", checkpoint)
        method = self._method(arm, loaded.context)
        with self.watching() as seen:
            began = time.perf_counter()
            scored = self.score(study, loaded.model, loaded.tokenizer, method)
            self.runtime.synchronize()
            seconds = time.perf_counter() - began
        about = seen | {"seconds": seconds, "tokens_per_second": len(scored.nats) / seconds}
        if (idle := method.find_idle(scored.tokens, loaded.model.config)) is not None:
            about["idle"] = idle
        return scored, loaded.tokenizer, about
