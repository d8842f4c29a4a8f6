"""A folder that is laid out like the published data set."""

import io
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from parbank.data.shards import write_shard
from parbank.data.sources.fineweb import SHARDS_AT, TOKENIZER_AT
from parbank.data.tokenizer import Tokenizer

DOCUMENTS = [f"Document {i} is about a thing, and the {i * i} things beside it." for i in range(200)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three training shards and one of validation, under the names and with the kind of tokenizer the real ones have."""
    root = tmp_path_factory.mktemp("hub")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(DOCUMENTS), model_writer=model, vocab_size=330, model_type="bpe", byte_fallback=True,
        minloglevel=2, num_threads=1,
    )  # fmt: skip
    (root / TOKENIZER_AT).parent.mkdir(parents=True)
    (root / TOKENIZER_AT).write_bytes(model.getvalue())
    (root / SHARDS_AT).mkdir(parents=True)
    (root / "datasets" / "manifest.json").write_text("{}")
    tokenizer = Tokenizer.load(root / TOKENIZER_AT)
    for index in range(4):
        stream = [np.append(tokenizer.bos_id, tokenizer.encode(text)) for text in DOCUMENTS[index::4]]
        name = "fineweb_val_000000.bin" if index == 3 else f"fineweb_train_{index:06d}.bin"
        write_shard(root / SHARDS_AT / name, np.concatenate(stream))
    return root
