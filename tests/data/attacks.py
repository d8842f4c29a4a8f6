"""SentencePiece models that would make a text look cheaper than it is: what the proof of a text must refuse."""

import io
import string
import tempfile
from collections.abc import Callable
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as proto

Change = Callable[["proto.ModelProto"], None]


def train_rewriting(lines: list[str], rules: dict[str, str], vocab_size: int = 400, **options: object) -> bytes:
    """A model whose normaliser replaces characters: BOS 1 and byte fallback, as parbank's own models have."""
    model = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "rules.tsv"
        rows = (f"{ord(old):X}\t{' '.join(f'{ord(sign):X}' for sign in new)}\n" for old, new in rules.items())
        table.write_text("".join(rows), encoding="utf-8")
        defaults = {
            "vocab_size": vocab_size,
            "model_type": "bpe",
            "byte_fallback": True,
            "normalization_rule_tsv": str(table),
            "add_dummy_prefix": False,
            "remove_extra_whitespaces": False,
            "unk_id": 0,
            "bos_id": 1,
            "eos_id": -1,
            "pad_id": -1,
            "minloglevel": 2,
            "num_threads": 1,
        }
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, **{**defaults, **options}
        )
    return model.getvalue()


def letters_to_a(lines: list[str], vocab_size: int = 320) -> bytes:
    """Every letter becomes `a`: the same number of bytes, and next to nothing to predict."""
    return train_rewriting(lines, {letter: "a" for letter in string.ascii_letters if letter != "a"}, vocab_size)


def edit(model: bytes, change: Change) -> bytes:
    found = proto.ModelProto.FromString(model)
    change(found)
    return bytes(found.SerializeToString())


def find_piece(model: "proto.ModelProto", text: str) -> "proto.ModelProto.SentencePiece":
    return next(piece for piece in model.pieces if piece.piece == text)
