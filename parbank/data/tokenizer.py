"""A lossless SentencePiece BPE tokenizer (Kudo and Richardson 2018; Sennrich et al. 2015).

SentencePiece is nearly lossless by itself (byte fallback, identity normalisation, no dummy prefix). It loses only
U+2581, the character it writes for a space. That character is encoded here as its three bytes, and decoding uses our
own table from token to bytes. So the bytes of a token stream can be counted exactly, as bits per byte require.

Other models are read too, such as the published FineWeb model, which puts a space before every document. Their bytes
are counted as exactly; their text is restored as far as the model kept it.

With case operators (parbank.data.case), capitals are tokens of their own, which stand for no byte. The file of such a
tokenizer begins with MARK: SentencePiece, and a parbank that knows no operators, refuse it.

Another kind of tokenizer is added here and nowhere else: the rest of parbank makes one by `train`, `load` and `from_bytes`,
and stores its `model_bytes` without looking at them. `train` chooses the kind by the config, and `from_bytes` by the bytes.
"""

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from parbank.data import case
from parbank.data.case import Restorer
from parbank.errors import DataError

SPACE = "\u2581"
META_TOKENS = 258  # 256 bytes, the unknown token that SentencePiece insists on, and BOS
MIN_VOCAB = 288  # below this there is too little room for merges
MAX_VOCAB = 65536  # tokens are stored as uint16
_FAMILY = b"\x07parbank tokenizer: "  # no protobuf message begins with 7: field 0, of a type that does not exist
MARK = _FAMILY + b"case operators 1\n"
# Bytes of a saved tokenizer, for each token: at least (score 4, text 1, tags and lengths 5), usually, and twice the usual,
# more than any we have seen.
LEAST_BYTES, USUAL_BYTES, MOST_BYTES = 10, 18, 36

# SentencePiece uses these itself (unknown, space, word boundary, end of string) and drops them, or their whole line, from
# training. They are encoded as bytes.
_UNLEARNABLE = (SPACE, "\u2585", "\t", "\0")
# Characters beyond this share of the text become bytes: more bytes a token than with 0.999 or 0.98 (docs/log/cpu.md).
_COVERAGE = 0.995
# A text of so many characters for each token that still has too few pieces repeats itself. Measured on Markdown and Python:
# a vocabulary of 320, 1,024 or 8,192 tokens needs 0.5, 0.8 or 2.8 characters for each token.
_AMPLE_CHARS = 10
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
# Longer texts are encoded in parts, so that one big document spreads over all cores and memory stays flat.
_PART_CHARS = 1 << 16
_BLOCK = 1 << 16  # tokens decoded together: their indices stay in the cache


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer that is trained on the text. Its size is model.vocab_size."""

    case_operators: bool = False
    """Write ASCII capitals as operators before small letters, so that a word has the same tokens in any case. Lossless: an
    operator counts no byte."""

    @property
    def changes(self) -> dict[str, Any]:
        """The settings that are not at their defaults, as manifests and names of folders have them."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}


PLAIN = TokenizerConfig()


@dataclass
class DecodeState:
    """Where the decoding of a document stands, so that it can be decoded in parts. A new state begins a document."""

    previous: int | None = None
    """The last token."""
    case: Restorer = field(default_factory=Restorer)
    """The case operator that is still at work."""


