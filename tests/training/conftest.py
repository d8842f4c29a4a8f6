"""What the trainer's tests share."""

import pytest

from parbank.data.dataset import Dataset, open_dataset


@pytest.fixture(scope="session")
def dataset(text_spec: str) -> Dataset:
    """Real text in 320 tokens, as the nano recipe takes it."""
    return open_dataset(text_spec, vocab_size=320, say=lambda line: None)
