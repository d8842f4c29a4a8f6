"""The whole config of a run as one frozen value: returned by recipes, changed by --set, stored in config.json."""

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

from parbank.config import choose, from_dict, named, require
from parbank.data.orders import ORDERS
from parbank.data.sources import remembered_spec
from parbank.data.tokenizer import TokenizerConfig
from parbank.model.config import ModelConfig
from parbank.ops.fp8 import MULTIPLE, Parts
from parbank.optim.config import OptimConfig
from parbank.precision import PrecisionChoice
from parbank.quant.config import QuantConfig
from parbank.training.averaging import AverageConfig
from parbank.training.loggers import LOGGERS


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """The budget of a run. Exactly one of minutes, steps and tokens is set; minutes may have a second end, most_steps."""

    minutes: float | None = None
    """Training clock. Compilation and warm-up are outside it, everything else is inside."""
    steps: int | None = None
    """Optimizer steps."""
    tokens: int | None = None
    """Training tokens, rounded up to whole batches."""
    most_steps: int | None = None
    """Ends a clock early, after so many steps: more would make the score worse. A machine that is too slow for them has
    its minutes."""
    max_bytes: int = 16_000_000
    """Cap on the artifact."""
    count_code: bool = False
    """Count the source of training and scoring, compressed, towards the cap, as parameter-golf does."""

    def __post_init__(self) -> None:
        given = [n for n in ("minutes", "steps", "tokens") if getattr(self, n) is not None]
        require(
            len(given) == 1,
            f"a run needs exactly one of budget.minutes, budget.steps and budget.tokens; got {given or 'none'}",
        )
        require(getattr(self, given[0]) > 0, f"budget.{given[0]} must be positive, got {getattr(self, given[0])}")
        require(
            self.most_steps is None or (self.minutes is not None and self.most_steps > 0),
            f"budget.most_steps ends a clock early: it is a positive number beside budget.minutes, got {self.most_steps} beside "
            f"budget.{given[0]}; for a budget in steps alone set budget.steps",
        )
        require(self.max_bytes > 0, f"budget.max_bytes must be positive, got {self.max_bytes}")


# PyTorch compiles a function for eight shapes and then gives up. Those of a run are the lengths of its windows.
MAX_LENGTHS, MAX_STAGES = 8, 7
# Far more than any run has. With a damaged config, a step must not last for ever, nor its buffers fill the memory.
MAX_BATCH_TOKENS, MAX_PREFETCH = 1 << 32, 1024


