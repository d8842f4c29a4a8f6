"""Weights to and from safetensors, the format of other programs.

An export holds the weights that the model computes with, under plain names. Weights of an artifact are integer
multiples of one float16 number per row. An import finds the multiples again, so that artifact -> safetensors
(float32) -> artifact loses nothing, whatever method chose the integers.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from parbank.artifact.about import KIND, TOKENIZER
from parbank.artifact.container import check_target
from parbank.artifact.contents import Content, pack_contents
from parbank.artifact.load import LoadedModel, find_fault
from parbank.artifact.pack import pack_tensors
from parbank.config import from_dict, override
from parbank.data.tokenizer import Tokenizer
from parbank.errors import ArtifactError, ConfigError, ParbankError
from parbank.files import refuse_link, write_file
from parbank.model import GPT, ModelConfig
from parbank.quant.config import QuantConfig
from parbank.quant.integers import quantise_rows, recover, to_half
from parbank.quant.roles import role

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
META = "parbank"  # the key of our metadata: the artifact's meta as JSON
FINGERPRINT = "tokenizer_sha256"
# The settings of quant that an import uses.
_USED = ("matrix_bits", "min_matrix_bits", "embedding_bits", "coder", "clip_steps", "clip_floor")


@dataclass(frozen=True)
class ImportedWeights:
    size: int
    """Bytes of the artifact."""
    count: int
    exact: int
    """Tensors that are stored exactly as they were."""


def export_model(loaded: LoadedModel, target: Path, dtype: str = "float32") -> tuple[Path, int]:
    """Writes the weights to `target` and the tokenizer beside them. Returns its path and the number of tensors."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is not known; choose {', '.join(DTYPES)}")
    if target.suffix != ".safetensors":
        raise ConfigError(f"{target} must end in .safetensors: other programs go by the name")
    try:
        target.name.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(
            f"the name {target.name!a} is not UTF-8, which safetensors needs; choose another --out"
        ) from None
    if os.path.lexists(target) and not _is_exported(target):
        raise ConfigError(
            f"{target} exists and was not exported by parbank; choose another --out, or delete it yourself"
        )
    refuse_link(target)
    tensors = loaded.model.state_dict()
    converted = {name: tensor.to("cpu", DTYPES[dtype]).contiguous() for name, tensor in tensors.items()}
    for name, tensor in converted.items():
        if not torch.isfinite(tensor).all():
            raise ConfigError(f"{name} holds values that {dtype} cannot; use --dtype float32 or bfloat16")
    about = {
        "format": "pt",
        META: json.dumps(loaded.meta, sort_keys=True),
        FINGERPRINT: loaded.tokenizer.fingerprint,
        "tokenizer_file": target.with_suffix(".model").name,
    }
    beside, pieces = target.with_suffix(".model"), loaded.tokenizer.model_bytes
    if os.path.lexists(beside) and not (beside.is_file() and beside.read_bytes() == pieces):
        raise ConfigError(f"the tokenizer goes to {beside}, which holds another one; choose another --out")
    write_file(target, _safetensors().torch.save(converted, metadata=about))
    write_file(beside, pieces)
    return beside, len(tensors)


def _is_exported(path: Path) -> bool:
    try:
        if not path.is_file():  # a pipe would be waited for
            return False
        with _safetensors().safe_open(path, framework="pt") as file:
            return META in (file.metadata() or {})
    except Exception:  # the library's own error type, or OSError
        return False


def import_model(
    path: Path,
    out: Path,
    *,
    tokenizer: Path | None = None,
    config: Path | None = None,
    max_bytes: int | None = None,
    settings: tuple[str, ...] = (),
) -> ImportedWeights:
    """Reads a safetensors file and its tokenizer, and writes an artifact. Refuses files that do not belong together."""
    check_target(out)
    if max_bytes is not None and max_bytes < 1:
        raise ConfigError(f"--max-bytes must be positive, got {max_bytes}")
    tensors, about = _read_safetensors(path)
    meta = _read_meta(path, about, config)
    pieces = _read_tokenizer(path, about, tokenizer)
    _check_model(path, meta, tensors, Tokenizer.from_bytes(pieces))
    quant = _read_settings(settings)
    data, exact = _pack(tensors, quant, meta, {TOKENIZER: pieces}, max_bytes)
    write_file(out, data)
    return ImportedWeights(len(data), len(tensors), exact)


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """The settings that --set may change here."""

    quant: QuantConfig = field(default_factory=QuantConfig)


def _read_settings(settings: tuple[str, ...]) -> QuantConfig:
    quant = override(_Settings(), *settings).quant
    for setting in settings:
        name = setting.partition("=")[0].strip().removeprefix("quant.")
        if name not in _USED:
            raise ConfigError(
                f"quant.{name} does not apply to an import, which has no text to calibrate the solver on and rounds row by row; "
                f"it takes {', '.join(f'quant.{used}' for used in _USED)}. `parbank pack` of a checkpoint takes all of quant"
            )
    return quant


