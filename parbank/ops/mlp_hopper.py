"""The MLP's two fused products for Hopper: one half of a program multiplies while the other half is in its epilogue
(ping-pong).

mlp.py says what is computed and what is kept. In its Triton kernel all warps multiply and then all are in the
epilogue, and the tensor cores idle meanwhile. Here a program has three groups of four warps:

    producer      issues all TMA copies: the left rows, the weight, and backward the activation
    consumer 0    multiplies and finishes rows 0..63 of every tile of 128 x 128
    consumer 1    the same for rows 64..127

A consumer keeps the whole depth of its rows in registers, as the left operand of the tensor cores: 64 x 512 numbers
of 16 bits are 128 registers a thread, and the sums 64 more. The producer gives registers to the consumers: 24 + 240 +
240 = 3 * 168, the budget of 12 warps. So only the weight streams. That is 128 KiB a tile from L2 instead of 256. Of
the 128 bytes a clock of shared memory, the weight's arrival takes 32, its reading by both consumers 64, the result's
way out 16, and backward the activation's way in 16. A program takes neighbouring tiles, columns fastest, so that its
rows change once in COLS / 128 tiles.

The ring. Rows and weight pass through a ring of STAGES slots, in the order of use. For a block of 128 rows, first
DEPTH / STEP slots of rows, (128, STEP) each; then as many slots of the weight for every tile, (128, STEP) or (STEP,
128) as it is stored. Both consumers take every slot in that order, and each of the three groups counts slots itself.
`phase`, the parity of the round, is the value it waits for at `full` (a slot has arrived) or `empty` (both consumers
have released it). Every group must consume every slot; skipping one makes its parity bit ambiguous. A ring of one
tile is short: with turns, consumer 1 reads a slot half a tile's time after consumer 0, and the time left until
consumer 0 needs the slot again is hardly more than the latency of L2.

The buffers. A consumer has BUFS buffers for its half of a tile, (64, 128) as two of (64, 64). The result leaves from
there. Backward, the activation arrives there first, and each thread overwrites the numbers it has read with its
results. The producer requests it after ASK of the tile's slots, behind most of the weight, which is needed sooner.
`a_full` and `a_empty` correspond to `full` and `empty`.

The turn. Consumer 0 lets consumer 1 begin tile n once it has *issued* the products of TURN slots of it. If that is
all of them, the last products are still running, so there is no gap. Consumer 1 lets consumer 0 begin tile n + 1. So
one multiplies while the other is in its epilogue. Without turns (TURN = 0) they may fall into step.

Proof that there is no deadlock, for any number of tiles. All three groups walk the same blocks and the same tiles
[lo, hi), so every wait has its counterpart. With no tiles (lo = hi), at most a block's rows are sent, and both
consumers take them. Number the producer's loads in its order, and assume that it waits for ever.
- For a slot, with load g. All loads before g arrive. Some consumer never releases load g - STAGES. On its way there
  it waits for
    * arrivals up to LAG slots further within the tile (a slot is released when LAG more products are issued), or of
      all rows of a block, whose slots are released together: all before g, as LAG < DEPTH / STEP <= STAGES;
    * activations of tiles that end before load g - STAGES: requested before g;
    * its turn, of a tile that begins at or before load g - STAGES. The other consumer gives it once it has issued at
      most that tile (consumer 0) or the tile before (consumer 1). That tile ends before g, as DEPTH / STEP <= STAGES,
      so all of it arrives. The turn that the other consumer needs is of the same or an earlier tile: repeat the
      argument, down to the first tile, which needs none. So the consumer does release it: a contradiction.
- For a buffer, with the activation of tile m. Some consumer never releases the buffer of tile m - BUFS, which it does
  after LAG + 1 slots of tile m - BUFS + 1. For BUFS > 1 that tile ends before the activation of m is requested, so
  the consumer gets there as above. For BUFS = 1 it is tile m, of which ASK slots are on their way: ASK > LAG lets the
  consumer get there, and ASK >= TURN lets consumer 0 give consumer 1 its turn.

The assertions in the kernel check these conditions.
"""

from typing import Any

import torch
from torch import Tensor

