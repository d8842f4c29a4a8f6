"""A stand-in for a tokenizer, for texts that no tokenizer made: it knows the bytes of tokens and nothing else."""

from typing import Any

import numpy as np


class Sizes:
    """Tokens of 0 to 3 bytes; the BOS, token 1, has none."""

    def count_bytes(self, targets: np.ndarray, previous: np.ndarray) -> np.ndarray:
        return np.where(targets == 1, 0, targets % 4).astype(np.int64)


TOKENIZER: Any = Sizes()