def _read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ArtifactError(f"{path} is not a regular file; give a .safetensors file")
        with _safetensors().safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = file.metadata() or {}
    except ParbankError:
        raise
    except FileNotFoundError:
        raise ArtifactError(f"{path} does not exist; give a .safetensors file") from None
    except Exception as error:  # the library's own error type, OSError, or a dtype torch does not know
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ArtifactError(f"{path} is not a valid safetensors file: {reason[0]}") from error
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ArtifactError(f"{path} holds {name} as {tensor.dtype}; only floating-point weights can be packed")
    return tensors, about


def _read_meta(path: Path, about: Mapping[str, str], config: Path | None) -> dict[str, Any]:
    if config is None and META not in about:
        raise ArtifactError(
            f"{path} has no config of a parbank model in its metadata; export it with `parbank export`, or give --config"
        )
    try:
        meta = json.loads(config.read_bytes() if config else about[META])
        known = {key: meta.get(key) for key in ("model", "context", "data", "recipe", "seed")}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"the config of {config or path} cannot be read: {error}") from error
    return {"kind": KIND, **known}


def _read_tokenizer(path: Path, about: Mapping[str, str], given: Path | None) -> bytes:
    file = given or path.with_suffix(".model")
    try:
        pieces = file.read_bytes()
    except OSError as error:
        raise ArtifactError(
            f"the tokenizer {file} cannot be read ({error.strerror}); give the SentencePiece model by --tokenizer"
        ) from error
    found = Tokenizer.from_bytes(pieces).fingerprint
    if about.get(FINGERPRINT, found) != found:
        raise ArtifactError(
            f"{file} is not the tokenizer {path} was exported with (sha256 {found[:12]}..., the file says "
            f"{about[FINGERPRINT][:12]}...); give the right one by --tokenizer"
        )
    return pieces


def _check_model(
    path: Path, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], tokenizer: Tokenizer
) -> None:
    """Checks that the config gives exactly these tensors and matches the tokenizer."""
    try:
        config = from_dict(ModelConfig, meta["model"], path="model")
        if config.layers > len(tensors):
            raise ConfigError(f"the config has {config.layers} layers, the file {len(tensors)} tensors")
        with torch.device("meta"):
            expected = {name: tuple(tensor.shape) for name, tensor in GPT(config).state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise ConfigError(
                    f"{name} is {found.get(name, 'absent')} in the file, {expected.get(name, 'absent')} by its config"
                )
        if (config.vocab_size, config.bos_id) != (tokenizer.vocab_size, tokenizer.bos_id):
            raise ConfigError(
                f"the config has {config.vocab_size} tokens (BOS {config.bos_id}), the tokenizer {tokenizer.vocab_size} "
                f"(BOS {tokenizer.bos_id})"
            )
        if (fault := find_fault(meta["context"], meta["data"])) is not None:
            raise ConfigError(fault)
    except (ParbankError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ArtifactError(f"{path} does not fit its config: {str(error).splitlines()[0]}") from error


def _pack(
    tensors: Mapping[str, torch.Tensor],
    quant: QuantConfig,
    meta: Mapping[str, Any],
    extra: Mapping[str, bytes],
    max_bytes: int | None,
) -> tuple[bytes, int]:
    """The file with every tensor stored exactly that can be, if that fits; else all tensors packed again."""
    contents: dict[str, Content] = {}
    roles = {name: role(name, tuple(tensor.shape)) for name, tensor in tensors.items()}
    exact = 0
    for name, tensor in tensors.items():
        weights = tensor.float().contiguous().numpy()
        if roles[name] == "other":
            contents[name] = halves = to_half(weights, name=name)
            exact += bool((halves.astype(weights.dtype) == weights).all())
            continue
        q = quant.matrix_q if roles[name] == "matrix" else quant.embedding_q
        found = recover(weights)
        exact += found is not None
        contents[name] = found or quantise_rows(weights, q, quant.clip_fractions, name=name)
    data = pack_contents(contents, roles, meta, extra, coder=quant.coder)
    if max_bytes is None or len(data) <= max_bytes:
        return data, exact
    try:
        return pack_tensors(tensors, quant, max_bytes=max_bytes, meta=meta, extra_sections=extra).data, 0
    except ArtifactError as error:
        raise ArtifactError(
            f"the import does not fit {max_bytes:,} bytes: as it is it takes {len(data):,}, and rounded more coarsely, row by "
            f"row, which is all that an import can do: {error}. `parbank pack` of a checkpoint goes further"
        ) from error


def save_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Tensors of any dtype as a safetensors file in memory: the same tensors give the same bytes. Copies, because safetensors
    refuses tensors that share memory."""
    copies = {name: tensors[name].clone(memory_format=torch.contiguous_format).cpu() for name in sorted(tensors)}
    return _safetensors().torch.save(copies)


def load_bytes(data: bytes, source: str) -> dict[str, torch.Tensor]:
    """Undoes `save_bytes`. `source` names the place in errors."""
    try:
        return _safetensors().torch.load(data)
    except ParbankError:
        raise
    except Exception as error:  # the library's own error type, or a dtype torch does not know
        raise ArtifactError(f"{source} is not a valid safetensors file: {error}") from error


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ConfigError(f"this needs the package safetensors ({error}): pip install safetensors") from error
    return safetensors