@dataclass(frozen=True)
class Stage:
    """A part of a run with its own batches."""

    until: float
    """The share of the budget at which it ends."""
    lengths: tuple[int, ...]
    """Tokens in one window. Each of several lengths has an equal part of a step's windows, in this order."""
    batch_tokens: int

    def deal(self, passes: int, rank: int, world: int) -> list[int]:
        """The length of the windows in each pass that a rank runs in a step. Windows are dealt by pass, then rank, so a window
        has the same length on any number of ranks."""
        return [self.lengths[(n * world + rank) * len(self.lengths) // (passes * world)] for n in range(passes)]

    def describe_lengths(self) -> str:
        return " and ".join(f"{length:,}" for length in self.lengths)


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batches: their size, order and sequence length."""

    sequence_length: int = 2048
    """Tokens in one window."""
    batch_tokens: int = 786_432
    """Tokens in one optimizer step, over all ranks and micro-batches."""
    micro_batch_tokens: int = 98_304
    """Tokens in one forward pass of one rank, at most. More ranks mean fewer passes, never another batch."""
    mixed_lengths: tuple[int, ...] = ()
    """Mixed sequence lengths in every step: each has an equal part of the step's windows, as many tokens as the others, e.g.
    [1024, 2048]. Windows are cut shorter, so the longest length is sequence_length. A length may be named twice."""
    stages: tuple[tuple[float, int | tuple[int, ...], int], ...] = ()
    """Stages before the main one, each [share of the budget, sequence_length, batch_tokens], e.g. [[0.3, 512, 196608]]. A list
    of lengths is mixed, as in mixed_lengths: [[0.5, [512, 2048], 196608]]. A recipe's stages are left out where
    sequence_length or batch_tokens is set, but not stages."""
    order: str = named(ORDERS, "shuffled")
    """Order of the windows within an epoch: shuffled, contiguous as they lie in the text, packed (windows of whole
    documents, shuffled; for documents shorter than a window, with model.isolate_documents), or hard_first: shuffled within
    64 parts of the text, of which the hardest come first."""
    prefetch: int = 3
    """Micro-batches prepared ahead by a thread; 0 prepares each when it is asked for."""

    def __post_init__(self) -> None:
        for name in ("sequence_length", "batch_tokens", "micro_batch_tokens"):
            require(getattr(self, name) >= 1, f"batch.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("batch_tokens", "micro_batch_tokens"):
            require(
                getattr(self, name) % self.sequence_length == 0,
                f"batch.{name} ({getattr(self, name)}) must be a multiple of batch.sequence_length ({self.sequence_length})",
            )
        require(
            self.batch_tokens <= MAX_BATCH_TOKENS,
            f"batch.batch_tokens must be at most {MAX_BATCH_TOKENS}, got {self.batch_tokens}",
        )
        choose(ORDERS, self.order, "batch.order")
        require(
            0 <= self.prefetch <= MAX_PREFETCH,
            f"batch.prefetch must be 0 (off) to {MAX_PREFETCH}, got {self.prefetch}",
        )
        self._check_stages()
        self._check_lengths()

    def _check_stages(self) -> None:
        for n, (share, _, tokens) in enumerate(self.stages):
            require(share > 0, f"batch.stages[{n}] must have a positive share of the budget, got {share}")
            require(
                1 <= tokens <= MAX_BATCH_TOKENS and tokens % self.sequence_length == 0,
                f"batch.stages[{n}] has a batch of {tokens} tokens; it must be a multiple of batch.sequence_length "
                f"({self.sequence_length}), and at most {MAX_BATCH_TOKENS}",
            )
        total = sum(share for share, _, _ in self.stages)
        require(
            total < 1,
            f"the shares of batch.stages come to {total:g}; they must leave something for the main stage, which trains at "
            "batch.sequence_length, the length that is scored",
        )
        require(
            len(self.stages) <= MAX_STAGES, f"batch.stages may have {MAX_STAGES} stages at most, got {len(self.stages)}"
        )

    def _check_lengths(self) -> None:
        whole, mixed = self.sequence_length, self.mixed_lengths
        require(
            not mixed or max(mixed) == whole,
            f"batch.mixed_lengths is {list(mixed)}; its longest must be batch.sequence_length ({whole}), the length that is "
            "scored: change one of them",
        )
        *before, main = self.plan()
        named = {f"batch.stages[{n}]": stage for n, stage in enumerate(before)} | {"batch.mixed_lengths": main}
        for name, stage in named.items():
            for length in stage.lengths:
                require(
                    length >= 1 and whole % length == 0,
                    f"{name} has a sequence length of {length}; it must divide batch.sequence_length ({whole}), because the same "
                    "windows are cut shorter",
                )
            sequences, parts = stage.batch_tokens // whole, len(stage.lengths)
            require(
                parts >= 1 and sequences % parts == 0,
                f"{name} has {parts} lengths, and a step has {sequences} windows of batch.sequence_length ({whole}), which cannot "
                f"be split into {parts} equal parts; name another number of lengths, or change the batch's tokens",
            )
        found = self.all_lengths()
        require(
            len(found) <= MAX_LENGTHS,
            f"batch.mixed_lengths and batch.stages have {len(found)} different sequence lengths; {MAX_LENGTHS} at most",
        )

    @property
    def sequences(self) -> int:
        return self.batch_tokens // self.sequence_length

    def plan(self) -> list[Stage]:
        """Every stage in order, the main one last."""
        found, until = [], 0.0
        for share, length, tokens in self.stages:
            until += share
            found.append(Stage(until, length if isinstance(length, tuple) else (length,), tokens))
        return [*found, Stage(math.inf, self.mixed_lengths or (self.sequence_length,), self.batch_tokens)]

    def all_lengths(self) -> list[int]:
        """Every length of windows that a run has, each once."""
        return list(dict.fromkeys(length for stage in self.plan() for length in stage.lengths))

    def micro_sequences(self, world: int) -> int:
        """The largest micro-batch within the limit that divides the batch, of every stage, evenly over the ranks, and whose
        windows have one length."""
        shares = []
        for stage in self.plan():
            sequences = stage.batch_tokens // self.sequence_length
            require(
                sequences % world == 0,
                f"the batch of {sequences} sequences (batch.batch_tokens / batch.sequence_length) cannot be split over "
                f"{world} ranks; use a number of ranks that divides it, or change batch.batch_tokens",
            )
            shares += [sequences // world, sequences // len(stage.lengths)]
        share, limit = math.gcd(*shares), self.micro_batch_tokens // self.sequence_length
        return max(n for n in range(1, min(share, limit) + 1) if share % n == 0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training loop. Only precision, fp8, dropout and token_dropout change the result by more than its last bits."""

    precision: PrecisionChoice = "auto"
    """Precision of products in training. auto: bfloat16 on CUDA and on a CPU that multiplies it in hardware, else float32. A
    checkpoint keeps auto's choice. Scoring on a CPU is always in float32."""
    compile: bool | None = None
    """Use torch.compile. On CUDA it takes a minute of setup, and steps are no faster where our kernels run: off by default. On
    a CPU steps are a quarter faster: on by default from two minutes of training, if a C++ compiler is found."""
    cuda_graph: bool = True
    """On CUDA, replay each pass as one CUDA graph, and on a single GPU the optimizer's step as another."""
    fp8: Parts = "off"
    """Products that training computes in FP8, on GPUs that support it: those of the MLP, of the head, or of both. Scoring and
    packing never use FP8."""
    dropout: float = 0.0
    """The share of channels that training drops, at random, from the output of attention and MLP in every layer. For text that
    is seen many times; it takes the MLP off its fused kernel. Scoring and packing drop nothing."""
    token_dropout: float = 0.0
    """The share of input tokens that training replaces, at random, by the unknown token, for text that is seen many times.
    The tokens to predict stay. It costs no time."""
    warmup_steps: int = 5
    """Steps run before the clock starts, so that everything is compiled and captured, and then undone completely."""
    log_every: int = 10
    """Steps between rows of metrics."""
    loggers: tuple[str, ...] = named(LOGGERS, ("jsonl", "tensorboard"))
    """Where rows of metrics are written: jsonl (metrics.jsonl), tensorboard (event files) and wandb (Weights & Biases)."""
    validate_every: str = "off"
    """Score a sample of the validation text during training: off, or an interval such as 30s or 200steps. The time counts in the
    clock."""
    validate_tokens: int = 65_536
    """Tokens of that sample: windows of sequence_length, evenly spread over the validation text."""
    checkpoint_minutes: float = 5.0
    """Minutes between checkpoints; 0 writes one only at the end and when the run is stopped."""
    keep_checkpoints: int = 2
    """Older checkpoints are deleted."""
    max_skipped: int = 10
    """Consecutive non-finite steps, all skipped, after which the run ends with an error."""

    def __post_init__(self) -> None:
        require(self.log_every >= 1, f"train.log_every must be at least 1, got {self.log_every}")
        for name in self.loggers:
            choose(LOGGERS, name, "train.loggers")
        require(0 <= self.dropout < 1, f"train.dropout is a share, 0 to below 1; got {self.dropout}")
        require(0 <= self.token_dropout < 1, f"train.token_dropout is a share, 0 to below 1; got {self.token_dropout}")
        self.read_validate_every()
        require(self.validate_tokens >= 1, f"train.validate_tokens must be at least 1, got {self.validate_tokens}")
        require(self.keep_checkpoints >= 1, f"train.keep_checkpoints must be at least 1, got {self.keep_checkpoints}")
        require(self.warmup_steps >= 0, f"train.warmup_steps must not be negative, got {self.warmup_steps}")
        require(self.max_skipped >= 1, f"train.max_skipped must be at least 1, got {self.max_skipped}")
        require(
            self.checkpoint_minutes >= 0,
            f"train.checkpoint_minutes must be 0 (off) or positive, got {self.checkpoint_minutes}",
        )

    def read_validate_every(self) -> tuple[str, float]:
        """The unit, "s" or "steps", and the number; 0 is off."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*s|(\d+)\s*steps", self.validate_every.strip())
        number = float(found[1] or found[2]) if found else 0.0
        require(
            number > 0 or self.validate_every == "off",
            f"train.validate_every must be off, or an interval such as 30s or 200steps, got {self.validate_every!r}",
        )
        return "steps" if found and found[2] else "s", number


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run."""

    recipe: str
    """The recipe this started from."""
    data: str = "stdlib"
    """The training data, as a spec such as text:PATH; `parbank train --help` lists the kinds."""
    seed: int = 0
    """Fixes the starting weights and the order of the data."""
    model: ModelConfig = field(default_factory=ModelConfig)
    budget: BudgetConfig
    batch: BatchConfig = field(default_factory=BatchConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    average: AverageConfig = field(default_factory=AverageConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)

    def __post_init__(self) -> None:
        require(self.seed >= 0, f"seed must not be negative, got {self.seed}")
        require(
            self.budget.tokens is None or all(tokens == self.batch.batch_tokens for _, _, tokens in self.batch.stages),
            "batch.stages with batches of other sizes have shares of a budget in minutes or steps, not in tokens: give --minutes "
            "or --steps",
        )
        self._check_fp8()

    def _check_fp8(self) -> None:
        model, parts = self.model, self.train.fp8
        require(
            parts == "off" or self.train.precision != "float32",
            f"train.fp8={parts} needs bfloat16 around it, and train.precision is float32: set one of them to its default",
        )
        sides = {"model.width": model.width if parts != "off" else 0}
        sides["model.width * model.mlp_multiple"] = model.hidden if "mlp" in parts else 0
        sides["model.vocab_size"] = model.vocab_size if "head" in parts else 0
        for name, size in sides.items():
            require(
                size % MULTIPLE == 0,
                f"{name} is {size}; with train.fp8={parts} it must be a multiple of {MULTIPLE}: change it, or leave fp8 off",
            )


def read_config(values: dict[str, Any]) -> RunConfig:
    """The config that an earlier run wrote, with the meaning that its data spec and `train.compile` had then."""
    train = values.get("train") if isinstance(values, dict) else None
    if isinstance(train, dict) and "precision" not in train:
        # Such a version wrote true by default, and never compiled on a CPU.
        values = {**values, "train": {**train, "compile": None}}
    config = from_dict(RunConfig, values)
    return replace(config, data=remembered_spec(config.data))
