"""A model as the playground uses it: it writes and measures in steps, each of which gives one line for the page."""

import codecs
import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parbank.api.model import Model, load
from parbank.config import require
from parbank.data.proof import check_tokens
from parbank.data.tokenizer import DecodeState, Tokenizer
from parbank.errors import DataError
from parbank.eval.sampling import NextToken, check_settings, draw_steps
from parbank.eval.surprise import score_pieces
from parbank.model import GPT
from parbank.serve.worker import Item

MOST_TOKENS = 2000
"""Tokens of a continuation."""


@dataclass(frozen=True)
class Player:
    """A model with the name that the page shows."""

    name: str
    model: Model

    def describe(self) -> dict[str, Any]:
        """The facts about the model that the page shows."""
        source = self.model.source
        return {
            "name": self.name,
            "file": source.name if source else None,
            "bytes": source.stat().st_size if source and source.exists() else None,
            "parameters": sum(tensor.numel() for tensor in self.model.state_dict().values()),
            "vocabulary": self.model.tokenizer.vocab_size,
            "context": self.model.context,
            "recipe": self.model.meta.get("recipe"),
        }

    def write(self, prompt: str, *, tokens: int, temperature: float, top_p: float, seed: int) -> Iterator[Item]:
        """Continues the prompt: {"reading": True} for each part of a long prompt, an item for each token, then {"end": ...}."""
        require(tokens <= MOST_TOKENS, f"at most {MOST_TOKENS:,} tokens are written at once, got {tokens:,}")
        check_settings(tokens=tokens, temperature=temperature, top_k=0, top_p=top_p, seed=seed)
        return self._write(prompt, tokens=tokens, temperature=temperature, top_p=top_p, seed=seed)

    def _write(self, prompt: str, **settings: Any) -> Iterator[Item]:
        tokenizer, began = self.model.tokenizer, time.perf_counter()
        before = tokenizer.encode(prompt)
        pieces = Pieces(tokenizer, before)
        count = 0
        for drawn in draw_steps(self._network, tokenizer, before, context=self.model.context, **settings):
            if drawn is None:
                yield {"reading": True}
                continue
            count += 1
            likeliest = [self._alternative(choice, pieces) for choice in drawn.likeliest]
            yield {"text": pieces.add(drawn.choice.token), **_chances(drawn.choice), "likeliest": likeliest}
        seconds = time.perf_counter() - began
        end = "length" if count == settings["tokens"] else "document"
        yield {"end": end, "text": pieces.finish(), "tokens": count, "seconds": seconds}

    def measure(self, text: str) -> Iterator[Item]:
        """Scores a text: {"pieces": [[text, bits, tokens], ...]} for each part of it, then {"score": ...}."""
        if not text:
            raise DataError("there is no text to measure; type or paste some")
        tokenizer = self.model.tokenizer
        tokens = tokenizer.encode(text)
        check_tokens(tokenizer, tokens, text.encode("utf-8"), "the text")
        ids = np.concatenate([[tokenizer.bos_id], tokens]).astype(np.uint16)
        size = int(tokenizer.count_bytes(ids[1:].astype(np.int64), ids[:-1].astype(np.int64)).sum())
        pieces, bits = Pieces(tokenizer), 0.0
        yield {"tokens": len(ids) - 1}
        done, waiting = 1, (0.0, 0)
        for found in score_pieces(self._network, ids, context=self.model.context):
            lines = []
            for token, cost in zip(ids[done : done + len(found)].tolist(), found.tolist()):
                waiting = waiting[0] + cost, waiting[1] + 1
                if shown := pieces.add(token):
                    lines.append([shown, round(waiting[0], 3), waiting[1]])
                    waiting = (0.0, 0)
            done += len(found)
            bits += float(found.sum())
            yield {"pieces": lines, "done": done - 1}
        if shown := pieces.finish():
            yield {"pieces": [[shown, round(waiting[0], 3), waiting[1]]], "done": done - 1}
        yield {"score": {"bits": bits, "bytes": size, "tokens": len(ids) - 1, "bpb": bits / size}}

    @property
    def _network(self) -> GPT:
        network = self.model.module
        assert isinstance(network, GPT)  # `load_players` takes no other
        return network

    def _alternative(self, choice: NextToken, pieces: "Pieces") -> Item:
        """`take`: the text that the page appends to continue with this token; None where the token is no whole text."""
        if choice.token == self.model.tokenizer.bos_id:
            return {"text": None, "take": None, **_chances(choice)}
        text = show_token(self.model.tokenizer, choice.token)
        return {"text": text, "take": pieces.preview(choice.token), **_chances(choice)}


class Pieces:
    """The text of tokens, one after the other. Tokens that hold parts of a character give it with the last of them, and case
    operators give the letters after them."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] | np.ndarray = ()) -> None:
        self._tokenizer, self._state = tokenizer, DecodeState()
        tokenizer.decode_bytes(before, state=self._state)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """The text that is certain now; empty inside a character."""
        return self._decoder.decode(self._tokenizer.decode_bytes([token], state=self._state))

    def preview(self, token: int) -> str | None:
        """The text that `add` would give. None if it is empty or ends inside a character. Nothing changes."""
        pending, _ = self._decoder.getstate()
        data = self._tokenizer.decode_bytes([token], state=copy.deepcopy(self._state))
        try:
            return (pending + data).decode() or None
        except UnicodeDecodeError:
            return None

    def finish(self) -> str:
        """The replacement text for an unfinished character."""
        return self._decoder.decode(b"", final=True)


def show_token(tokenizer: Tokenizer, token: int) -> str:
    """A token by itself. A part of a character is shown as its bytes, such as <E2 82>, and a case operator by its name."""
    if (name := tokenizer.name_operator(token)) is not None:
        return name
    data = tokenizer.decode_bytes([token], previous=token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"<{data.hex(' ').upper()}>"


def _chances(choice: NextToken) -> Item:
    return {"token": choice.token, "probability": choice.probability, "chance": choice.chance}


def load_players(paths: Sequence[Path], device: str) -> list[Player]:
    """The models of artifacts, checkpoints or run folders, each under a name of its own."""
    found = []
    for path, name in zip(paths, name_models(paths)):
        model = load(path, device)
        model.module.eval()  # stays so: the worker then changes nothing when it switches to evaluation and back
        model.tokenizer  # noqa: B018 (an artifact without one is refused here)
        found.append(Player(name, model))
    return found


def name_models(paths: Iterable[Path]) -> list[str]:
    """Short names: the folder of model.pbk, else the file's. The same name again gets a number."""
    names: list[str] = []
    for path in paths:
        file = path.resolve()
        name = file.parent.name if file.name == "model.pbk" else file.name if file.is_dir() else file.stem
        count = sum(known == name or known.startswith(f"{name} (") for known in names)
        names.append(f"{name} ({count + 1})" if count else name)
    return names
