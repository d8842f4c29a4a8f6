"""Integers and scales in few bytes: asymmetric numeral systems (Duda 2013) with models fitted to each tensor.

The weights of a tensor are divided into classes by row and column (division.py), and each class has its own model
(models.py). That beats the entropy of the tensor's histogram, which treats all weights alike.

One stack coder (`constriction`, Bamler 2022) holds a whole stream. From garbage it reads garbage, but always within
the requested alphabet, and each requested number is bounded by earlier ones. So the only possible failure is a coder
that is not empty at the end.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from parbank.errors import ArtifactError
from parbank.quant.coders import models
from parbank.quant.coders.base import FREE_SCALES, MAX_WEIGHTS_PER_BYTE, Coder, Integers
from parbank.quant.coders.division import CODES, divide, find_classes
from parbank.quant.coders.models import Array, SymbolRun, describe_numbers, flat_piece, flat_weights, piece_bits

Halves = npt.NDArray[np.float16]
Codes = npt.NDArray[np.uint8]

# Numbers that a stream may hold in any case; more need a byte for every MAX_WEIGHTS_PER_BYTE. The writer keeps to it: a
# stream under an eighth of a bit a weight is written again with models that cannot go so low (models.py).
_FREE_EXPANSION = FREE_SCALES
_SCALE_LIMIT = 0x7C00  # float16 patterns below it are finite and not negative
_FINE = 6  # lowest bits of a scale, sent as they are: below 1/16 of an octave there is nothing to model
_COARSE = _SCALE_LIMIT >> _FINE
_MAX_DISTINCT = 512  # scales on a grid: more distinct values than this are no grid
_THREADS = 4  # threads that divide matrices: half of the work holds Python's lock, so more threads gain nothing
# The last number of a stream. An empty coder goes on to return the first symbol of any alphabet: without a mark at the end, a
# reader would not notice a table that claims more numbers than were written.
_END, _END_RANGE = 2748, 4096

Pull = Callable[[Array, int], npt.NDArray[np.int32]]  # weights, count -> symbols
_CHUNK = 1 << 18  # symbols that are read at a time: a symbol takes 4 bytes until it is stored in 1 or 2


def encode_tensors(tensors: Sequence[tuple[Integers, int]]) -> bytes:
    """Matrices of integers within -q..q as one stream that stays within the limits of a reader."""
    count = sum(values.size for values, _ in tensors)
    with ThreadPoolExecutor(_THREADS) as pool:
        for only_decay in (False, True):
            described = pool.map(functools.partial(_describe, only_decay=only_decay), *zip(*tensors))
            stream = _push([piece for pieces in described for piece in pieces])
            if _may_expand(len(stream), count):
                break
    return stream


def decode_tensors(
    stream: bytes, shapes: Sequence[tuple[int, int, int]], *, source: str
) -> list[tuple[Integers, float]]:
    """Undoes `encode_tensors` for (rows, cols, q) of each, with the bits each one took."""
    _check_expansion(stream, sum(rows * cols for rows, cols, _ in shapes), source)
    found: list[tuple[Integers, float]] = []
    with _popping(stream, source) as (pull, left):
        for rows, cols, q in shapes:
            before = left()
            values = _read_tensor(pull, rows, cols, q)
            found.append((values, float(before - left())))
    return found


ANS = Coder(name="ans", tag=3, encode=encode_tensors, decode=decode_tensors)


def coded_bits(values: Integers, q: int | None = None, *, quick: bool = False) -> float:
    """The bits that `encode_tensors` takes for one matrix (2-D), including the description of the models, without coding
    it.

    The range defaults to the largest value. Exact except for the coder's own rounding. `quick` takes less time and is a
    little too high, since classes are not refined.
    """
    if not values.size:
        return 0.0
    q = q or max(int(np.abs(values.astype(np.int16)).max()), 1)
    return divide(values, q, refine=not quick).bits


def encode_scales(tensors: Sequence[Halves]) -> bytes | None:
    """The scales of each tensor as one stream: by index in the list of distinct values if there are few, as on the
    solver's log grid; otherwise the upper bits under a model of each tensor, and the lower bits raw."""
    patterns = [scales.ravel().view(np.uint16).astype(np.int64) for scales in tensors]
    distinct = np.unique(np.concatenate(patterns)) if patterns else np.array([], np.int64)
    plans = [[*flat_piece(0, 2), *(piece for p in patterns for piece in _describe_fine(p))]]
    if 0 < len(distinct) <= _MAX_DISTINCT:
        listed = [*flat_piece(1, 2), *flat_piece(len(distinct) - 1, _MAX_DISTINCT)]
        listed.append(SymbolRun(distinct, flat_weights(_SCALE_LIMIT)))
        places = (np.searchsorted(distinct, p) for p in patterns)
        plans.append([*listed, *(piece for p in places for piece in describe_numbers(p, len(distinct)))])
    stream = _push(min(plans, key=piece_bits))
    return stream if _may_expand(len(stream), sum(p.size for p in patterns)) else None


