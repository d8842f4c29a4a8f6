"""`parbank.load`, and the `Model` that it returns."""

import numbers
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from parbank.api.words import in_python_words, warn
from parbank.artifact.about import TOKENIZER, About
from parbank.artifact.container import check_target, decode_artifact, is_artifact, read_artifact
from parbank.artifact.load import LoadedModel
from parbank.artifact.pack import unpack_tensors
from parbank.artifact.safetensors import export_model
from parbank.artifact.state_dict import KIND as FOREIGN
from parbank.artifact.state_dict import unpack_state_dict
from parbank.config import require
from parbank.data.progress import say_nothing
from parbank.data.proof import check_tokens
from parbank.data.shards import TokenSet
from parbank.data.sources import is_spec
from parbank.data.tokenizer import Tokenizer
from parbank.data.validation import open_validation
from parbank.errors import ArtifactError, ConfigError, DataError
from parbank.eval.methods import METHODS, make_method
from parbank.eval.sampling import check_settings, sample_tokens, write_text
from parbank.eval.score import Score
from parbank.files import write_file
from parbank.model import GPT
from parbank.model.protocol import PlainModel
from parbank.precision import autocast
from parbank.runtime import Runtime, pick_device
from parbank.training.compiled import use_compile_cache
from parbank.training.load import load_model

_FILE_NAME = re.compile(r"\S+\.(txt|md|rst|py|jsonl?|csv|html?|gz|zst|parquet)")


@in_python_words
def load(path: str | os.PathLike[str], device: str = "auto") -> "Model":
    """A model from an artifact (.pbk), a checkpoint (step_N.pt), or the folder of a run.

    A folder means its artifact, or its newest checkpoint if there is no artifact yet. A checkpoint gives the averaged
    weights, which would be packed. An artifact that `pack` made from your own module gives its weights, by
    `state_dict()`, and its tokenizer if it has one.

        >>> import parbank
        >>> model = parbank.load("runs/first/model.pbk")
        >>> model.context
        64
    """
    file, target = read_path(path), _find_device(device)
    if target.type == "cuda":
        use_compile_cache()
    if is_artifact(file) and (artifact := read_artifact(file)).meta.get("kind") == FOREIGN:
        weights = {name: tensor.to(target) for name, tensor in unpack_state_dict(artifact).items()}
        pieces = artifact.sections.get(TOKENIZER)
        tokenizer = None if pieces is None else Tokenizer.from_bytes(pieces)
        return Model(weights, tokenizer, context=artifact.meta.get("context") or 1, source=file)
    loaded = load_model(file, target)
    return Model(
        loaded.model, loaded.tokenizer, context=loaded.context, data=loaded.data, meta=loaded.meta, source=loaded.source
    )


