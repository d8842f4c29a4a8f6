"""Text from a model, one token after another."""

from collections.abc import Iterator

import torch

from parbank.config import require
from parbank.data.tokenizer import Tokenizer
from parbank.eval.score import autocast
from parbank.model import GPT


@torch.inference_mode()
def sample_tokens(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str = "",
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    context: int = 1024,
) -> Iterator[int]:
    """Yields up to `tokens` tokens that continue the prompt, and stops where the model ends the document.

    temperature 0 takes the likeliest token; top_k 0 keeps all of them. The same seed gives the same text on one machine.
    The window of the last `context` tokens is computed anew for every token.
    """
    require(tokens >= 1, f"the number of tokens must be at least 1, got {tokens}")
    require(temperature >= 0, f"the temperature must not be negative, got {temperature}")
    require(top_k >= 0, f"top-k must be 0 (keep all) or positive, got {top_k}")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    window = [tokenizer.bos_id, *map(int, tokenizer.encode(prompt))]
    model.eval()
    for _ in range(tokens):
        with autocast(device):
            logits = model(torch.tensor([window[-context:]], device=device))[0, -1].float().cpu()
        chosen = _choose(logits, temperature, top_k, generator)
        if chosen == tokenizer.bos_id:
            return
        window.append(chosen)
        yield chosen


def _choose(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        lowest_kept = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < lowest_kept, float("-inf"))
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
