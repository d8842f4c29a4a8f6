"""Where `split_parameters` puts the parameters of public architectures: the table in docs/reference/architectures.md.

    python -m tests.integrations.architectures       writes it

Models are built on the meta device at the sizes of their default configs: without memory, downloads or random numbers.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn

from parbank.optim import ParallelMuon, split_parameters

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "architectures.md"

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


def build(name: str) -> nn.Module:
    """An architecture by its name in the table, on the meta device."""
    kind, *task = name.split()
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind)
        auto = getattr(transformers, f"AutoModelFor{task[0]}" if task else "AutoModel")
        return auto.from_config(config)


@dataclass(frozen=True)
class Row:
    """Where the parameters of an architecture went."""

    name: str
    groups: list[dict[str, Any]]

    @property
    def algorithms(self) -> dict[str, str]:
        return {name: group["algorithm"] for group in self.groups for name, _ in group["params"]}

    def __str__(self) -> str:
        def of(*roles: str) -> list[str]:
            return [name for group in self.groups for name, _ in group["params"] if group["role"] in roles]

        sizes = {
            a: sum(p.numel() for g in self.groups if g["algorithm"] == a for _, p in g["params"])
            for a in ("muon", "adamw")
        }
        share = f"{sizes['muon'] / sum(sizes.values()):.0%}"
        upright, turned = of("matrices", "joint query, key and value"), of("transposed matrices")
        cells = [self.name, share, str(len(upright)), str(len(turned) or ""), str(len(of("convolutions")) or "")]
        cells += [_shorten(of("embeddings and heads")), _shorten(of("other weights"))]
        return f"| {' | '.join([*cells, str(len(of('norms, biases, gates and scalars')))])} |"


def _shorten(names: list[str]) -> str:
    """Names with * for the numbers of layers, each once."""
    return ", ".join(f"`{name}`" for name in dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names))


def describe(name: str) -> Row:
    """Splits an architecture, and makes an optimizer of the groups: it checks every shape."""
    groups = split_parameters(build(name))
    ParallelMuon([dict(group) for group in groups])
    return Row(name, groups)


def write() -> str:
    """The page."""
    head = f"""# Architectures and their split

Where `split_parameters(model)` puts the parameters of {len(NAMES)} architectures of transformers
{transformers.__version__}, without overrides. Models are built from default configs.
`python -m tests.integrations.architectures` writes this page.

- **Muon** is the share of all numbers that go to Muon. *Matrices*, *stored (in, out)* and *convolutions* count its
  weights; a stack of experts counts as one.
- **Embeddings and heads**, **other weights** (tables, recurrent and weight-normalised weights) and **small** parameters
  (norms, biases, gates, routers, scalars) go to AdamW. Small ones get no weight decay.

| architecture | Muon | matrices | stored (in, out) | convolutions | embeddings and heads | other weights | small |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
    return head + "\n".join(str(describe(name)) for name in NAMES) + "\n"


if __name__ == "__main__":
    PAGE.write_text(write())