class Tokenizer:
    """Converts text to tokens and back, and counts the bytes of each token.

    `Tokenizer.train(texts, vocab_size)` makes one from strings, `Tokenizer.load(path)` reads a SentencePiece model with a
    BOS token, and a loaded `Model` has its own as `.tokenizer`.

        >>> from parbank.data.tokenizer import Tokenizer
        >>> tokenizer = Tokenizer.train([parbank.__doc__], vocab_size=300)  # any texts
        >>> ids = tokenizer.encode("The sea")
        >>> tokenizer.decode(ids), int(tokenizer.byte_lengths[ids].sum())
        ('The sea', 7)
    """

    model_bytes: bytes
    """The SentencePiece model, after MARK if there are case operators. `from_bytes` reads it."""
    vocab_size: int
    bos_id: int
    fingerprint: str
    """sha256 of the model bytes, in hex."""
    byte_lengths: np.ndarray
    """int64 (vocab_size,): the bytes each token stands for; BOS and other control tokens 0."""
    adds_prefix: bool
    """Whether it puts a space before each document, as the published FineWeb model does. That space counts no byte."""
    byte_tokens: np.ndarray | None
    """uint16 (256,): the token of each single byte. None where a byte has none."""
    config: TokenizerConfig
    """The settings it was trained with."""
    case_operators: bool
    """Whether capitals are operators and small letters. Then the case of a token's letters depends on the tokens before."""

    def __init__(self, model: bytes) -> None:
        self.model_bytes = bytes(model)
        self.case_operators = self.model_bytes.startswith(MARK)
        self.config = TokenizerConfig(case_operators=self.case_operators)
        self._sp = _load(_strip_mark(self.model_bytes))
        self.vocab_size = self._sp.vocab_size()
        self.bos_id = self._sp.bos_id()
        self.fingerprint = hashlib.sha256(self.model_bytes).hexdigest()
        if self.vocab_size > MAX_VOCAB:
            raise DataError(
                f"the tokenizer has {self.vocab_size} tokens; shards hold 16 bits a token, so at most {MAX_VOCAB}"
            )
        if self.bos_id < 0:
            raise DataError("the tokenizer has no BOS token, which separates documents; train it with bos_id=1")
        table = [_piece_bytes(self._sp, token) for token in range(self.vocab_size)]
        self._operators = _find_operators(self._sp) if self.case_operators else {}
        for token in self._operators:
            table[token] = b""
        self.byte_lengths = np.array([len(piece) for piece in table], dtype=np.int64)
        self._pieces = np.frombuffer(b"".join(table), dtype=np.uint8)
        self._piece_ends = np.cumsum(self.byte_lengths)
        self._boundary = np.array([self._is_control(token) for token in range(self.vocab_size)])
        self._spaced = np.array([piece.startswith(b" ") for piece in table])
        self.adds_prefix = _adds_prefix(self._sp)
        every = self._byte_ids(bytes(range(256)))
        self.byte_tokens = None if every is None else np.array(every, dtype=np.uint16)
        # Characters that are encoded as their bytes, because SentencePiece gives them another meaning.
        literal = (SPACE, *(case.OPERATORS if self.case_operators else ()))
        self._literals = {sign: np.array(self._byte_ids(sign.encode()) or (), dtype=np.uint16) for sign in literal}
        if self.case_operators:
            self._prepare_operators()
        # Newer SentencePiece returns arrays; lists of Python integers take longer to convert than to make.
        self._kind: dict[str, Any] = {"return_type": "numpy"} if hasattr(self._sp, "EncodeAsNumpy") else {}

    def _prepare_operators(self) -> None:
        if self.adds_prefix or self.byte_tokens is None:
            raise DataError(
                "the tokenizer has case operators, and adds a space before documents or lacks byte tokens; train it by parbank"
            )
        self._kinds = np.where(self._boundary, case.STOP, 0).astype(np.uint8)
        for token, sign in self._operators.items():
            self._kinds[token] = case.ONE if sign == case.CAPITAL else case.ALL

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, config: TokenizerConfig = PLAIN) -> "Tokenizer":
        """Learns exactly `vocab_size` tokens from the texts: the same texts in the same order give the same model."""
        check_vocab(vocab_size)
        operators = case.OPERATORS if config.case_operators else ()
        parts = [part for text in texts for part in _cut(case.lower(text) if config.case_operators else text)]
        alphabet = _alphabet(parts, limit=(vocab_size - META_TOKENS - len(operators)) // 2, without=operators)
        if not alphabet:
            raise DataError("there is no text to train a tokenizer on; give files that hold some")
        # Characters outside the alphabet end a line for the trainer. Newlines stay inside: they are part of merges.
        allowed = re.compile(f"[{re.escape(alphabet)}]+")
        lines = (line for part in parts for line in allowed.findall(part))
        model = _train(lines, vocab_size, operators, size=sum(map(len, parts)))
        return cls(MARK + model if config.case_operators else model)

    @classmethod
    def from_bytes(cls, model: bytes) -> "Tokenizer":
        return cls(model)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        try:
            return cls.from_bytes(Path(path).read_bytes())
        except OSError as error:
            raise DataError(f"cannot read the tokenizer {path}: {error.strerror}") from error
        except DataError as error:
            raise DataError(f"{path}: {error}") from error

    def encode(self, text: str, *, continued: bool = False) -> np.ndarray:
        """The tokens of a text as uint16, without BOS.

        `continued`: the tokens of any other text may follow, and both texts come back. Only case operators differ: a text
        that ends in a word of capitals takes one more.
        """
        return self.encode_batch([text], continued=continued)[0]

    def encode_batch(self, texts: Sequence[str], *, threads: int = 1, continued: bool = False) -> list[np.ndarray]:
        """encode() of many texts at once, on several threads, without Python's lock."""
        plans = [self._plan(text, continued) for text in texts]
        parts = [part for plan in plans for part in plan if isinstance(part, str)]
        try:
            encoded = iter(self._sp.encode(parts, num_threads=threads, **self._kind) if parts else [])
        except (UnicodeEncodeError, TypeError):  # which of them depends on SentencePiece's version
            _refuse_surrogates(texts)
            raise
        found = [
            [np.asarray(next(encoded) if isinstance(part, str) else part, np.uint16) for part in plan] for plan in plans
        ]
        return [pieces[0] if len(pieces) == 1 else _join(pieces) for pieces in found]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of the tokens. BOS is dropped; bytes that are not UTF-8 (a model can write them) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(
        self, ids: Iterable[int] | np.ndarray, *, previous: int | None = None, state: "DecodeState | None" = None
    ) -> bytes:
        """The exact bytes of the tokens. `previous` is the token before them; without it they begin a document. A document
        is decoded in parts by one `state`, which each part changes."""
        state = state or DecodeState()
        if previous is not None:
            self.decode_bytes([previous], state=state)
        tokens = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64).reshape(-1)
        if not len(tokens):
            return b""
        if not (int(tokens.min()) >= 0 and int(tokens.max()) < self.vocab_size):
            raise DataError(
                f"tokens must be 0 to {self.vocab_size - 1}, got {int(tokens.min())} to {int(tokens.max())}"
            )
        before = np.append(self.bos_id if state.previous is None else state.previous, tokens[:-1])
        state.previous = int(tokens[-1])
        blocks = (slice(start, start + _BLOCK) for start in range(0, len(tokens), _BLOCK))
        return b"".join(self._decode_block(tokens[block], before[block], state.case) for block in blocks)

    def count_bytes(self, targets: np.ndarray, previous: np.ndarray) -> np.ndarray:
        """int64, the shape of `targets`: the bytes of each target token, given the token before it."""
        lengths = self.byte_lengths[targets]
        if self.adds_prefix:
            lengths = lengths - self._dummy_spaces(targets, previous)
        return lengths

    def name_operator(self, token: int) -> str | None:
        """A name to show for a case operator, which has no text of its own. None for any other token."""
        return case.NAMES[case.OPERATORS.index(self._operators[token])] if token in self._operators else None

    def _decode_block(self, tokens: np.ndarray, previous: np.ndarray, restorer: Restorer) -> bytes:
        """The last `count_bytes` bytes of each token's piece, concatenated: the counted bytes are the decoded bytes. Case
        operators change letters only, one byte for one."""
        lengths = self.count_bytes(tokens, previous)
        ends = np.cumsum(lengths)
        begins = self._piece_ends[tokens] - ends  # of each token in the pieces, less its place in the text
        places = np.repeat(begins, lengths) + np.arange(ends[-1])
        data = self._pieces[places]
        if self.case_operators:
            kinds = self._kinds[tokens]
            found = np.flatnonzero(kinds)
            restorer.apply(data, ends[found], kinds[found])
        return data.tobytes()

    def _dummy_spaces(self, targets: np.ndarray, previous: np.ndarray) -> np.ndarray:
        """Marks tokens that begin with the space that the model puts before a document. It is no byte of the text."""
        if not self.adds_prefix:
            return np.zeros(np.shape(targets), dtype=bool)
        return self._spaced[targets] & self._boundary[previous]

    def _plan(self, text: str, continued: bool) -> list[str | np.ndarray]:
        """The parts in which a text is encoded; literals are parts by themselves, as tokens. Text for another program's
        model stays whole."""
        if text in self._literals:
            return [self._literals[text]]
        if not len(self._literals[SPACE]) or self.adds_prefix:
            return [text]
        literal = any(sign in text for sign in self._literals)
        if not (literal or self.case_operators) and len(text) <= _PART_CHARS:
            return [text]
        pieces = re.split(f"([{''.join(self._literals)}])", text) if literal else [text]
        plan: list[str | np.ndarray] = []
        for number, piece in enumerate(pieces):
            if piece in self._literals:
                plan.append(self._literals[piece])
            elif self.case_operators:  # only the last piece may be continued: a literal is no letter
                plan += _cut(case.lower(piece, continued=continued and number == len(pieces) - 1))
            else:
                plan += _cut(piece)
        return plan

    def _is_control(self, token: int) -> bool:
        return self._sp.is_control(token) or self._sp.is_unknown(token) or self._sp.is_unused(token)

    def _byte_ids(self, data: bytes) -> tuple[int, ...] | None:
        ids = tuple(self._sp.piece_to_id(f"<0x{byte:02X}>") for byte in data)
        return ids if all(self._sp.is_byte(token) for token in ids) else None


