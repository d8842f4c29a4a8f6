"""Where `split_parameters` puts the parameters of public architectures: a table of docs/reference/compatibility.md.

    python -m tests.integrations.architectures timm       prints the findings for timm's architectures

Models are built on the meta device at the sizes of their default configs: without memory, downloads or random numbers. A
step is taken with small weights of as many dimensions.

timm imports torchvision. Where that is installed, transformers uses it too, and its compiled library fits one build of
PyTorch only. `make integrations` therefore installs both packages into a folder that only a process for timm sees.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

from parbank.optim import ParallelMuon, split_parameters

ROOT = Path(__file__).parents[2]
TIMM_FOLDER = Path(sys.prefix) / "timm"

TRANSFORMERS = {
    "CausalLM": (
        "gpt2 gpt_neo gpt_neox gptj opt bloom falcon llama mistral mixtral qwen2_moe qwen3 qwen3_moe qwen3_next gemma3_text "
        "phi3 olmo2 olmoe deepseek_v3 gpt_oss llama4_text jetmoe granitemoe glm4_moe minimax mamba mamba2 jamba rwkv "
        "recurrent_gemma lfm2 xlnet"
    ),
    "MaskedLM": "bert roberta distilbert albert electra deberta-v2 modernbert funnel convbert",
    "SequenceClassification": "bert deberta",
    "Seq2SeqLM": "t5 bart m2m_100",
    "ImageClassification": "vit swin convnext resnet dinov2 beit mobilevit",
    "": "bert whisper wav2vec2 clip siglip sam blip-2 llava perceiver encodec segformer",
}
NAMES = [f"{kind} {task}".rstrip() for task, kinds in TRANSFORMERS.items() for kind in kinds.split()]
TIMM = (
    "vit_small_patch16_224 vit_small_patch16_rope_224 deit_tiny_distilled_patch16_224 eva02_tiny_patch14_224 "
    "swin_tiny_patch4_window7_224 maxvit_tiny_tf_224 hiera_tiny_224 mixer_s32_224 sequencer2d_s resnet50 regnety_002 "
    "convnext_tiny efficientnet_b0 mobilenetv3_small_100"
)
TIMM_NAMES = [f"{kind} timm" for kind in TIMM.split()]
SIDE = 6  # of the weights that a step is taken with; a joint query, key and value has a third


@dataclass(frozen=True)
class Findings:
    """Where the parameters of an architecture went, and what its modules say of them."""

    row: str
    """The line of the table."""
    algorithms: dict[str, str]
    trainable: list[str]
    linears: dict[str, int]
    """The shorter side of the weight of each linear layer, by the layer's name."""
    embeddings: list[str]
    heads: list[str]
    """Parameters of the layers that the model declares as its heads."""


def build(name: str) -> nn.Module:
    """An architecture by its name in the table, on the meta device."""
    kind, *task = name.split()
    if task == ["timm"]:
        create = import_timm().create_model
        with torch.device("meta"):
            return create(kind)
    import transformers

    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind)
        auto = getattr(transformers, f"AutoModelFor{task[0]}" if task else "AutoModel")
        return auto.from_config(config)


