"""`parbank.pack`: any model under a byte cap."""

import math
import numbers
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor, nn

from parbank.api.model import Model, read_path
from parbank.api.run import Settings, read_settings
from parbank.api.words import in_python_words, warn
from parbank.artifact.about import TOKENIZER
from parbank.artifact.calibrate import calibrate
from parbank.artifact.container import check_target
from parbank.artifact.module import Batch, Loss, calibrate_module, roles_in, transposed_in
from parbank.artifact.pack import Packed, pack_weights
from parbank.artifact.state_dict import pack_state_dict, split_state_dict
from parbank.config import override
from parbank.data.progress import say_nothing
from parbank.errors import ConfigError, DataError
from parbank.model import GPT
from parbank.quant.calibration import Calibration
from parbank.quant.config import QuantConfig
from parbank.quant.solver import describe_uncalibrated
from parbank.runtime import Runtime
from parbank.sizes import read_size
from parbank.training.pack import open_training_tokens


@in_python_words
def pack(
    model: Model | nn.Module | Mapping[str, Tensor],
    *,
    max_bytes: int | str,
    calibration: str | Iterable[Batch] | None = None,
    loss: Loss | None = None,
    out: str | os.PathLike[str] | None = None,
    settings: Settings = (),
) -> Packed:
    """Packs a model into one file: a parbank `Model`, any `nn.Module`, or a state dict.

    The file has at most `max_bytes`, such as 8_000_000 or "8MB".
    The bytes go where the loss needs them. To measure that, the module runs over `calibration`: some batches of token
    ids (B, T), or dicts or tuples of its arguments. Pass `loss`, a function of the output and the batch, if the
    module returns neither logits, nor a loss, nor an output with `.loss`. Linear layers, embeddings and
    `nn.MultiheadAttention` can be measured. Convolutions, recurrent layers and the input projection of
    cross-attention cannot: a warning and `uncalibrated` name their weights. If you give no batches, errors in all
    weights count alike, and the packed model is worse; `uncalibrated` then names every tensor. A parbank `Model` also
    takes a data spec, whose training part is used; the default is the text it was trained on.

    settings: {"quant.low_rank": 8}, as `parbank pack --set`.

    With `out` the file is written there; a file that is no artifact is not replaced. `.data` are its bytes and `.size`
    their number. `load` reads it back. For a model that parbank did not build it returns the weights:
    `module.load_state_dict(load(path).state_dict())`.
    Integers and bools in a state dict are stored exactly, tied weights once.

        >>> import torch
        >>> module = torch.nn.Sequential(torch.nn.Embedding(100, 32), torch.nn.Linear(32, 100))
        >>> batches = [torch.randint(100, (4, 16)) for _ in range(3)]
        >>> packed = parbank.pack(module, max_bytes=4_000, calibration=batches, out="module.pbk")
        >>> packed.size <= 4_000, packed.uncalibrated
        (True, ())
        >>> module.load_state_dict(parbank.load("module.pbk").state_dict())
        <All keys matched successfully>
    """
    cap = _read_cap(max_bytes)
    if loss is not None and not callable(loss):
        raise ConfigError(f"loss is a function of the output and the batch, got {loss!r}")
    if loss is not None and (calibration is None or isinstance(calibration, str)):
        raise ConfigError("loss is for batches to calibrate on; give some by calibration, or leave loss out")
    if isinstance(calibration, Tensor):
        raise ConfigError("calibration is a list of batches, got one tensor; give [batch], or several")
    target = None if out is None else read_path(out)
    if target is not None:
        check_target(target)
    quant = override(_PackSettings(), *read_settings(settings)).quant
    if isinstance(model, Model) and isinstance(model._module, GPT):
        packed = _pack_own(model, model._module, quant, calibration, loss, cap)
    else:
        packed = _pack_foreign(model, quant, calibration, loss, cap)
    if packed.uncalibrated and calibration is not None:
        warn(describe_uncalibrated(packed.uncalibrated), stacklevel=2)
    if target is not None:
        packed.write(target)
    return packed


