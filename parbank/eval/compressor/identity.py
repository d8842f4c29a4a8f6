"""Identifies the model and the machine that made a file, to tell whether the file can decode here.

Sums of floating-point numbers differ in the last digit between machines, versions and numbers of threads. A decoder with
one other digit gets other tokens. The header of a file therefore says what it was made with.
"""

import hashlib
import json
import platform
from dataclasses import asdict
from typing import Any

import torch

from parbank import __version__
from parbank.artifact.load import LoadedModel
from parbank.ops.backend import active_backend
from parbank.precision import scoring_precision


def hash_model(loaded: LoadedModel) -> str:
    """sha256 of the weights, the shape and the tokenizer, in hex: the same for a file and its copy."""
    digest = hashlib.sha256(json.dumps(asdict(loaded.model.config), sort_keys=True).encode())
    digest.update(loaded.tokenizer.fingerprint.encode())
    for name, tensor in sorted(loaded.model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Everything here that may change a last digit."""
    versions = {"parbank": __version__, "torch": torch.__version__}
    about = versions | {"ops": active_backend(), "dtype": scoring_precision(device)}
    if device.type == "cuda":
        return about | {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return about | {
        "device": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
    }


def find_differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """One phrase for everything that differs."""
    return [
        f"{key} {theirs.get(key)} there and {ours.get(key)} here"
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key) != ours.get(key)
    ]
