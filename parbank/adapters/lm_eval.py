"""parbank's models under lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness).

    pip install 'parbank[lm-eval]'
    python -m parbank.adapters.lm_eval --model parbank --model_args model=runs/demo --tasks lambada_openai

The command is the harness's own `lm_eval`, with parbank registered. From Python:

    import lm_eval
    from parbank.adapters.lm_eval import ParbankLM

    lm_eval.simple_evaluate(model=ParbankLM("runs/demo"), tasks=["lambada_openai"])

Every text begins with BOS, as in training. Log-likelihoods are those of `Model.logits`, in windows of at most the context
that the model was trained on.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parbank.api.model import Model, check_causal, load
from parbank.data.proof import check_tokens
from parbank.errors import ConfigError, ParbankError
from parbank.eval.score import tokens_together
from parbank.runtime import Runtime

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as missing:
    raise ConfigError(
        f"lm-evaluation-harness is not installed ({missing}); pip install 'parbank[lm-eval]'"
    ) from missing

MAX_TOKENS = 256  # of a generation that says nothing else: the harness's own default
# Settings of a generation; `do_sample` false is greedy, at any temperature.
GENERATION = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "seed")


@dataclass(frozen=True)
class Window:
    """Some targets of one request, and the tokens that they are read from."""

    request: int
    ids: list[int]
    """The inputs, and after them the last target."""
    scored: int
    """The number of targets to count, from the end; earlier ones were scored by another window, or are the context."""


@register_model("parbank")
class ParbankLM(LM):
    """A parbank model behind the interface of lm-evaluation-harness. `model` is a `Model`, or a path that `parbank.load` takes."""

    def __init__(
        self,
        model: Model | str | os.PathLike[str],
        device: str | None = None,
        context: int | str | None = None,
        batch_size: int | str | None = None,
        **others: Any,
    ) -> None:
        """context: the window in tokens; that of the training if not given. batch_size: windows together; if not given (or
        "auto"), what fits the device."""
        super().__init__()
        others.pop("max_batch_size", None)  # the harness hands it to every model; "auto" needs no search here
        if others:
            unknown = next(iter(others))
            raise ConfigError(
                f"parbank's adapter has no argument {unknown!r}; it takes model, device, context, batch_size"
            )
        self.model = model if isinstance(model, Model) else load(model, device or "auto")
        self.context = self.model.context if context is None else _read_count("context", context)
        automatic = batch_size is None or str(batch_size).startswith("auto")
        self._rows = None if automatic else _read_count("batch_size", batch_size)
        self._device = self.model.device
        check_causal(self.model, self.context)

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's cache of requests."""
        return f"parbank-{self.model.tokenizer.fingerprint[:16]}"

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log p(continuation | context) in nats, and whether greedy decoding would write the continuation."""
        windows: list[Window] = []
        for number, request in enumerate(requests):
            ids, first = self._encode_pair(*request.args)
            windows += cut_windows(number, ids, first, self.context, stride=max(1, self.context // 2))
        return self._finish("loglikelihood", requests, self._score(windows, len(requests)))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """log p of each text, every token once: windows side by side, the last with a full context."""
        windows: list[Window] = []
        for number, request in enumerate(requests):
            ids = [self.model.tokenizer.bos_id, *self._encode(request.args[0])]
            windows += cut_windows(number, ids, 1, self.context, stride=self.context)
        sums = [nats for nats, _ in self._score(windows, len(requests))]
        return self._finish("loglikelihood_rolling", requests, sums)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Text that continues each context, up to the first of its stop strings; greedy unless the task samples. A task may
        repeat a request for several samples: each has the seed after the one before."""
        texts, earlier = [], Counter[str]()
        for prompt, options in (request.args for request in requests):
            settings, key = read_generation(options), repr((prompt, options))
            if earlier[key]:
                settings["seed"] += earlier[key]
            earlier[key] += 1
            texts.append(self.model.sample(prompt, context=self.context, **settings))
        return self._finish("generate_until", requests, texts)

    def _finish(self, kind: str, requests: list[Any], answers: list[Any]) -> list[Any]:
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(kind, request.args, answer)
        return answers

    def _encode(self, text: str, *, continued: bool = False) -> list[int]:
        """The tokens of a text, proved to stand for exactly its bytes. `continued`: those of another text follow."""
        tokens = self.model.tokenizer.encode(text, continued=continued)
        check_tokens(self.model.tokenizer, tokens, text.encode("utf-8"), "the text of a request")
        return [int(token) for token in tokens]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """All tokens, and the place of the continuation's first.

        White space at the end of the context moves to the continuation, the harness's convention for every model. The two
        are encoded together where no token spans them, as in running text, and else each by itself, so that exactly the
        continuation's characters are scored.
        """
        kept = context.rstrip()
        before, whole = self._encode(kept), self._encode(context + continuation)
        if whole[: len(before)] != before:
            before = self._encode(kept, continued=True)
            whole = before + self._encode(context[len(kept) :] + continuation)
        if len(whole) == len(before):
            raise ConfigError("a request has an empty continuation: there is nothing to score")
        return [self.model.tokenizer.bos_id, *whole], 1 + len(before)

    def _score(self, windows: Sequence[Window], requests: int) -> list[tuple[float, bool]]:
        """The sum of the windows' log-likelihoods for each request, and whether every target was the likeliest token."""
        sums, greedy = [0.0] * requests, [True] * requests
        for batch in self._batches(windows):
            longest = max(len(window.ids) for window in batch)
            ids = torch.tensor([window.ids + [0] * (longest - len(window.ids)) for window in batch])
            chances = torch.log_softmax(self.model.logits(ids[:, :-1]), dim=-1).cpu()
            for row, window in enumerate(batch):
                nats, all_likeliest = _read_row(chances[row], ids[row], len(window.ids), window.scored)
                if math.isnan(nats):
                    raise ParbankError(
                        "the model gave logits that are not numbers; its weights are damaged, and no answer counts"
                    )
                sums[window.request] += nats
                greedy[window.request] &= all_likeliest
        return list(zip(sums, greedy))

    def _batches(self, windows: Sequence[Window]) -> Iterator[list[Window]]:
        """Windows of similar length together, the longest first, so that running out of memory shows at once."""
        waiting = sorted(windows, key=lambda window: -len(window.ids))
        together = tokens_together(self.model.tokenizer.vocab_size, Runtime(device=self.model.device))
        while waiting:
            rows = self._rows or max(1, together // len(waiting[0].ids))
            yield waiting[:rows]
            waiting = waiting[rows:]


def cut_windows(request: int, ids: list[int], first: int, context: int, *, stride: int) -> Iterator[Window]:
    """Windows that score the targets ids[first:], each once: `stride` at a time, over the `context` tokens before the last
    target of the window, or fewer at the beginning of the text."""
    for begin in range(first, len(ids), stride):
        end = min(begin + stride, len(ids))
        yield Window(request, ids[max(0, end - 1 - context) : end], end - begin)


def read_generation(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Model.sample` for a task's generation settings. A setting that would be ignored is refused."""
    unknown = sorted(set(options) - set(GENERATION))
    if unknown:
        raise ConfigError(f"the generation setting {unknown[0]!r} is not supported; there are {', '.join(GENERATION)}")
    until = options.get("until") or ()
    temperature = float(options.get("temperature") or 0.0)
    if options.get("do_sample") and not temperature:
        raise ConfigError(
            "do_sample is true, and the temperature is 0 or not given; set one above 0, or do_sample=false"
        )
    most = options.get("max_gen_toks")
    found = {
        "tokens": MAX_TOKENS if most is None else _read_count("max_gen_toks", most),
        "temperature": temperature if options.get("do_sample", temperature > 0) else 0.0,
        "stop": [until] if isinstance(until, str) else list(until),
        "seed": 0,
    }
    return found | {name: options[name] for name in ("top_k", "top_p", "seed") if name in options}


def _read_count(name: str, value: object) -> int:
    """A count, which the harness's command gives as a string."""
    try:
        count = int(str(value))
    except ValueError:
        count = 0
    if count < 1:
        raise ConfigError(f"{name} must be a whole number, at least 1; got {value!r}")
    return count


def _read_row(chances: Tensor, ids: Tensor, length: int, scored: int) -> tuple[float, bool]:
    places = slice(length - 1 - scored, length - 1)
    targets, found = ids[1:length][-scored:], chances[places]
    nats = found.gather(-1, targets[:, None]).double().sum().item()
    return nats, bool((found.argmax(-1) == targets).all())


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
