"""Training runs, one after the other in one process: text is opened once, and kernels stay compiled.

A run is scored on the held-out text before packing, unless the study packs. Its folder keeps the loss curve, and the
checkpoint where the study keeps them.
"""

import gc
import shutil
from typing import Any

import torch

from parbank.artifact.pack import read_tensors
from parbank.config import choose, override
from parbank.data.dataset import Dataset, open_dataset
from parbank.data.shards import TokenSet
from parbank.display import Display
from parbank.errors import ConfigError
from parbank.eval.methods import METHODS
from parbank.eval.methods.base import Method
from parbank.runtime import check_seed, versions
from parbank.study.kinds.base import Kind
from parbank.study.study import BASE, Job, Study
from parbank.training.checks import check_size
from parbank.training.compiled import forget_compiled_graphs, use_compile_cache
from parbank.training.config import RunConfig
from parbank.training.laps import Laps
from parbank.training.load import describe_run
from parbank.training.pack import calibrate_model, pack_run
from parbank.training.reports import Loop, train_plainly, train_with_reports
from parbank.training.trainer import Trainer
from parbank.training.warmup import compile_aside

# A run that is lost is run again: no checkpoint is worth its time on the clock.
SETTINGS = ("train.checkpoint_minutes=0", 'train.loggers=["jsonl"]')
METRICS: dict[str, type[Method]] = {name: METHODS[name] for name in ("chunked", "streaming")}
"""Scores that a study may compare. Others adapt to the text, or take minutes."""


class Training(Kind):
    """Trains every arm from scratch."""

    name = "training"

    @classmethod
    def check(cls, study: Study) -> None:
        choose(METRICS, study.metric, "--metric")
        for seed in study.seeds:
            check_seed(seed)
        checked = set()
        for arm in [BASE, *(arm.name for arm in study.arms)]:
            config = study.config(Job(arm, study.seeds[0]))
            size = (describe_run(config), config.quant, config.budget)  # all that a check takes half a second for
            if size in checked:
                continue
            checked.add(size)
            try:
                check_size(config, Display(enabled=False))
            except ConfigError as error:
                raise ConfigError(f"arm {arm}: {error}") from error

    def measure(self, study: Study, job: Job) -> dict[str, Any]:
        return self.run(study, job, study.config(job))

    def run(self, study: Study, job: Job, config: RunConfig, train: Loop = train_plainly) -> dict[str, Any]:
        """Trains and scores. `train` runs the loop and hands on its readings."""
        parts = Laps()
        trainer = self.make_trainer(config, job, parts)
        try:
            result = self._train(trainer, train, parts, study)
        finally:
            trainer.close()
            del trainer
            self.free()
        parts.end("freeing")
        return result | {"parts": parts.seconds, "wall_seconds": parts.total}

    def make_trainer(self, config: RunConfig, job: Job, parts: Laps) -> Trainer:
        config = override(config, *SETTINGS)
        dataset = self._open(config)
        parts.end("data")
        config = override(config, f"model.bos_id={dataset.tokenizer.bos_id}")
        out = self.folder / "runs" / job.key
        shutil.rmtree(out, ignore_errors=True)  # what a killed worker left of this run
        trainer = Trainer(config, self.runtime, dataset, out)
        trainer.say = self.display.say
        parts.end("model")
        return trainer

    def _train(self, trainer: Trainer, train: Loop, parts: Laps, study: Study) -> dict[str, Any]:
        dataset = trainer.dataset
        trainer.warm_up()
        parts.end("warm-up")
        with self.watching() as seen:
            train_with_reports(trainer, self.bar, train)
        parts.end("training")
        val = first_tokens(dataset.val, study.score_tokens)
        seconds, tokens = trainer.clock.seconds(), trainer.tokens
        result: dict[str, Any] = {
            "steps": trainer.step,
            "skipped_steps": trainer.skipped,
            "stalled_seconds": trainer.stalled_seconds,
            "seconds": seconds,
            "tokens": tokens,
            "tokens_per_second": tokens / max(seconds, 1e-9),
            "epochs": tokens / len(dataset.train),
            "params": sum(p.numel() for p in trainer.model.parameters()),
            **seen,
            "recompilations": trainer.recompilations,  # of the steps alone
            "dataset": dataset.fingerprint,
            "versions": versions(),
        }
        with trainer.averages.applied():
            result["value"] = result["bpb_before_packing"] = self._score(trainer, val, study.metric)
            if study.metric != "chunked":
                result["bpb_chunked"] = self._score(trainer, val, "chunked")
            parts.end("scoring")
            if study.packed:
                result["bytes"] = self._pack(trainer)
                parts.end("packing")
                result["value"] = self._score(trainer, val, study.metric)
                parts.end("scoring the packed model")
        if study.keep:
            trainer.save()
            parts.end("checkpoint")
        return result

    def _open(self, config: RunConfig) -> Dataset:
        """The data of a config, opened once for each spec and tokenizer. The first time, kernels are compiled beside
        it."""
        vocabulary, tokenizer = config.model.vocab_size, config.tokenizer
        key = ("dataset", config.data, vocabulary, tokenizer)
        if key not in self.kept:
            use_compile_cache()
            say = self.display.say
            with compile_aside(config, self.runtime, say) as kernels:
                self.kept[key] = open_dataset(
                    config.data, vocab_size=vocabulary, tokenizer=tokenizer, say=say, apart=kernels.compiles
                )
        dataset: Dataset = self.kept[key]
        dataset.require_length(config.batch.sequence_length)
        return dataset

    def _score(self, trainer: Trainer, val: TokenSet, metric: str) -> float:
        method = METRICS[metric](context=trainer.config.batch.sequence_length)
        tokenizer = trainer.dataset.tokenizer
        return method.score(trainer.model, val, self.runtime, tokenizer=tokenizer).total(tokenizer).bpb

    def _pack(self, trainer: Trainer) -> int:
        config, dataset = trainer.config, trainer.dataset
        measured = calibrate_model(trainer.model, config, dataset.train, self.runtime, self.bar)
        path = trainer.out / "model.pbk"
        packed = pack_run(trainer.model, config, dataset.tokenizer, measured, path)
        trainer.model.load_state_dict(read_tensors(path))
        return packed.size

    def free(self) -> None:
        """Gives back the memory of the last run, the pools of its CUDA graphs included, and its compiled graphs."""
        forget_compiled_graphs()
        gc.collect()
        if self.runtime.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.runtime.device)


def first_tokens(tokens: TokenSet, count: int) -> TokenSet:
    """The first tokens of a text. Documents lie in the order of their hashes, so they are a sample of it."""
    return tokens if not 0 < count < len(tokens) else TokenSet([tokens.read(0, count)])