def check_vocab(vocab_size: int) -> None:
    """Refuses a vocabulary size that our tokenizer cannot have, before anything is read."""
    if not MIN_VOCAB <= vocab_size <= MAX_VOCAB:
        raise DataError(
            f"a vocabulary of {vocab_size} tokens cannot be trained; choose {MIN_VOCAB} to {MAX_VOCAB} "
            f"({META_TOKENS} are taken by bytes and control tokens)"
        )


def _strip_mark(model: bytes) -> bytes:
    """The SentencePiece model of a tokenizer's file."""
    if model.startswith(_FAMILY) and not model.startswith(MARK):
        kind = model[len(_FAMILY) :].partition(b"\n")[0][:40].decode("ascii", errors="replace")
        raise DataError(
            f"this parbank does not know tokenizers with {kind!a}; use the parbank that made it, or a newer one"
        )
    return model.removeprefix(MARK)


def _find_operators(processor: Any) -> dict[int, str]:
    """The tokens of the case operators."""
    found = {processor.piece_to_id(sign): sign for sign in case.OPERATORS}
    kinds = (processor.is_unknown, processor.is_control, processor.is_unused, processor.is_byte)
    if len(found) < len(case.OPERATORS) or any(is_kind(token) for token in found for is_kind in kinds):
        raise DataError("the tokenizer says that it has case operators, but lacks their tokens; train it again")
    return found


