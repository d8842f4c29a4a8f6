"""Windows over a token set, in an order fixed by its name and the seed. The global batch is the same for any number of
ranks.

An order (orders.py) says which tokens a window holds, and in which permutation epoch e visits the windows. An *entry* is
a position in that endless visiting order. A step takes the next `batch_sequences` entries, distributed by micro-batch,
then rank, then row. Ranks and micro-batches only divide the same list differently.
"""

import hashlib
from typing import Any

import numpy as np

from parbank.config import choose, require
from parbank.data.orders import ORDERS
from parbank.data.windows import Tokens
from parbank.errors import ConfigError, DataError

# 64 probes of 16 tokens: enough that two data sets of one length cannot agree by chance, with few enough page faults to open
# a data set on a cold disk at once. It is a sample: Dataset.fingerprint hashes everything.
_PROBES, _PROBE_TOKENS = 64, 16

_IDENTITY = {
    "seed": "the seed",
    "order": "the order of the windows",
    "sequence_length": "the sequence length",
    "tokens": "the number of training tokens",
    "fingerprint": "the fingerprint of the training tokens",
}


class BatchStream:
    """One rank's micro-batches, one per call of `fill`.

    The state is the number of entries used by all ranks together, so it is equal on every rank, and a checkpoint of
    two ranks resumes on one. Not thread-safe: while a Prefetcher holds a stream, only the Prefetcher may use it.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        sequence_length: int,
        batch_sequences: int,
        micro_sequences: int,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        order: str = "shuffled",
        bos_id: int = 1,
    ) -> None:
        """`bos_id` opens every document, which an order may keep whole."""
        require(sequence_length >= 1, f"the sequence length must be 1 or more, got {sequence_length}")
        require(seed >= 0, f"the seed must be 0 or more, got {seed}")
        require(0 <= rank < world, f"rank must lie in 0..{world - 1} for a world of {world}, got {rank}")
        _check_split(batch_sequences, micro_sequences, world)
        if len(tokens) < sequence_length + 1:
            raise DataError(
                f"{len(tokens)} tokens are too few for one sequence: a sequence length of {sequence_length} needs at "
                f"least {sequence_length + 1}; give more text, or set a sequence length of at most {len(tokens) - 1}"
            )
        self.sequence_length = sequence_length
        self.batch_sequences = batch_sequences
        self.micro_sequences = micro_sequences
        self.rank = rank
        self.world = world
        self.seed = seed
        self.order = order
        self.accumulation = batch_sequences // (micro_sequences * world)
        """Micro-batches a rank runs per step."""
        visit = choose(ORDERS, order, "the order of the windows")
        self._windows, self._permute = visit(tokens, sequence_length, bos_id)
        self._count = len(tokens)
        self._fingerprint = _sample_hash(tokens)
        self._entry = 0  # the first entry no rank has taken yet
        self._entry_in_step = 0  # how many of the current step's entries are taken
        self._epoch = -1  # the epoch of `_order`; -1: none yet
        self._order = np.empty(0, dtype=np.int64)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape `fill` writes: one token more than the sequence length, for the last target."""
        return self.micro_sequences, self.sequence_length + 1

    def fill(self, out: np.ndarray) -> None:
        """Writes this rank's next micro-batch into `out` (uint16, `shape`); inputs are `[:, :-1]`, targets `[:, 1:]`.

        The stream advances only after a complete write: after an error it is still at the same batch.
        """
        if out.shape != self.shape or out.dtype != np.uint16:
            raise DataError(f"fill needs a uint16 buffer of shape {self.shape}, got {out.dtype} of shape {out.shape}")
        first = self._entry + self.rank * self.micro_sequences
        for row in range(self.micro_sequences):
            self._windows.read(self._window_of(first + row), out[row])
        taken = self.micro_sequences * self.world
        self._entry += taken
        self._entry_in_step = (self._entry_in_step + taken) % self.batch_sequences

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream, and the data it belongs to: plain numbers and text, equal on every rank."""
        return {
            "entry": self._entry,
            "entry_in_step": self._entry_in_step,
            "batch_sequences": self.batch_sequences,
            **self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moves to a saved position. A state of another stream is refused, and the stream then keeps its position."""
        _check_form(state)
        state = {"order": "shuffled", **state}  # the only order there was when states did not name it
        for name, here in self._identity().items():
            if state[name] != here:
                raise DataError(
                    f"the saved data position belongs to another run: {_IDENTITY[name]} was {state[name]}, here it is "
                    f"{here}; resume with the data and settings it was saved with, or start a new run"
                )
        taken, group = state["entry_in_step"], self.micro_sequences * self.world
        if taken and (taken % group or state["batch_sequences"] != self.batch_sequences):
            raise DataError(
                f"the data position was saved inside a step, {taken} of its {state['batch_sequences']} sequences in, "
                f"and world={self.world} x micro={self.micro_sequences} in a batch of {self.batch_sequences} cannot go "
                f"on from there; resume with the ranks, micro-batch and batch it was saved with, or from a checkpoint "
                f"taken between steps"
            )
        self._entry, self._entry_in_step = state["entry"], taken

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "order": self.order,
            "sequence_length": self.sequence_length,
            "tokens": self._count,
            "fingerprint": self._fingerprint,
        }

    def _window_of(self, entry: int) -> int:
        """The window visited at an entry. An epoch's entries and its windows are the same range of numbers, since both
        count windows from the beginning. So the epoch of window number `entry` is that of the entry."""
        epoch = self._windows.epoch_of(entry)
        first = self._windows.first_of(epoch)
        if epoch != self._epoch:
            count = self._windows.first_of(epoch + 1) - first
            self._order, self._epoch = self._permute(count, self.seed, epoch), epoch
        return first + int(self._order[entry - first])