def import_timm() -> Any:
    """The real package, with the real torchvision, whose compiled library need not fit this build of PyTorch.

    Without its library, torchvision's import fails only because it gives shapes to two operators that do not exist. Both
    find overlapping boxes. Declaring them is enough: no model calls them.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
        import_timm.library = library  # type: ignore[attr-defined]  # its end would remove the operators
    import timm

    return timm


def inspect(name: str) -> Findings:
    """Splits an architecture, makes an optimizer of the groups, which checks every shape, and takes a step with small ones."""
    model = build(name)
    groups = split_parameters(model)
    ParallelMuon([dict(group) for group in groups])
    _step(groups)
    modules = list(model.named_modules())
    linears = {n: min(m.weight.shape) for n, m in modules if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}
    ids = {id(param) for layer in _find_heads(model) for param in layer.parameters()}
    return Findings(
        row=_row(name, groups),
        algorithms={name: group["algorithm"] for group in groups for name, _ in group["params"]},
        trainable=[n for n, param in model.named_parameters() if param.requires_grad],
        linears=linears,
        embeddings=[f"{n}.weight" for n, m in modules if isinstance(m, nn.Embedding) and m.weight.numel()],
        heads=[n for n, param in model.named_parameters() if id(param) in ids],
    )


def _step(groups: list[dict[str, Any]]) -> None:
    """A step with weights of at most SIDE numbers a dimension, stacks of as many matrices as they have."""
    small = []
    for group in groups:
        shapes = [tuple(param.shape) for _, param in group["params"]]
        keep = [int(len(shape) == 3 and group["algorithm"] == "muon" and not group.get("flatten")) for shape in shapes]
        sizes = [(*s[:k], *(min(side, SIDE) for side in s[k:])) for s, k in zip(shapes, keep)]
        small.append({**group, "params": [nn.Parameter(torch.ones(size)) for size in sizes]})
    optimizer = ParallelMuon(small, max_norm=1.0)
    params = [param for group in small for param in group["params"]]
    for param in params:
        param.grad = torch.randn(param.shape)
    optimizer.step()
    assert not [param for param in params if param.numel() and bool((param == 1).all())], "every weight has moved"


def _find_heads(model: nn.Module) -> list[nn.Module]:
    declared = [getattr(model, method, lambda: None)() for method in ("get_output_embeddings", "get_classifier")]
    layers = [layer for head in declared for layer in (head if isinstance(head, tuple) else [head])]
    return [layer for layer in layers if layer is not None]


def inspect_timm() -> dict[str, Findings]:
    """`inspect` for every architecture of timm, in a process that sees timm and torchvision."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.architectures", "timm"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{TIMM_FOLDER}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {name: Findings(**values) for name, values in found.items()}


def _row(name: str, groups: list[dict[str, Any]]) -> str:
    def of(*roles: str) -> list[str]:
        return [name for group in groups for name, _ in group["params"] if group["role"] in roles]

    sizes = {
        a: sum(p.numel() for g in groups if g["algorithm"] == a for _, p in g["params"]) for a in ("muon", "adamw")
    }
    share = f"{sizes['muon'] / sum(sizes.values()):.0%}"
    upright, turned = of("matrices", "joint query, key and value"), of("transposed matrices")
    cells = [name, share, str(len(upright)), str(len(turned) or ""), str(len(of("convolutions")) or "")]
    cells += [_shorten(of("embeddings and heads")), _shorten(of("other weights"))]
    return f"| {' | '.join([*cells, str(len(of('norms, biases, gates and scalars')))])} |"


def _shorten(names: list[str]) -> str:
    """Names with * for the numbers of layers, each once."""
    return ", ".join(f"`{name}`" for name in dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))


def count() -> int:
    """How many architectures there are."""
    return len(NAMES) + len(TIMM_NAMES)


def write() -> str:
    """The part of the page."""
    import transformers

    version = next(TIMM_FOLDER.glob("timm-*.dist-info")).stem.removeprefix("timm-")
    head = f"""## Architectures

The table shows where `split_parameters(model)` puts parameters without overrides. It has {len(NAMES)} architectures of
transformers {transformers.__version__} and {len(TIMM_NAMES)} of timm {version}. A test builds each model from its default
config, gives its groups to an optimizer, and checks that a step moves every weight.

- **Muon** is the share of all numbers that go to Muon. *Matrices*, *stored (in, out)* and *convolutions* count its
  weights; a stack of experts counts as one.
- **Embeddings and heads**, **other weights** (tables, recurrent and weight-normalised weights) and **small** parameters
  (norms, biases, gates, routers, scalars) go to AdamW. Small ones get no weight decay.

| architecture | Muon | matrices | stored (in, out) | convolutions | embeddings and heads | other weights | small |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
    found = [*(inspect(name) for name in NAMES), *inspect_timm().values()]
    return head + "\n".join(findings.row for findings in found) + "\n"


if __name__ == "__main__":
    print(json.dumps({name: asdict(inspect(name)) for name in TIMM_NAMES}))