from parbank.gpu import on_device
from parbank.ops.backend import HAS_GLUON, INTERPRETED, gl, gluon, gluon_descriptor, hopper
from parbank.ops.checks import persistent_programs
from parbank.ops.configs import Launch, architecture

SIDE = 128  # of a tile
DEPTHS = (256, 384, 512)  # more has no room in registers

_barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed in Triton 3.7
_layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_LAYOUT = gl.constexpr(_layout)


def launch_config(step: int, stages: int, bufs: int, *, turn: int, lag: int = 1, ask: int = 8) -> Launch:
    """step: depth of a slot of the ring. stages: slots. bufs: buffers of a consumer. turn: slots of a tile after which
    the other consumer may begin; 0 means at any time. lag: products in flight when a slot is released. ask: slots of
    a tile after which its activation is requested (backward)."""
    blocks = {"PINGPONG": True, "STEP": step, "STAGES": stages, "BUFS": bufs, "TURN": turn, "LAG": lag, "ASK": ask}
    return Launch(blocks, num_warps=4, num_stages=1)


@gluon.jit
def _advance(slot, phase, STAGES: gl.constexpr):
    again = slot + 1 == STAGES
    return gl.where(again, 0, slot + 1), gl.where(again, phase ^ 1, phase)


@gluon.jit
def _back(slot, PLACES: gl.constexpr, STAGES: gl.constexpr):
    return gl.where(slot < PLACES, slot + STAGES - PLACES, slot - PLACES)


@gluon.jit
def _as_rows(ring, slot, STEP: gl.constexpr):
    """A slot as 128 rows of STEP channels, however the weight is stored."""
    return ring.index(slot)._reinterpret(ring.dtype, [128, STEP], _LAYOUT)


@gluon.jit
def _produce(
    left, right, a, ring, full, empty, low, high, a_full, a_empty, lo, hi, across,
    K_MAJOR: gl.constexpr, BACKWARD: gl.constexpr, DEPTH: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
    BUFS: gl.constexpr, ASK: gl.constexpr,
):  # fmt: skip
    SIZE: gl.constexpr = 128 * STEP * 2
    slot = 0
    phase = 1  # a new barrier passes in the first round
    for block in range(lo // across, (hi + across - 1) // across):
        for start in range(0, DEPTH, STEP):
            hopper.mbarrier.wait(empty.index(slot), phase)
            hopper.mbarrier.expect(full.index(slot), SIZE)
            place = _as_rows(ring, slot, STEP)
            hopper.tma.async_copy_global_to_shared(left, [block * 128, start], full.index(slot), place)
            slot, phase = _advance(slot, phase, STAGES)
        for tile in range(gl.maximum(lo, block * across), gl.minimum(hi, block * across + across)):
            n = tile - lo
            col = (tile - block * across) * 128
            for k in gl.static_range(DEPTH // STEP):
                hopper.mbarrier.wait(empty.index(slot), phase)
                hopper.mbarrier.expect(full.index(slot), SIZE)
                if K_MAJOR:
                    hopper.tma.async_copy_global_to_shared(right, [col, k * STEP], full.index(slot), ring.index(slot))
                else:
                    hopper.tma.async_copy_global_to_shared(right, [k * STEP, col], full.index(slot), ring.index(slot))
                slot, phase = _advance(slot, phase, STAGES)
                if BACKWARD and k == ASK - 1:
                    for half in range(2):
                        buf = half * BUFS + n % BUFS
                        row = block * 128 + half * 64
                        hopper.mbarrier.wait(a_empty.index(buf), (n // BUFS & 1) ^ 1)
                        hopper.mbarrier.expect(a_full.index(buf), 64 * 128 * 2)
                        hopper.tma.async_copy_global_to_shared(a, [row, col], a_full.index(buf), low.index(buf))
                        hopper.tma.async_copy_global_to_shared(a, [row, col + 64], a_full.index(buf), high.index(buf))


@gluon.jit
def _weight(ring, slot, K_MAJOR: gl.constexpr):
    if K_MAJOR:
        return ring.index(slot).permute((1, 0))
    else:
        return ring.index(slot)


@gluon.jit
def _of_row(x):
    """Broadcasts a value per row to (64, 8, 4, 2)."""
    return gl.expand_dims(gl.expand_dims(gl.expand_dims(x, 1), 2), 3)


@gluon.jit
def _finish(
    u, buffer, word, factor, slope, out, row, col, SHIFT: gl.constexpr,
    BACKWARD: gl.constexpr, FACTORED: gl.constexpr, H2: gl.constexpr, H4: gl.constexpr,
):  # fmt: skip
    """Writes 64 columns of a finished tile. Column 8 i + 2 q + e: a thread holds all i and e of its q, so its 16 signs
    of a row, bit i of byte e, need no exchange between threads."""
    i = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, H4))))
    e = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, H4))))
    i = gl.expand_dims(gl.expand_dims(gl.expand_dims(i, 0), 2), 3)
    e = gl.expand_dims(gl.expand_dims(gl.expand_dims(e, 0), 1), 2)
    mask = gl.full([1, 8, 1, 2], 1, gl.int32, H4) << (i + 8 * e + (SHIFT if BACKWARD else 0))
    u = gl.convert_layout(u.reshape([64, 8, 4, 2]), H4, assert_trivial=True)
    if BACKWARD:
        value = gl.convert_layout(buffer.load(H2).reshape([64, 8, 4, 2]), H4, assert_trivial=True)
        negative = (gl.expand_dims(gl.expand_dims(word, 1), 3) & mask) != 0
        if FACTORED:
            scale = gl.where(negative, _of_row(factor * slope), _of_row(factor * 2.0))
        else:
            scale = gl.where(negative, slope, 2.0)
        value = u * gl.sqrt(value.to(gl.float32)) * scale
    else:
        if FACTORED:
            u = u * _of_row(factor)
        word = word | (gl.sum(gl.sum(gl.where(u < 0, mask, 0), 3), 1) << SHIFT)
        value = gl.where(u < 0, u * slope, u)
        value = value * value
    buffer.store(gl.convert_layout(value.to(out.dtype).reshape([64, 64]), H2, assert_trivial=True))
    hopper.fence_async_shared()
    _barrier()
    hopper.tma.async_copy_shared_to_global(out, [row, col], buffer)
    return word


