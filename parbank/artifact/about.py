"""The meta of a parbank model's artifact."""

from dataclasses import dataclass
from typing import Any

from parbank.config import to_dict
from parbank.data.sources import is_public
from parbank.model.config import ModelConfig

KIND = "parbank language model"
TOKENIZER = "tokenizer"  # the section with the SentencePiece model


@dataclass(frozen=True, kw_only=True)
class About:
    """A model, and the run it comes from."""

    model: ModelConfig
    context: int
    """The window it was trained on, in tokens."""
    data: str
    """The spec it was trained on."""
    recipe: str
    seed: int

    def to_meta(self) -> dict[str, Any]:
        """The meta of its artifact. Paths of the machine that made it are private and left out."""
        about = {
            "kind": KIND,
            "model": to_dict(self.model),
            "context": self.context,
            "recipe": self.recipe,
            "seed": self.seed,
        }
        return about | {"data": self.data if is_public(self.data) else None}