def decode_scales(stream: bytes, counts: Sequence[int], *, source: str) -> list[tuple[Halves, float]]:
    """Undoes `encode_scales`, given how many each tensor has, with the bits each one took."""
    _check_expansion(stream, sum(counts), source)
    found: list[tuple[Halves, float]] = []
    with _popping(stream, source) as (pull, left):
        listed = _pull_flat(pull, 2)
        distinct = np.zeros(0, np.uint16)
        if listed:
            distinct = pull(flat_weights(_SCALE_LIMIT), 1 + _pull_flat(pull, _MAX_DISTINCT)).astype(np.uint16)
        for count in counts:
            before = left()
            if listed:
                patterns = distinct[_read_numbers(pull, count, len(distinct), np.uint16)]
            else:
                coarse = _read_numbers(pull, count, _COARSE, np.uint16)
                patterns = coarse << _FINE | _read_numbers(pull, count, 1 << _FINE, np.uint16)
            found.append((patterns.view(np.float16), float(before - left())))
    return found


def _may_expand(packed: int, count: int) -> bool:
    return count <= max(_FREE_EXPANSION, MAX_WEIGHTS_PER_BYTE * packed)


def _describe(values: Integers, q: int, only_decay: bool) -> list[SymbolRun]:
    """One matrix in pieces, in the order of the reader."""
    found = divide(values, q, only_decay=only_decay)
    rows, cols = found.rows, found.cols
    classes = find_classes(rows, cols).astype(np.uint8)[rows[:, None] + cols[None, :]]
    symbols = (values.astype(np.int16) + q).astype(np.uint8)
    return [*found.pieces, *(SymbolRun(symbols[classes == k], model) for k, model in enumerate(found.weights))]


def _read_tensor(pull: Pull, rows: int, cols: int, q: int) -> Integers:
    n = 2 * q + 1
    row_codes, col_codes = _read_codes(pull, rows), _read_codes(pull, cols)
    classes = find_classes(row_codes, col_codes)
    count = int(classes.max()) + 1
    weights = [_read_model(pull, n, q) for _ in range(count)]
    if count == 1:
        return _pull_many(pull, weights[0], rows * cols, -q, np.int8).reshape(rows, cols)
    values, where = np.empty(rows * cols, np.int8), _place_classes(classes, row_codes, col_codes)
    for index, model in enumerate(weights):
        for start in range(0, values.size, _CHUNK):
            here = slice(start, start + _CHUNK)
            mask = where[here] == index
            values[here][mask] = (pull(model, int(np.count_nonzero(mask))) - q).astype(np.int8)
    return values.reshape(rows, cols)


