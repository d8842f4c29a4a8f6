"""Bits by document, by context, and by position in a document."""

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parbank.data.tokenizer import Tokenizer
from parbank.errors import ConfigError
from parbank.eval.methods.base import Method, place_in_document
from parbank.eval.score import Scored
from parbank.files import write_file
from parbank.model import ModelConfig

OPENING_TOKENS = 24  # of a document: enough to know it by
# How matplotlib marks a picture as parbank's, by format: parbank replaces no picture without its mark.
_MARKS: dict[str, dict[str, Any]] = {
    ".png": {"metadata": {"Software": "parbank"}},
    ".svg": {"metadata": {"Creator": "parbank"}},
    ".pdf": {"metadata": {"Creator": "parbank"}},
    ".jpg": {"pil_kwargs": {"comment": b"parbank"}},
}


@dataclass(frozen=True)
class Part:
    """Some tokens of a text, and their cost."""

    first: int
    last: int
    """The range of context or of positions. For a document: its first and last token in the text."""
    tokens: int
    bytes: int
    bits: float
    opening: str = ""
    """The first characters of a document."""

    @property
    def bpb(self) -> float | None:
        """None without bytes: a part with document boundaries only."""
        return self.bits / self.bytes if self.bytes else None


@dataclass(frozen=True)
class Breakdown:
    """Three divisions of one score; each sums to the whole."""

    by_context: list[Part]
    by_place: list[Part]
    by_document: list[Part]

    def as_dict(self) -> dict[str, Any]:
        return {
            name: [asdict(part) | {"bpb": part.bpb} for part in parts]
            for name, parts in (
                ("by_context", self.by_context),
                ("by_place_in_document", self.by_place),
                ("by_document", self.by_document),
            )
        }


def break_down(scored: Scored, tokenizer: Tokenizer, method: Method, model: ModelConfig) -> Breakdown:
    sizes = scored.byte_counts(tokenizer)
    bits = scored.nats.astype(np.float64) / np.log(2)
    contexts = method.find_contexts(scored.tokens, model)
    places = place_in_document(scored.tokens, tokenizer.bos_id)
    return Breakdown(
        by_context=by_octave(contexts, sizes, bits),
        by_place=by_octave(places, sizes, bits),
        by_document=_by_document(scored.tokens, sizes, bits, tokenizer),
    )


def compare_with_plain(scored: Scored, tokenizer: Tokenizer) -> dict[str, float]:
    """For a method that starts from a plain score: the plain score, the gain over it, and the largest loss of a document, all
    in bits per byte. The loss is negative if every document gained. Documents without bytes do not count."""
    assert scored.plain is not None
    sizes = scored.byte_counts(tokenizer).astype(np.float64)
    lost = (scored.nats.astype(np.float64) - scored.plain) / np.log(2)
    starts = find_documents(scored.tokens, tokenizer.bos_id)
    own, bits = np.add.reduceat(sizes, starts), np.add.reduceat(lost, starts)
    plain = float(scored.plain.sum(dtype=np.float64) / np.log(2) / sizes.sum())
    gain = float(-lost.sum() / sizes.sum())
    return {"val_bpb": plain, "gain_bpb": gain, "worst_document_bpb": float((bits[own > 0] / own[own > 0]).max())}


def by_octave(places: np.ndarray, sizes: np.ndarray, bits: np.ndarray) -> list[Part]:
    """Positions 0, 1, 2-3, 4-7 and so on: the value of context falls with its logarithm."""
    octave = np.frexp(places)[1]  # 0 for 0, and n for 2^(n-1) to 2^n - 1
    parts = []
    for number in np.unique(octave):
        chosen = octave == number
        first, last = (0, 0) if number == 0 else (1 << (number - 1), min((1 << number) - 1, int(places.max())))
        parts.append(_part(first, last, sizes[chosen], bits[chosen]))
    return parts


def _by_document(tokens: np.ndarray, sizes: np.ndarray, bits: np.ndarray, tokenizer: Tokenizer) -> list[Part]:
    """A document includes the BOS that closes it: its end is information."""
    starts = find_documents(tokens, tokenizer.bos_id)
    parts = []
    for start, end in zip(starts, [*starts[1:], len(tokens) - 1]):
        opening = tokenizer.decode(tokens[start : min(end + 1, start + OPENING_TOKENS)])
        parts.append(_part(int(start), int(end), sizes[start:end], bits[start:end], " ".join(opening.split())))
    return parts


def find_documents(tokens: np.ndarray, bos_id: int) -> np.ndarray:
    """The first token of every document. Tokens before the first BOS are a document, too."""
    starts = np.flatnonzero(tokens[:-1] == bos_id)
    return starts if len(starts) and starts[0] == 0 else np.concatenate([[0], starts])


def _part(first: int, last: int, sizes: np.ndarray, bits: np.ndarray, opening: str = "") -> Part:
    return Part(int(first), int(last), len(sizes), int(sizes.sum(dtype=np.int64)), float(bits.sum()), opening)


def draw(breakdown: Breakdown, title: str, path: Path) -> None:
    """Draws bpb against context and against position in the document, in the format of `path`'s suffix."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "the picture of --breakdown needs matplotlib, which is not installed; pip install 'parbank[bench]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    _curve(axes, breakdown.by_context, "tokens of context it had", "o-")
    _curve(axes, breakdown.by_place, "place in its document", "s--")
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set(xlabel="token", ylabel="bits per byte, lower is better")
    axes.set_title(title, parse_math=False)  # a file's name may hold a $
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    picture = io.BytesIO()
    suffix = path.suffix.lower()
    figure.savefig(picture, dpi=130, format=suffix[1:], **_MARKS.get(suffix, {}))
    pyplot.close(figure)
    write_file(path, picture.getvalue())


def is_picture(path: Path) -> bool:
    """Whether parbank drew this file."""
    return path.is_file() and path.suffix.lower() in _MARKS and b"parbank" in path.read_bytes()


def _curve(axes: Any, parts: Sequence[Part], label: str, style: str) -> None:
    shown = [part for part in parts if part.bpb is not None]
    axes.plot([(part.first + part.last) / 2 for part in shown], [part.bpb for part in shown], style, label=label)
