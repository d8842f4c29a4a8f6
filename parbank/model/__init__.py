"""The model: a GPT whose weight matrices live in banks."""

from parbank.model.config import ModelConfig
from parbank.model.gpt import GPT

__all__ = ["GPT", "ModelConfig"]