def _load(model: bytes) -> Any:
    if _count_pieces(model) > MAX_VOCAB:
        raise DataError(f"the tokenizer has too many tokens; shards hold 16 bits a token, so at most {MAX_VOCAB}")
    processor = sentencepiece.SentencePieceProcessor()
    try:
        loaded = bool(model) and processor.LoadFromSerializedProto(model) is not False and processor.vocab_size() > 0
    except (RuntimeError, ValueError, TypeError, OSError) as error:
        raise DataError(f"not a SentencePiece model ({len(model)} bytes): {error}") from error
    if not loaded:
        raise DataError(
            f"not a SentencePiece model ({len(model)} bytes); give the .model file the shards were made with"
        )
    return processor


def _count_pieces(model: bytes) -> int:
    """The tokens of a model, counted before SentencePiece takes some 200 bytes for each: a megabyte can name half a million.
    Stops where the bytes are no protobuf message (SentencePiece then says so), and above the largest vocabulary."""
    count = place = 0
    try:
        while place < len(model) and count <= MAX_VOCAB:
            tag, place = _read_varint(model, place)
            if tag & 7 == 2:  # bytes with their length before them; field 1 is a piece
                size, place = _read_varint(model, place)
                place += size
                count += tag >> 3 == 1
            elif tag & 7 == 0:
                _, place = _read_varint(model, place)
            else:
                place += {1: 8, 5: 4}[tag & 7]
    except (IndexError, KeyError, ValueError):
        pass
    return count


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    """A number of 7 bits a byte, the lowest first, and the place after it. Protobuf allows it 10 bytes."""
    value = 0
    for number in range(10):
        byte = data[place + number]
        value |= (byte & 0x7F) << 7 * number
        if byte < 0x80:
            return value, place + number + 1
    raise ValueError("a number does not end")


def _piece_bytes(processor: Any, token: int) -> bytes:
    if processor.is_control(token) or processor.is_unknown(token) or processor.is_unused(token):
        return b""
    try:
        piece = processor.id_to_piece(token)
    except UnicodeDecodeError:
        raise DataError(
            f"piece {token} of the tokenizer is not UTF-8; give the .model file as it was trained"
        ) from None
    if processor.is_byte(token):
        if not _BYTE_PIECE.fullmatch(piece):
            raise DataError(f"piece {token} of the tokenizer is a byte by its type, but its name is {piece!a}")
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE, " ").encode()