class Model:
    """A language model with its tokenizer: it scores, samples and saves.

    `load` makes one from a file. For a module of your own, call `Model(module, tokenizer, context=512)`.
    `parbank.model.protocol.LanguageModel` says what the module must offer, and `parbank.data.tokenizer.Tokenizer` makes
    the tokenizer. Such a model has `score` (chunked and sliding), `sample` and `logits`. Without a tokenizer it can only
    be packed.

        >>> import parbank
        >>> model = parbank.load("runs/first")
        >>> score = model.score("The sea was calm.")
        >>> score.bytes, 1 < score.bpb < 10
        (17, True)
        >>> text = model.sample("The sea", tokens=5, seed=1)
        >>> model.logits(model.tokenizer.encode("The sea")).shape[-1]
        320
    """

    context: int
    """The window it was trained on, in tokens: the default of `score` and `sample`."""
    data: str | None
    """The data spec it was trained on, if known."""
    meta: dict[str, Any]
    """The meta of its artifact."""
    source: Path | None
    """The file it came from."""

    def __init__(
        self,
        module: nn.Module | Mapping[str, Tensor],
        tokenizer: Tokenizer | None,
        *,
        context: int,
        data: str | None = None,
        meta: Mapping[str, Any] | None = None,
        source: Path | None = None,
    ) -> None:
        """Wraps a module. `load` sets the meta and the source file."""
        if not isinstance(module, nn.Module | Mapping):
            raise ConfigError(f"a Model is made around a torch.nn.Module, got {type(module).__name__}")
        if not isinstance(tokenizer, Tokenizer | None):
            raise ConfigError(
                f"a Model takes a parbank.data.tokenizer.Tokenizer, got a {type(tokenizer).__name__}; Tokenizer.load(PATH) reads a "
                "SentencePiece model, Tokenizer.train(texts, vocab_size) makes one"
            )
        if not isinstance(context, numbers.Integral) or context < 1:
            raise ConfigError(f"a model's context is a whole number of tokens, at least 1; got {context!r}")
        self._module: nn.Module | Mapping[str, Tensor] = module
        self._tokenizer: Tokenizer | None = tokenizer
        self.context, self.data = context, data
        self.meta, self.source = dict(meta or {}), source
        if isinstance(module, GPT) and meta is None:  # built by hand: `pack` and `export` must say what it is
            about = About(model=module.config, context=context, data=data or "", recipe="custom", seed=0)
            self.meta = about.to_meta()

    @property
    def module(self) -> nn.Module:
        """The network. A call with token ids (B, T) gives logits (B, T, vocabulary)."""
        if isinstance(self._module, nn.Module):
            return self._module
        raise ArtifactError(
            f"{self.source or 'this Model'} holds the weights of a module that parbank did not build; build it, load state_dict() "
            "into it, and make parbank.Model(module, tokenizer, context=...)"
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        if self._tokenizer is not None:
            return self._tokenizer
        if self.source is not None:
            raise ArtifactError(f"{self.source} holds no tokenizer: it was packed from a module alone")
        raise ArtifactError(
            "this Model was made without a tokenizer; give it one: parbank.Model(module, tokenizer, ...)"
        )

    @property
    def device(self) -> torch.device:
        return next((tensor.device for tensor in self.state_dict().values()), torch.device("cpu"))

    def state_dict(self) -> dict[str, Tensor]:
        """The weights by name."""
        return self._module.state_dict() if isinstance(self._module, nn.Module) else dict(self._module)

    @in_python_words
    def score(
        self,
        text: str | bytes | os.PathLike[str] | None = None,
        *,
        method: str = "chunked",
        context: int | None = None,
        **settings: Any,
    ) -> Score:
        """Bits per byte of a text: `.bpb`, from `.bits`, `.bytes` and `.tokens`.

        text: a string is the text itself, unless it is a data spec ("stdlib", or a string that begins with a kind
        such as "text:" or "shards:"). Of a spec, the validation part is scored, as by `parbank eval --data`. A Path
        is a file or folder; all of its text is scored. A string that names an existing file is refused as ambiguous.
        Bytes are always the text, in UTF-8. None means the validation text of the model's training data.

        method: chunked, sliding, streaming, ttt or adaptive. `settings` are the method's, such as stride=64 of sliding or
        lr=0.002 of ttt; `parbank eval --methods` lists them. docs/design/scoring.md explains each method.
        """
        scoring = make_method(method, context=self.context if context is None else context, **settings)
        model = self._scorable(None if scoring.any_model else method)
        tokens, runtime = self._open_text(text), Runtime(device=self.device)
        check_causal(self, min(scoring.context, len(tokens)))
        scored = scoring.score(model, tokens, runtime, tokenizer=self.tokenizer)
        if (idle := scoring.find_idle(scored.tokens, model.config)) is not None:
            warn(idle, stacklevel=2)
        return scored.total(self.tokenizer)

    @in_python_words
    def sample(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int = 0,
        context: int | None = None,
    ) -> str:
        """Text that continues the prompt, without the prompt. The same seed gives the same text; for several texts, use
        several seeds.

        The text ends after `tokens` tokens, before the first of the `stop` strings, or where the model ends the
        document. Temperature 0 takes the likeliest token. top_k keeps the k likeliest tokens (0: all); of these,
        top_p keeps the fewest whose probabilities sum to it.
        """
        return "".join(
            self.stream(
                prompt,
                tokens=tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                stop=stop,
                seed=seed,
                context=context,
            )
        )

    @in_python_words
    def stream(
        self,
        prompt: str = "",
        *,
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int = 0,
        context: int | None = None,
    ) -> Iterator[str]:
        """The text of `sample`, piece by piece as it is generated."""
        require(isinstance(prompt, str), f"the prompt is a string, got a {type(prompt).__name__}")
        check_settings(tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop)
        before = self.tokenizer.encode(prompt)
        drawn = sample_tokens(
            self._network(),
            self.tokenizer,
            before,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            context=self.context if context is None else context,
        )
        return write_text(self.tokenizer, before, drawn, stop)

    @torch.inference_mode()
    def logits(self, ids: Tensor | np.ndarray | Iterable[int]) -> Tensor:
        """The logits of the next token at every position, float32: ids (T,) -> (T, vocabulary), (B, T) -> (B, T,
        vocabulary)."""
        batch = _read_ids(ids).to(self.device)
        low, high = int(batch.min()), int(batch.max())
        if low < 0 or high >= self.tokenizer.vocab_size:
            raise ConfigError(f"ids must be 0 to {self.tokenizer.vocab_size - 1}, got {low} to {high}")
        model = self._network()
        training = model.training
        model.eval()
        try:
            with autocast(self.device):
                found = model(batch if batch.ndim == 2 else batch[None]).float()
        finally:
            model.train(training)
        return found if batch.ndim == 2 else found[0]

    @in_python_words
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the artifact that the model was loaded from, byte for byte.

        Weights that are in no artifact, such as those of a checkpoint or changed ones, need a byte cap: use `pack`.
        """
        target = read_path(path)
        if self.source is not None and is_artifact(self.source):
            data = self.source.read_bytes()
            artifact = decode_artifact(data, source=str(self.source))
            unpack = unpack_state_dict if artifact.meta.get("kind") == FOREIGN else unpack_tensors
            stored, own = unpack(artifact), self.state_dict()
            if stored.keys() == own.keys() and all(torch.equal(stored[name], own[name].cpu()) for name in stored):
                check_target(target)
                write_file(target, data)
                return target
        raise ArtifactError(
            f"these weights are not those of an artifact on disk ({self.source or 'no file'}); parbank.pack(model, "
            f"max_bytes=..., out={str(target)!r}) makes one"
        )

    @in_python_words
    def export(self, path: str | os.PathLike[str], dtype: str = "float32") -> Path:
        """Writes the weights as safetensors (float32, bfloat16 or float16), and the tokenizer beside them as NAME.model."""
        target = read_path(path)
        loaded = LoadedModel(
            model=self._gpt("export"), tokenizer=self.tokenizer, context=self.context, data=self.data, meta=self.meta,
            source=self.source or target,
        )  # fmt: skip
        export_model(loaded, target, dtype)
        return target

    def __repr__(self) -> str:
        count = sum(tensor.numel() for tensor in self.state_dict().values())
        source = f", from {str(self.source)!r}" if self.source else ""
        return f"Model({count:,} numbers, context {self.context}{source})"

    def _gpt(self, what: str) -> GPT:
        if not isinstance(self.module, GPT):
            raise ConfigError(f"{what} needs a model that parbank built; this model is a {type(self.module).__name__}")
        return self.module

    def _network(self) -> GPT | PlainModel:
        """The network for scoring and sampling. Of your own module they use the forward pass alone."""
        module = self.module
        if isinstance(module, GPT):
            return module
        plain = PlainModel(module, vocab_size=self.tokenizer.vocab_size, bos_id=self.tokenizer.bos_id)
        return plain.train(module.training)

    def _scorable(self, reads_inside: str | None = None) -> GPT:
        """The network for scoring. A method that reads inside the network is refused for your own module."""
        if reads_inside is not None and not isinstance(self.module, GPT):
            able = " or ".join(name for name, method in METHODS.items() if method.any_model)
            raise ConfigError(
                f"method {reads_inside!r} reads inside the network, and this network is a {type(self.module).__name__}; use {able}"
            )
        return cast(GPT, self._network())

    def _open_text(self, text: str | bytes | os.PathLike[str] | None) -> TokenSet:
        if text is None:
            if self.data is None:
                raise ConfigError(
                    "the model does not know what it was trained on; say what to score: text, a Path or a spec"
                )
            return self._open_spec(self.data)
        if isinstance(text, bytes):
            try:
                return self._encode(text.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise DataError(f"the bytes to score are not UTF-8 ({error}); decode the text yourself") from None
        if isinstance(text, os.PathLike):
            if "," in os.fspath(text):
                raise ConfigError(f"{text} has a comma, which separates paths in a spec; rename it, or score its text")
            return self._open_spec(f"text:val={os.fspath(text)}")
        if not isinstance(text, str):
            raise ConfigError(f"score takes a text, bytes, a Path or a data spec, got a {type(text).__name__}")
        if is_spec(text):
            try:
                return self._open_spec(text)
            except DataError as error:
                raise DataError(
                    f"{error}. ({text[:40]!r} is a data spec, by its first word; to score a text that begins so, give it as bytes)"
                ) from error
        if os.path.exists(os.path.expanduser(text)):
            raise ConfigError(
                f"{text!r} names a file or folder here: to score its text, give Path({text!r}); to score these "
                f"{len(text)} characters themselves, give them as bytes: {text!r}.encode()"
            )
        if _FILE_NAME.fullmatch(text):
            warn(f"scoring the {len(text)} characters {text!r} themselves: there is no file of that name", stacklevel=3)
        return self._encode(text)

    def _open_spec(self, spec: str) -> TokenSet:
        return open_validation(spec, self.tokenizer, say=say_nothing).tokens

    def _encode(self, text: str) -> TokenSet:
        if not text:
            raise DataError("there is no text to score: it is empty")
        tokens = self.tokenizer.encode(text)
        check_tokens(self.tokenizer, tokens, text.encode("utf-8"), "the text")
        return TokenSet([np.concatenate([[self.tokenizer.bos_id], tokens]).astype(np.uint16)])


def check_causal(model: Model, length: int) -> None:
    """Refuses a module of your own that sees later tokens, in windows of this length."""
    if isinstance(network := model._network(), PlainModel):
        network.check_causal(length)


def read_path(path: str | os.PathLike[str]) -> Path:
    """A path that a caller gave, with ~ for the home folder."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"a path is a string or a Path, got {path!r}")
    if "\0" in (text := os.fspath(path)):
        raise ConfigError(f"a path cannot hold a zero byte, got {text!r}")
    return Path(os.path.expanduser(path))


def _read_ids(ids: Tensor | np.ndarray | Iterable[int]) -> Tensor:
    """Token ids as int64, (T,) or (B, T)."""
    if isinstance(ids, str):
        raise ConfigError("logits takes token ids, got text; model.tokenizer.encode(text) makes ids of it")
    try:
        found = (
            ids.cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids if hasattr(ids, "__len__") else list(ids))
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"logits takes token ids, (T,) or (B, T) with rows of one length; {error}") from error
    if found.ndim not in (1, 2) or not found.size:
        raise ConfigError(f"ids have shape (T,) or (B, T), with at least one token; got {found.shape}")
    if found.dtype.kind not in "iu":
        raise ConfigError(f"token ids are whole numbers, got {found.dtype}")
    return torch.from_numpy(found.astype(np.int64))


def _find_device(device: str) -> torch.device:
    found = pick_device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found
