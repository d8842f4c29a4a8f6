"""The runs that the laws of parbank.plan are fitted to: short complete schedules over shapes, vocabularies and tokens.

    python benchmarks/plan_runs.py --grid cpu --text stdlib=text:FOLDER,glob=*.py,holdout=dev --out runs.jsonl
    python benchmarks/plan_runs.py --grid h200 --text corpus=text:train.jsonl.xz,holdout=dev --out runs.jsonl
    python benchmarks/texts.py --slice stdlib --out .texts/stdlib
    python benchmarks/plan_runs.py --grid tables --text stdlib=.texts/stdlib --out tables.jsonl     # or --grid epochs
    python benchmarks/texts.py --slice stdlib --train-bytes 70000 --val-bytes 200000 --out .texts/stdlib-70k
    python benchmarks/plan_runs.py --grid small --text stdlib-70k=.texts/stdlib-70k --out small.jsonl
    python -m parbank.plan.fit runs.jsonl

Every run ends with its learning rate at zero, so that its score is that of a whole schedule. Its budget is in steps: a busy
machine changes no score. Scores are chunked, before packing, on held-out training documents. A text is a spec, or a folder that
texts.py wrote.

Bound: none. Writes a line of JSON a run to --out, not to benchmarks/results. Runs that this file has already are left out: an
interrupted command continues.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import provenance  # noqa: E402

from parbank.config import override  # noqa: E402
from parbank.data.dataset import Dataset, open_dataset  # noqa: E402
from parbank.data.shards import TokenSet  # noqa: E402
from parbank.eval.windows import score_chunked  # noqa: E402
from parbank.plan.candidates import make_model  # noqa: E402
from parbank.plan.choose import average_decay, decay_factor  # noqa: E402
from parbank.plan.texts import read_text  # noqa: E402
from parbank.recipes import get_recipe  # noqa: E402
from parbank.runtime import Runtime, pick_device, versions  # noqa: E402
from parbank.training.config import RunConfig  # noqa: E402
from parbank.training.trainer import Trainer  # noqa: E402

NAMES = {"batch": "batch_tokens"}  # of a trial, where the laws use another one


@dataclass(frozen=True)
class Trial:
    """One run of a grid."""

    text: str
    vocab: int
    layers: int
    width: int
    batch: int
    tokens: int
    seed: int = 0
    train_share: float = 1.0
    """Of the training tokens, the first share that is used: with a small one, a run repeats its text."""
    rows: int = 0
    """Of the bigram table; 0: those of the recipe."""
    channels: int = 0
    """Of the bigram table; 0: those of the recipe."""
    window: int = 0
    """Tokens of a window; 0: those of the recipe."""
    decays: bool = False
    """With the decay of weights that a plan has for so many epochs; otherwise that of the recipe."""
    extra: tuple[str, ...] = ()
    """Settings that the laws do not know: such a run is kept apart, beside the run without them."""

    @property
    def key(self) -> str:
        share = "" if self.train_share == 1 else f"-share{self.train_share:g}"
        shape = f"v{self.vocab}-{self.layers}x{self.width}-b{self.batch}-t{self.tokens}"
        table = "".join(f"-{letter}{count}" for letter, count in (("r", self.rows), ("c", self.channels)) if count)
        return "-".join([f"{self.text}-{shape}{table}-s{self.seed}{share}", *self.extra])


def cpu_grid() -> list[Trial]:
    """Some 30 runs, about 15 minutes of one core; the most telling ones first."""
    base = Trial("stdlib", 1024, 2, 128, 1024, 131_072)
    large = replace(base, layers=3, width=192)
    found = [base, replace(base, tokens=32_768), large, replace(base, vocab=2048), replace(base, batch=2048)]
    found += [replace(base, text="corpus"), replace(base, train_share=0.002), replace(base, train_share=0.005)]
    found += [replace(base, width=64, tokens=393_216), replace(base, batch=512), replace(base, tokens=393_216)]
    found += [
        replace(base, vocab=4096),
        replace(base, text="manual"),
        replace(base, width=64),
        replace(base, vocab=512),
    ]
    found += [replace(large, tokens=262_144), replace(base, text="cyrillic"), replace(base, batch=256)]
    found += [replace(large, tokens=393_216), replace(large, layers=4, width=256), replace(base, seed=1)]
    found += [replace(large, extra=(f"model.bigram_buckets={rows}",)) for rows in (8192, 0)]
    found += [replace(base, vocab=2048, tokens=393_216), replace(base, batch=512, tokens=393_216)]
    again = replace(base, train_share=0.07, tokens=1_048_576)  # about a megabyte, seen three times
    found += [again, replace(again, extra=("train.dropout=0.1",)), replace(again, tokens=393_216)]
    found += [replace(base, layers=6), replace(large, vocab=2048, tokens=262_144), replace(base, batch=4096)]
    found += [replace(base, text="corpus", vocab=2048)]
    return found


def h200_grid() -> list[Trial]:
    """Some 20 runs at about 1.5M tokens a second: 25 minutes."""
    base = Trial("corpus", 4096, 11, 512, 131_072, 90_000_000)
    shapes = ((6, 512), (8, 384), (8, 640), (11, 640))
    found = [base, *(replace(base, layers=layers, width=width) for layers, width in shapes)]
    found += [replace(base, vocab=vocab) for vocab in (1024, 2048, 8192)]
    found += [replace(base, tokens=tokens) for tokens in (22_500_000, 45_000_000, 180_000_000)]
    found += [replace(base, batch=batch) for batch in (32_768, 65_536, 262_144)]
    found += [replace(base, train_share=share) for share in (0.1, 0.3)]
    found += [replace(base, layers=6, width=384, tokens=tokens) for tokens in (22_500_000, 90_000_000)]
    found += [replace(base, tokens=180_000_000, vocab=8192), replace(base, seed=1)]
    return found


def epochs_grid() -> list[Trial]:
    """Two models on 100,000 tokens of the standard library, seen 1 to 12 times, and `demo` on a million tokens, seen 1 to 8
    times: when does a further epoch hurt?"""
    large = Trial("stdlib", 1024, 2, 128, 2048, 100_000, train_share=0.00854, rows=4096)
    small = replace(large, width=64, rows=512)
    longer = Trial("stdlib", 1536, 2, 192, 2048, 1_000_000, train_share=0.0962)
    found = [replace(large, tokens=100_000 * epochs) for epochs in (1, 2, 3, 4, 6, 12)]
    found += [replace(small, tokens=100_000 * epochs) for epochs in (2, 3, 4, 6, 8, 12)]
    again = [replace(trial, seed=seed) for seed in (1, 2) for trial in found]
    return [*found, *(replace(longer, tokens=1_000_000 * epochs) for epochs in (1, 2, 4, 8)), *again]


def small_grid() -> list[Trial]:
    """What a plan makes of 30 to 500 kB, each seen 2 to 16 times or so: how long may a small text be repeated?"""
    found = []
    for size, layers, batch, window, tokens in (
        ("30k", 2, 512, 32, 20_000), ("70k", 2, 512, 64, 45_000), ("200k", 3, 512, 128, 125_000), ("500k", 3, 1024, 256, 300_000)
    ):  # fmt: skip
        for text in ("stdlib", "corpus"):
            once = Trial(f"{text}-{size}", 320, layers, 64, batch, tokens, rows=256, window=window, decays=True)
            found += [
                replace(once, tokens=epochs * tokens) for epochs in (2, 4, 8, 16) if size != "500k" or epochs != 2
            ]
    return [*found, *(replace(trial, seed=1) for trial in found)]


def middle_grid() -> list[Trial]:
    """Texts of 500 kB and 1 MB with the decay of a plan: vocabularies and shapes that take a minute on two cores, and for how many
    epochs each still gains."""
    once = Trial("corpus-500k", 1024, 2, 128, 1024, 1_200_000, rows=256, window=256, decays=True)
    large = replace(once, text="corpus-1000k", tokens=1_600_000)
    small = replace(once, vocab=320, layers=3, width=64, tokens=1_400_000)
    found = [once, replace(once, tokens=600_000), replace(once, tokens=2_400_000), small]
    found += [replace(small, text=large.text, batch=4096, window=512, tokens=3_400_000), large]
    found += [replace(once, vocab=512, tokens=1_800_000), replace(once, width=192), replace(small, tokens=4_800_000)]
    found += [replace(large, tokens=3_200_000), replace(large, width=192, tokens=1_200_000)]
    found += [replace(trial, text=trial.text.replace("corpus", "stdlib")) for trial in found]
    long = replace(large, batch=4096, window=512, tokens=1_900_000)
    found += [long, replace(long, text="stdlib-1000k"), replace(small, text=large.text, tokens=2_600_000)]
    more = tuple(f"optim.{kind}_weight_decay=0.3" for kind in ("matrix", "adam"))
    found += [replace(once, tokens=2_400_000, extra=more)]
    return found


ROWS = (1536, 12_288, 24_576, 49_152, 98_304, 196_608)


def tables_grid() -> list[Trial]:
    """`demo` with bigram tables of 1,536 to 196,608 rows: what do bytes that cost hardly any time buy?"""
    demo = Trial("stdlib", 1536, 2, 192, 2048, 819_200)
    corpus, long = replace(demo, text="corpus"), 4 * demo.tokens
    found = [replace(text, rows=rows) for text in (demo, corpus) for rows in ROWS]
    found += [replace(demo, tokens=long, rows=rows) for rows in (12_288, 98_304, 1536)]
    found += [replace(corpus, tokens=long, rows=rows) for rows in (12_288, 98_304)]
    found += [replace(demo, rows=rows, channels=width) for rows, width in ((12_288, 32), (12_288, 128), (49_152, 32))]
    found += [replace(demo, vocab=4096, rows=rows) for rows in (12_288, 98_304)]
    found += [replace(demo, seed=1, rows=rows) for rows in ROWS]
    return found


TEXTS = (
    "stdlib", "corpus", "openstax", "books", "elife", "digests", "gov", "web", "mdn", "debian-docs", "manual-ja", "manual-ru",
)  # fmt: skip


def texts_grid() -> list[Trial]:
    """Two models on each of twelve texts: how hard is a text for a model, beside what zlib says of it?"""
    small = Trial("", 1024, 2, 128, 1024, 131_072)
    large = Trial("", 1536, 2, 192, 2048, 409_600)
    return [replace(trial, text=text) for trial in (small, large) for text in TEXTS]


GRIDS = {
    "cpu": (cpu_grid, "demo"),
    "h200": (h200_grid, "sprint"),
    "epochs": (epochs_grid, "demo"),
    "small": (small_grid, "demo"),
    "middle": (middle_grid, "demo"),
    "tables": (tables_grid, "demo"),
    "texts": (texts_grid, "demo"),
}


def configure(trial: Trial, recipe: str, spec: str, epochs: float, text_bytes: float) -> RunConfig:
    """The model is what a plan would make of the shape."""
    config = get_recipe(recipe)
    table = {"model.bigram_buckets": trial.rows, "model.bigram_width": trial.channels}
    fixed = {name: value for name, value in table.items() if value}
    model = make_model(trial.layers, trial.width, trial.vocab, fixed, cuda=recipe != "demo")
    steps = trial.tokens // trial.batch
    changes = {
        "data": spec,
        "seed": trial.seed,
        "average.ema_decay": average_decay(steps),
        "batch.batch_tokens": trial.batch,
        "batch.micro_batch_tokens": min(trial.batch, max(config.batch.micro_batch_tokens, 1024)),
        "budget.minutes": None,
        "budget.steps": steps,
        "train.checkpoint_minutes": 0,
        "train.compile": False,
        "train.validate_every": "off",
        "train.warmup_steps": 0,
    }
    if trial.window:
        changes |= {"batch.sequence_length": trial.window, "batch.stages": []}
    if trial.decays:
        decay = round(
            decay_factor(epochs, steps, text_bytes, cuda=recipe != "demo") * config.optim.matrix_weight_decay, 3
        )
        changes |= {"optim.matrix_weight_decay": decay, "optim.adam_weight_decay": decay}
    settings = (f"{name}={json.dumps(value)}" for name, value in changes.items())
    return override(replace(config, model=model), *settings, *trial.extra)


def spec_of(given: str) -> str:
    """A spec as it is, or that of a folder which texts.py wrote."""
    parts = {part: Path(given) / f"{part}.jsonl.xz" for part in ("train", "val")}
    return f"text:train={parts['train']},val={parts['val']}" if parts["train"].is_file() else given


def run(trial: Trial, config: RunConfig, dataset: Dataset, score_share: float) -> dict[str, Any]:
    if trial.train_share < 1:
        few = max(config.batch.sequence_length * 8, int(trial.train_share * len(dataset.train)))
        dataset = replace(dataset, train=TokenSet([dataset.train.read(0, few)]))
    place = Runtime(device=pick_device(None))
    config = override(config, f"model.bos_id={dataset.tokenizer.bos_id}")
    started, used = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, place, dataset, Path(folder))
        trainer.train()
        seconds, tokens = trainer.clock.seconds(), trainer.tokens
        trainer.close()
        val = TokenSet([dataset.val.read(0, int(score_share * len(dataset.val)))])
        with trainer.averages.applied():
            score = score_chunked(
                trainer.model, val, dataset.tokenizer, context=config.batch.sequence_length, runtime=place
            )
    model = trainer.model
    matrices = sum(p.numel() for name, p in model.named_parameters() if name.startswith("banks."))
    return {
        "bpb": score.bpb,
        "tokens": tokens,
        "steps": trainer.step,
        "params": sum(p.numel() for p in model.parameters()),
        "bigrams": config.model.bigram_buckets,
        "bigram_width": config.model.bigram_width,
        "matrices": matrices,
        "window": config.batch.sequence_length,
        "bytes_per_token": dataset.train_bytes / len(dataset.train),
        "text_bytes": dataset.train_bytes,
        "scored_bytes": score.bytes,
        "seconds": seconds,
        "cpu_seconds": time.process_time() - used,
        "wall_seconds": time.perf_counter() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", choices=GRIDS, required=True)
    parser.add_argument("--text", action="append", required=True, metavar="NAME=SPEC", help="a text of the grid")
    parser.add_argument("--score-share", type=float, default=1.0, help="of the held-out tokens, the first so many")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    specs = {name: spec_of(spec) for name, _, spec in (text.partition("=") for text in arguments.text)}
    made = (
        {json.loads(line)["key"] for line in arguments.out.read_text().splitlines()}
        if arguments.out.exists()
        else set()
    )
    grid, recipe = GRIDS[arguments.grid]
    opened: dict[tuple[str, int], tuple[Dataset, float]] = {}
    for trial in grid():
        if trial.key in made or trial.text not in specs:
            continue
        at = (trial.text, trial.vocab)
        if at not in opened:
            dataset = open_dataset(specs[trial.text], vocab_size=trial.vocab)
            opened[at] = dataset, read_text(specs[trial.text]).hardness
        dataset, hardness = opened[at]
        epochs = trial.tokens / (trial.train_share * len(dataset.train))
        config = configure(trial, recipe, specs[trial.text], epochs, trial.train_share * dataset.train_bytes)
        found = run(trial, config, dataset, arguments.score_share)
        about = {
            "key": trial.key,
            "grid": arguments.grid,
            **{NAMES.get(name, name): value for name, value in vars(trial).items()},
            "hardness": hardness,
            "scored": f"{trial.text}, held-out training documents, the first {arguments.score_share:.0%}",
            "recipe": recipe,
        }
        code = provenance.read_commit()
        where = {
            "commit": code["commit"][:9] + ("-dirty" if code["dirty"] else ""),
            "command": provenance.command_line(),
            "device": provenance.hardware(),
            "torch": versions()["torch"],
        }
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**about, **found, **where}) + "\n")
        print(f"{trial.key}: {found['bpb']:.4f} in {found['cpu_seconds']:.0f} s of CPU", flush=True)


if __name__ == "__main__":
    main()