@gluon.jit
def _consume(
    C: gl.constexpr, out, signs, inverse, ring, full, empty, turn, low, high, a_full, a_empty, lo, hi, slope, scale,
    across: gl.constexpr, K_MAJOR: gl.constexpr, BACKWARD: gl.constexpr, FACTORED: gl.constexpr,
    DEPTH: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, BUFS: gl.constexpr, TURN: gl.constexpr, LAG: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    # Half of the tile's sums as a thread holds them, (row, column) and (row, i, q, e).
    H2: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8], [0, 16], [0, 32]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 64]
    )  # fmt: skip
    H4: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [8, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [[16, 0, 0, 0], [32, 0, 0, 0]],
        [],
        [64, 8, 4, 2],
    )
    WORD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, H4))
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, H4)))
    CHUNKS: gl.constexpr = DEPTH // STEP

    if BACKWARD:
        slope = -2.0 * gl.abs(slope)
    words = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, WORD)) * (across * 8), 1) + gl.expand_dims(
        gl.arange(0, 4, gl.SliceLayout(0, WORD)), 0
    )
    slot = 0
    phase = 0
    for block in range(lo // across, (hi + across - 1) // across):
        row = block * 128 + C * 64
        if FACTORED:
            factor = gl.load(inverse + row + gl.arange(0, 64, ROW)) * scale
        else:
            factor = slope
        operands = ()
        for _ in gl.static_range(CHUNKS):
            hopper.mbarrier.wait(full.index(slot), phase)
            operands += (_as_rows(ring, slot, STEP).slice(C * 64, 64).load(OPERAND),)  # type: ignore[assignment]
            slot, phase = _advance(slot, phase, STAGES)
        # TMA does not wait for loads that are still queued, as the stores of other threads would: without the fence it
        # overwrote rows that were requested and not yet read.
        hopper.fence_async_shared()
        _barrier()  # all four warps have read them: one thread signals for all
        for k in gl.static_range(CHUNKS):
            hopper.mbarrier.arrive(empty.index(_back(slot, CHUNKS - k, STAGES)), count=1)
        of_row = signs + row.to(gl.int64) * (across * 8)
        for tile in range(gl.maximum(lo, block * across), gl.minimum(hi, block * across + across)):
            n = tile - lo
            at = tile - block * across
            if BACKWARD:  # loaded here, first used after the products
                to_signs = of_row + at * 8 + words  # 16 signs a word, 8 words a row of a tile
                first = gl.load(to_signs)
                second = gl.load(to_signs + 4)
            if TURN > 0:
                hopper.mbarrier.wait(turn.index(C), (n & 1) ^ (1 - C))
            acc = gl.full([64, 128], 0.0, gl.float32, MMA)
            for k in gl.static_range(CHUNKS):
                hopper.mbarrier.wait(full.index(slot), phase)
                acc = hopper.warpgroup_mma(operands[k], _weight(ring, slot, K_MAJOR), acc, use_acc=k > 0, is_async=True)
                if k == TURN - 1:
                    hopper.mbarrier.arrive(turn.index(1 - C), count=1)
                if k >= LAG:
                    acc = hopper.warpgroup_mma_wait(LAG, deps=[acc])
                    if k == LAG:
                        hopper.tma.store_wait(0)  # the tile before has been read from its buffer
                    _barrier()  # all four warps have finished with both: one thread signals for all
                    hopper.mbarrier.arrive(empty.index(_back(slot, LAG, STAGES)), count=1)
                    if BACKWARD and k == LAG:
                        hopper.mbarrier.arrive(a_empty.index(C * BUFS + (n + BUFS - 1) % BUFS), count=1, pred=n > 0)
                slot, phase = _advance(slot, phase, STAGES)
            acc = hopper.warpgroup_mma_wait(0, deps=[acc])
            _barrier()
            for k in gl.static_range(LAG):
                hopper.mbarrier.arrive(empty.index(_back(slot, LAG - k, STAGES)), count=1)

            u_low, u_high = gl.split(acc.reshape([64, 2, 64]).permute(0, 2, 1))
            u_low = gl.convert_layout(u_low, H2, assert_trivial=True)
            u_high = gl.convert_layout(u_high, H2, assert_trivial=True)
            buf = C * BUFS + n % BUFS
            if BACKWARD:
                hopper.mbarrier.wait(a_full.index(buf), n // BUFS & 1)
                word = (first.to(gl.int32) & 0xFFFF) | (second.to(gl.int32) << 16)
            else:
                word = gl.full([64, 4], 0, gl.int32, WORD)
            word = _finish(u_low, low.index(buf), word, factor, slope, out, row, at * 128, 0,
                           BACKWARD, FACTORED, H2, H4)  # fmt: skip
            word = _finish(u_high, high.index(buf), word, factor, slope, out, row, at * 128 + 64, 16,
                           BACKWARD, FACTORED, H2, H4)  # fmt: skip
            if not BACKWARD:
                to_signs = of_row + at * 8 + words
                gl.store(to_signs, word.to(gl.int16))
                gl.store(to_signs + 4, (word >> 16).to(gl.int16))
    hopper.tma.store_wait(0)


@gluon.jit
def _mlp_pingpong_kernel(
    left, right, a, out, signs, inverse, rows, slope, scale,
    K_MAJOR: gl.constexpr, BACKWARD: gl.constexpr, FACTORED: gl.constexpr, DEPTH: gl.constexpr, COLS: gl.constexpr,
    PINGPONG: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, BUFS: gl.constexpr, TURN: gl.constexpr,
    LAG: gl.constexpr, ASK: gl.constexpr,
):  # fmt: skip
    """left (rows, DEPTH) times right^T, right (COLS, DEPTH), by descriptors, with the activation or its derivative."""
    CHUNKS: gl.constexpr = DEPTH // STEP
    gl.static_assert(LAG < CHUNKS)  # else it could deadlock, see above
    gl.static_assert(TURN <= CHUNKS)
    gl.static_assert(CHUNKS <= STAGES)
    if BACKWARD:
        gl.static_assert(LAG < ASK)
        gl.static_assert(ASK <= CHUNKS)
        gl.static_assert(BUFS > 1 or TURN <= ASK)
    across: gl.constexpr = COLS // 128
    tiles = rows // 128 * across
    lo = gl.program_id(0) * tiles // gl.num_programs(0)
    hi = (gl.program_id(0) + 1) * tiles // gl.num_programs(0)

    ring = gl.allocate_shared_memory(
        right.dtype, [STAGES, right.block_type.shape[0], right.block_type.shape[1]], right.layout
    )
    low = gl.allocate_shared_memory(out.dtype, [2 * BUFS, 64, 64], out.layout)
    high = gl.allocate_shared_memory(out.dtype, [2 * BUFS, 64, 64], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    a_full = gl.allocate_shared_memory(gl.int64, [2 * BUFS, 1], hopper.mbarrier.MBarrierLayout())
    a_empty = gl.allocate_shared_memory(gl.int64, [2 * BUFS, 1], hopper.mbarrier.MBarrierLayout())
    for k in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(k), count=1)
        hopper.mbarrier.init(empty.index(k), count=2)
    for c in gl.static_range(2):
        hopper.mbarrier.init(turn.index(c), count=1)
    for c in gl.static_range(2 * BUFS):
        hopper.mbarrier.init(a_full.index(c), count=1)
        hopper.mbarrier.init(a_empty.index(c), count=1)
    hopper.fence_async_shared()
    _barrier()
    # The producer is the default group, though one warp would do: ptxas keeps values that the default group computes once in
    # registers all through its loops, and a consumer has none to spare.
    gl.warp_specialize(
        [
            (_produce, (left, right, a, ring, full, empty, low, high, a_full, a_empty, lo, hi, across,
                        K_MAJOR, BACKWARD, DEPTH, STEP, STAGES, BUFS, ASK)),
            (_consume, (0, out, signs, inverse, ring, full, empty, turn, low, high, a_full, a_empty, lo, hi, slope, scale,
                        across, K_MAJOR, BACKWARD, FACTORED, DEPTH, STEP, STAGES, BUFS, TURN, LAG)),
            (_consume, (1, out, signs, inverse, ring, full, empty, turn, low, high, a_full, a_empty, lo, hi, slope, scale,
                        across, K_MAJOR, BACKWARD, FACTORED, DEPTH, STEP, STAGES, BUFS, TURN, LAG)),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip


def takes(left: Tensor, right: Tensor) -> bool:
    """Whether the kernel can run this product, for operands that TMA can address."""
    rows, depth = left.shape
    fits = rows % SIDE == 0 and right.shape[0] % SIDE == 0 and depth in DEPTHS and left.stride(1) == 1
    able = HAS_GLUON and not INTERPRETED and left.is_cuda and architecture(left.device) == "sm90"
    return able and fits and left.dtype in (torch.bfloat16, torch.float16)


def constants(launch: Launch, depth: int) -> dict[str, Any]:
    """The kernel's compile-time constants: a launch, reduced to the slots that a tile of smaller depth has."""
    places = depth // launch.blocks["STEP"]
    less = {"TURN": places, "ASK": places, "LAG": places - 1}
    return {**launch.kwargs(), **{name: min(launch.blocks[name], most) for name, most in less.items()}}


def multiply(
    launch: Launch,
    left: Tensor,
    right: Tensor,
    a: Tensor | None,
    out: Tensor,
    signs: Tensor,
    slope: float,
    inverse: Tensor | None,
    scale: float,
) -> None:
    """The product of mlp.py, of left (rows, depth) and right (cols, depth)."""
    rows, depth = left.shape
    cols, step = right.shape[0], launch.blocks["STEP"]
    k_major = right.stride(1) == 1
    operands = [
        _describe(left, [SIDE, step]),
        _describe(right, [SIDE, step]) if k_major else _describe(right.t(), [step, SIDE]),
        None if a is None else _describe(a, [64, 64]),
        _describe(out, [64, 64]),
    ]
    programs = persistent_programs(left.device, 1, rows // SIDE * (cols // SIDE))
    with on_device(left.device):
        _mlp_pingpong_kernel[(programs,)](
            *operands, signs.view(torch.int16), inverse, rows, slope, scale,
            K_MAJOR=k_major, BACKWARD=a is not None, FACTORED=inverse is not None, DEPTH=depth, COLS=cols,
            **constants(launch, depth),
        )  # fmt: skip


def _describe(x: Tensor, block: list[int]) -> Any:
    return gluon_descriptor(x, list(x.shape), list(x.stride()), block, _layout)