def _adds_prefix(processor: Any) -> bool:
    """Whether the model puts a space before every text, found by encoding one."""
    joined = "".join(processor.encode("a", out_type=str))
    if joined.endswith(SPACE) and not joined.startswith(SPACE):
        raise DataError(
            "the tokenizer adds a space after every document (treat_whitespace_as_suffix with add_dummy_prefix), "
            "so bytes cannot be counted; train it with add_dummy_prefix=false"
        )
    return joined.startswith(SPACE)


def _cut(text: str) -> Iterator[str]:
    """The text in parts of at most _PART_CHARS, each ending after a line end if there is one."""
    start = 0
    while len(text) - start > _PART_CHARS:
        line_end = text.rfind("\n", start + _PART_CHARS // 2, start + _PART_CHARS)
        end = line_end + 1 if line_end >= 0 else start + _PART_CHARS
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _refuse_surrogates(texts: Sequence[str]) -> None:
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            sign = text[error.start]
            # Python writes a byte of an argument, or of standard input, that is not UTF-8 as one of these signs.
            if "\udc80" <= sign <= "\udcff":
                fault = f"the byte 0x{ord(sign) - 0xDC00:02x}, which is not UTF-8; convert it, or remove it"
            else:
                fault = f"{sign!a}, half of a surrogate pair, which has no bytes; remove it"
            raise DataError(f"the text holds {fault}") from None


def _join(pieces: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint16)


def _alphabet(parts: list[str], *, limit: int, without: Sequence[str] = ()) -> str:
    """The most frequent characters, up to _COVERAGE of the text and at most `limit`, so that merges get the other half."""
    counts = np.zeros(0x110000, dtype=np.int64)
    for part in parts:
        codes = np.frombuffer(part.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
        found = np.bincount(codes)
        counts[: len(found)] += found
    for sign in (*_UNLEARNABLE, *without):
        counts[ord(sign)] = 0
    counts[0xD800:0xE000] = 0
    # Stable: equal counts go by code point, so that the model is reproducible.
    order = np.argsort(-counts, kind="stable")
    enough = int(np.searchsorted(np.cumsum(counts[order]), _COVERAGE * counts.sum())) + 1
    chosen = order[: min(enough, limit)]
    return "".join(chr(code) for code in sorted(chosen[counts[chosen] > 0].tolist()))


def _train(lines: Iterator[str], vocab_size: int, operators: Sequence[str], *, size: int) -> bytes:
    """The model of `vocab_size` tokens. `size` counts the characters of the text, for an error that says what is wrong."""
    model = io.BytesIO()
    symbols: dict[str, Any] = {"user_defined_symbols": list(operators)} if operators else {}
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            # Pieces may mix letters and signs ("),", ".\n\n", "__init__"): fewer tokens (docs/log/cpu.md).
            split_by_unicode_script=False,
            # SentencePiece's 16 is too short for deep indentation and ruled lines.
            max_sentencepiece_length=32,
            character_coverage=1.0,  # the alphabet is already cut, further than SentencePiece would allow (0.98)
            unk_id=0,
            bos_id=1,
            eos_id=-1,
            pad_id=-1,
            max_sentence_length=8 * _PART_CHARS,  # in bytes; a longer one would be dropped silently
            input_sentence_size=0,  # no sampling of its own
            num_threads=1,
            minloglevel=2,
            **symbols,
        )
    except RuntimeError as error:
        if "KeyboardInterrupt" in str(error):  # of `lines`, which SentencePiece wraps
            raise KeyboardInterrupt from None
        found = re.search(r"value <= (\d+)", str(error))
        if not found:
            raise DataError(f"SentencePiece cannot train {vocab_size} tokens on this text: {error}") from error
        largest = int(found.group(1))
        more = "give more text that does not repeat itself"
        remedy = f"ask for at most {largest} tokens, or {more}" if largest >= MIN_VOCAB else more
        wrong = "repeats itself too much" if size >= _AMPLE_CHARS * vocab_size else "is too short"
        raise DataError(
            f"the text {wrong} for a vocabulary of {vocab_size} tokens ({size:,} characters); {remedy}"
        ) from None
    return model.getvalue()