def _place_classes(classes: Array, row_codes: Codes, col_codes: Codes) -> npt.NDArray[np.uint8]:
    """The class of every weight, row by row."""
    small = classes.astype(np.uint8)
    where = np.empty((len(row_codes), len(col_codes)), np.uint8)
    step = max(_CHUNK // len(col_codes), 1)
    for top in range(0, len(row_codes), step):
        for left in range(0, len(col_codes), _CHUNK):
            sums = row_codes[top : top + step, None] + col_codes[None, left : left + _CHUNK]
            where[top : top + step, left : left + _CHUNK] = small[sums]
    return where.reshape(-1)


def _read_codes(pull: Pull, count: int) -> Codes:
    return _read_numbers(pull, count, CODES, np.uint8) if _pull_flat(pull, 2) else np.zeros(count, np.uint8)


def _read_numbers(pull: Pull, count: int, limit: int, dtype: Any) -> npt.NDArray[Any]:
    """`count` numbers below `limit`, which `dtype` can hold."""
    if not count:
        return np.zeros(0, dtype)
    low = _pull_flat(pull, limit)
    n = 1 + _pull_flat(pull, limit - low)
    if n == 1:
        return np.full(count, low, dtype)
    centre = _pull_flat(pull, n)
    return _pull_many(pull, _read_model(pull, n, centre), count, low, dtype)


def _pull_many(pull: Pull, weights: Array, count: int, low: int, dtype: Any) -> npt.NDArray[Any]:
    """The next symbols plus `low`, in little more memory than the result takes."""
    found = np.empty(count, dtype)
    for start in range(0, count, _CHUNK):
        found[start : start + _CHUNK] = pull(weights, min(_CHUNK, count - start)) + low
    return found


def _describe_fine(patterns: Array) -> list[SymbolRun]:
    coarse, fine = patterns >> _FINE, patterns & (1 << _FINE) - 1
    return [*describe_numbers(coarse, _COARSE), *describe_numbers(fine, 1 << _FINE)]


def _read_model(pull: Pull, n: int, centre: int) -> Array:
    kind = _pull_flat(pull, models.KINDS)
    if kind == models.DECAY:
        a, b = (_pull_flat(pull, len(models.SHRINKS)) for _ in range(2))
        return models.decay_weights(a, b, centre, n)
    if kind == models.EVEN:
        return models.even_weights(_read_levels(pull, 1 + max(centre, n - 1 - centre)), centre, n)
    return models.level_weights(_read_levels(pull, n))


def _read_levels(pull: Pull, count: int) -> Array:
    first = _pull_flat(pull, models.LEVELS)
    if count == 1:
        return np.array([first])
    a = _pull_flat(pull, len(models.SHRINKS))
    steps = pull(models.step_weights(a), count - 1).astype(np.int64) - (models.LEVELS - 1)
    return np.clip(np.cumsum(np.concatenate([[first], steps])), 0, models.LEVELS - 1)  # a writer never needs the clip


def _pull_flat(pull: Pull, n: int) -> int:
    return int(pull(flat_weights(n), 1)[0]) if n > 1 else 0


def _push(pieces: list[SymbolRun]) -> bytes:
    """The stream: the last piece goes onto the stack first, so that the reader finds the first one on top."""
    stack, model = _load()
    coder = stack.AnsCoder()
    for piece in reversed([*pieces, *flat_piece(_END, _END_RANGE)]):
        if piece.symbols.size:
            coder.encode_reverse(piece.symbols.astype(np.int32), model(piece.weights))
    return coder.get_compressed().astype("<u4").tobytes()


@contextmanager
def _popping(stream: bytes, source: str) -> Iterator[tuple[Pull, Callable[[], int]]]:
    """Opens a stream. Returns a function that pops symbols, and a function that counts the remaining bits."""
    stack, model = _load()
    if len(stream) % 4:
        raise ArtifactError.damaged(source, f"its coded data is {len(stream):,} bytes, not whole words of 4")

    def pull(weights: Array, count: int) -> npt.NDArray[np.int32]:
        if not count:
            return np.zeros(0, np.int32)
        symbols: npt.NDArray[np.int32] = coder.decode(model(weights), count)
        return symbols

    try:
        coder = stack.AnsCoder(np.frombuffer(stream, "<u4").astype(np.uint32))
        yield pull, coder.num_valid_bits
        ended = _pull_flat(pull, _END_RANGE) == _END and coder.is_empty()
    except ArtifactError:
        raise
    except BaseException as error:
        # None is known to come from any input (a last word of zero is a ValueError); a panic of the library's is no
        # Exception to Python and would end the process.
        if isinstance(error, ValueError) or type(error).__name__ == "PanicException":
            raise ArtifactError.damaged(source, "its coded data is broken") from None
        raise
    if not ended:
        raise ArtifactError.damaged(source, "its coded data does not end where it should")


def _load() -> tuple[Any, Callable[[Array], Any]]:
    try:
        from constriction import stream
    except ImportError as error:
        raise ArtifactError(
            f"weights are coded by the package constriction, which cannot be imported ({error}): pip install constriction"
        ) from error

    def model(weights: Array) -> Any:
        # The library makes frequencies of floats as 1 + floor(w * (2^24 - n) / sum(w)), by cumulative sums. Ours are
        # whole and already sum to 2^24 - n: the factor is exactly 1, no rounding happens, the frequencies are w + 1.
        return stream.model.Categorical(weights.astype(np.float64), perfect=False)

    return stream.stack, model


def _check_expansion(stream: bytes, count: int, source: str) -> None:
    if not _may_expand(len(stream), count):
        raise ArtifactError.damaged(source, f"it claims to hold {count:,} numbers in {len(stream):,} bytes")