def _sample_hash(tokens: Tokens) -> str:
    count = min(_PROBE_TOKENS, len(tokens))
    room = len(tokens) - count
    digest = hashlib.sha256()
    for probe in range(_PROBES):
        piece = tokens.read(room * probe // (_PROBES - 1), count)
        digest.update(np.ascontiguousarray(piece, dtype="<u2").tobytes())
    return digest.hexdigest()[:16]


def _check_split(batch: int, micro: int, world: int) -> None:
    require(batch >= 1, f"the batch must hold 1 sequence or more, got {batch}")
    require(micro >= 1, f"the micro-batch must hold 1 sequence or more, got {micro}")
    group = micro * world
    if batch % group == 0:
        return
    above = _ceil_div(batch, group) * group
    fitting = [above] if above == group else [above - group, above]
    remedy = f"set the batch to {' or '.join(map(str, fitting))} sequences"
    if batch % world == 0:  # then some micro-batch fits: the largest within the limit
        share = batch // world
        smaller = max(size for size in range(1, min(micro, share) + 1) if share % size == 0)
        remedy += f", or the micro-batch to {smaller}"
    else:
        remedy += f", or run on a number of ranks that divides {batch}"
    raise ConfigError(
        f"a batch of {batch} sequences cannot be split evenly: world={world} x micro={micro} takes {group} at a "
        f"time; {remedy}"
    )


def _check_form(state: Any) -> None:
    """Refuses a value that is not a stream's state, before anything is compared with it."""
    numbers = ("entry", "entry_in_step", "batch_sequences", "seed", "sequence_length", "tokens")
    names = (*numbers, "fingerprint")
    missing = [name for name in names if name not in state] if isinstance(state, dict) else list(names)
    if missing:
        problem = f"it lacks {', '.join(missing)}"
    elif any(type(state[name]) is not int or state[name] < 0 for name in numbers):
        problem = f"its {', '.join(numbers)} must be whole numbers of 0 or more"
    elif state["entry_in_step"] > state["entry"]:
        problem = f"its entry_in_step ({state['entry_in_step']}) is larger than its entry ({state['entry']})"
    else:
        return
    raise DataError(f"this is not a data position ({problem}), got {state!r}; take it from a checkpoint's data state")


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