def _read_cap(max_bytes: object) -> int:
    if isinstance(max_bytes, str):
        max_bytes = read_size(max_bytes)
    if not isinstance(max_bytes, numbers.Real) or isinstance(max_bytes, bool) or not math.isfinite(max_bytes):
        raise ConfigError(f"max_bytes must be a number of bytes such as 8_000_000, or '8MB'; got {max_bytes!r}")
    if max_bytes < 1:
        raise ConfigError(f"max_bytes must be positive, got {max_bytes}")
    return int(cast(int, max_bytes))


@dataclass(frozen=True, kw_only=True)
class _PackSettings:
    """The settings that `pack` may change."""

    quant: QuantConfig = field(default_factory=QuantConfig)


def _pack_own(
    model: Model,
    module: GPT,
    quant: QuantConfig,
    calibration: str | Iterable[Batch] | None,
    loss: Loss | None,
    max_bytes: int,
) -> Packed:
    """A parbank model with its tokenizer: `load` returns the same kind of model."""
    measured = Calibration()
    if quant.method == "solver":  # `rows` rounds by the weights alone
        if calibration is not None and not isinstance(calibration, str):
            measured = calibrate_module(module, calibration, module.state_dict(), loss=loss)
        elif quant.calibration_tokens:
            measured = _calibrate_on_text(model, module, calibration, quant)
    sections = {TOKENIZER: model.tokenizer.model_bytes}
    return pack_weights(
        module.state_dict(), quant, measured, max_bytes=max_bytes, meta=model.meta, extra_sections=sections
    )


def _calibrate_on_text(model: Model, module: GPT, asked: str | None, quant: QuantConfig) -> Calibration:
    """Calibrates on the training part of the given spec, which must exist, or of the model's own."""
    spec = asked or model.data
    try:
        if spec is None:
            raise DataError("the model does not know what it was trained on")
        count = quant.calibration_tokens
        tokens = open_training_tokens(spec, model.tokenizer, context=model.context, count=count, say=say_nothing)
    except DataError as error:
        if asked is not None:
            raise
        warn(f"packing by the weights alone, without calibration: {error}; calibration=SPEC names text", stacklevel=4)
        return Calibration()
    return calibrate(module, tokens, quant, context=model.context, runtime=Runtime(device=model.device))


def _pack_foreign(
    model: Model | nn.Module | Mapping[str, Tensor],
    quant: QuantConfig,
    calibration: str | Iterable[Batch] | None,
    loss: Loss | None,
    max_bytes: int,
) -> Packed:
    """Weights of a module that parbank did not build, or a state dict. A `Model` adds its tokenizer."""
    module = model._module if isinstance(model, Model) else model
    if isinstance(calibration, str):
        raise ConfigError(
            f"calibration={calibration!r}: a data spec calibrates a model that parbank built; for other modules, give a list of "
            "batches"
        )
    if not isinstance(module, nn.Module | Mapping):
        raise ConfigError(f"pack takes a Model, a torch.nn.Module or a state dict, got a {type(module).__name__}")
    if isinstance(module, Mapping) and calibration is not None:
        raise ConfigError("a state dict cannot be calibrated, since nothing runs it; give the module itself")
    meta, sections = {}, {}
    if isinstance(model, Model):
        meta = {"context": model.context}
        sections = {TOKENIZER: model._tokenizer.model_bytes} if model._tokenizer else {}
    measured = Calibration()
    if isinstance(module, nn.Module):
        split = split_state_dict(module.state_dict(), roles_in(module), transposed_in(module))
        if calibration is not None and quant.method == "solver":
            measured = calibrate_module(module, calibration, split.quantised, loss=loss)
    else:
        split = split_state_dict(module)
    return pack_state_dict(split, quant, measured, max_bytes=max_bytes, meta=meta, sections=sections)
