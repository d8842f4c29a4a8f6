"""The validation text of a data spec, in the tokens of a given model."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parbank.data.dataset import Dataset, open_dataset, open_shards
from parbank.data.progress import Say, say_on_stderr
from parbank.data.shards import TokenSet
from parbank.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Validation:
    """Tokens to score, and the hash of the text behind them: scores compare when it is the same."""

    tokens: TokenSet
    sha256: str


def open_validation(
    spec: str, tokenizer: Tokenizer, *, cache: Path | None = None, say: Say = say_on_stderr
) -> Validation:
    """Opens a spec like `open_dataset` does. Which documents are validation depends on the text alone, so where the data was
    prepared with another tokenizer the same text is tokenised again, document by document."""
    kind, _, folder = spec.partition(":")
    if kind == "shards" and folder:
        dataset = open_shards(Path(folder).expanduser(), name=spec)
    else:
        dataset = open_dataset(spec, vocab_size=tokenizer.vocab_size, cache=cache, say=say)
    if dataset.tokenizer.fingerprint == tokenizer.fingerprint:
        return Validation(dataset.val, dataset.val_text_sha256)
    return Validation(TokenSet([_tokenise_again(dataset, tokenizer)]), dataset.val_text_sha256)


def _tokenise_again(dataset: Dataset, tokenizer: Tokenizer) -> np.ndarray:
    tokens = dataset.val.read(0, len(dataset.val))
    starts = np.flatnonzero(tokens == dataset.tokenizer.bos_id)
    pieces: list[np.ndarray] = []
    for document in np.split(tokens, starts):
        text = dataset.tokenizer.decode(document)
        if text:
            pieces += [np.array([tokenizer.bos_id], dtype=np.uint16), tokenizer.encode(text)]
    return np.concatenate(pieces)
