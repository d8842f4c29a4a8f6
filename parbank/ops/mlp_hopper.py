"""The MLP's two fused products for Hopper, where a multiprocessor does three things at once: products, epilogue, memory.

They are those of mlp.py. There a program makes a tile's products, then goes through its epilogue (backward: waits for the
activation to multiply by) while the tensor units stand still. Here they do not:

- A program keeps its 128 columns of the weight in shared memory for as long as it lives, and only rows stream past. Two
  thirds of the bytes come from the L2 cache that tiles of 128 x 256 read, which fetch both sides for every tile.
- The products of a tile run asynchronously while the tile before it is finished, a quarter for each quarter of the depth.
  Two accumulators of 128 x 128 fit the registers of eight warps.
- Backward, that quarter's part of the activation was asked for one tile earlier, and lies in registers.

The tensor units give a thread columns 8i + 2q, 8i + 2q + 1 of its rows: 4 bytes here and there. The weight's columns are laid
out so that column 32g + 8i + 2q + e of the product is column 32g + 8q + 2i + e of the matrix: 8 neighbours, so that a thread
reads and writes 16 bytes at a time, and nothing passes through shared memory on its way in or out.

Gluon, Triton's lower level, has what this takes. It is not interpreted, so these lines are only tested on a GPU. Measured it
is the faster one forward only, so mlp.py's tables take it there; docs/ops.md has the figures and what is thought to hold it up.
"""

from typing import Any

import torch
from torch import Tensor

from parbank.ops.checks import on_device, persistent_programs
from parbank.ops.configs import Launch

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    HAS_GLUON = True
except ImportError:  # no Triton, or one from before Gluon
    HAS_GLUON = False

ROWS, COLS, DEPTH = 128, 128, 512  # a tile; 128 columns 512 deep are 128 KiB, and leave 96 for rows on their way

if HAS_GLUON:
    _barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed in Triton 3.7

    @gluon.jit
    def _ask(desc, x, bars, chunk, chunks, first, step, CHUNKS: gl.constexpr, STAGES: gl.constexpr):
        """Starts to copy a chunk, a part of the depth of one block of rows, into its place in the ring."""
        K: gl.constexpr = desc.block_type.shape[1]
        M: gl.constexpr = desc.block_type.shape[0]
        live = chunk < chunks
        stage = chunk % STAGES
        bar = bars.index(stage)
        mbarrier.expect(bar, M * K * 2, pred=live)
        at = [(first + chunk // CHUNKS * step) * M, chunk % CHUNKS * K]
        tma.async_copy_global_to_shared(desc, at, bar, x.index(stage), pred=live)

    @gluon.jit
    def _warm(pointers, wanted, BYTES: gl.constexpr):
        """Asks memory to have BYTES from each wanted pointer on in the L2 cache."""
        gl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;}",
            "=r,l,r",
            [pointers, wanted.to(gl.int32) * BYTES],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )

    @gluon.jit
    def _quarters(acc, M: gl.constexpr, PART: gl.constexpr):
        """The accumulator's columns in the matrix's order, 32 at a time."""
        ordered = acc.reshape([M, 4, 4, 4, 2]).permute(0, 1, 3, 2, 4).reshape([M, 2, 2, 32]).permute(0, 3, 1, 2)
        even, odd = gl.split(ordered)
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        return (
            gl.convert_layout(first, PART, assert_trivial=True),
            gl.convert_layout(second, PART, assert_trivial=True),
            gl.convert_layout(third, PART, assert_trivial=True),
            gl.convert_layout(fourth, PART, assert_trivial=True),
        )

    @gluon.jit
    def _derive(da, a, word, slope, HALF: gl.constexpr, PART: gl.constexpr):
        """da * f'(u), with -2 |slope| given; `word` has the signs of 64 columns as mlp.py packs them, HALF says which 32."""
        col = gl.arange(0, 32, gl.SliceLayout(0, PART))[None, :]
        mine = gl.expand_dims(word, 1) >> (col // 8).to(gl.int64)
        negative = (mine >> (col % 8 * 8 + 4 * HALF).to(gl.int64)) & 1
        return da * gl.sqrt(a.to(gl.float32)) * gl.where(negative == 1, slope, 2.0)

    @gluon.jit
    def _signs(u, HALF: gl.constexpr, PART: gl.constexpr):
        """The bits of a part's signs in the word of its 64 columns: bit 4 HALF + q of byte j is column 8q + j."""
        col = gl.arange(0, 32, gl.SliceLayout(0, PART))[None, :]
        bits = (u < 0).to(gl.int64) << (col % 8 * 8).to(gl.int64)
        return gl.sum(bits << (col // 8 + 4 * HALF).to(gl.int64), 1)

    @gluon.jit
    def _finish(u, a, word, to, to_signs, inner, words, slope, done, PIECE: gl.constexpr, BACKWARD: gl.constexpr,
                PART: gl.constexpr):  # fmt: skip
        """Writes 32 columns of a finished tile; returns the signs gathered so far."""
        if BACKWARD:
            value = _derive(u, a, word, slope, PIECE % 2, PART)
        else:
            value = gl.where(u < 0, u * slope, u)
            value = value * value
            bits = _signs(u, PIECE % 2, PART)
            if PIECE % 2 == 0:
                word = bits
            else:
                word = word | bits
                gl.store(to_signs + PIECE // 2 + words, word, mask=done)
        gl.store(to + PIECE * 32 + inner, value.to(to.dtype.element_ty), mask=done)
        return word

    @gluon.jit
    def _mlp_hopper_kernel(
        desc, left, weight, a, out, signs, rows, cols, stride_l, stride_n, stride_k, slope,
        K_MAJOR: gl.constexpr, BACKWARD: gl.constexpr, M: gl.constexpr, N: gl.constexpr, DEPTH: gl.constexpr,
        STAGES: gl.constexpr, CHUNKS: gl.constexpr, EARLY: gl.constexpr,
        AHEAD: gl.constexpr,
    ):  # fmt: skip
        """desc reads the rows (rows, DEPTH); weight is (cols, DEPTH) by strides; a, out (rows, cols); signs in int64 words."""
        K: gl.constexpr = DEPTH // CHUNKS
        EVERY: gl.constexpr = CHUNKS // 4  # chunks for each of the four parts of a tile
        MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 16])
        # Registers hold 8 neighbours of two rows, 8 apart; 4 lanes hold a row's 32 columns.
        PART: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [8, 0]],
            [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            [[16, 0], [32, 0], [64, 0]],
            [],
            [M, 32],
        )
        ALONG_K: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
        ALONG_N: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [1, 8], [0, 1])
        LOAD: gl.constexpr = ALONG_K if K_MAJOR else ALONG_N
        dtype: gl.constexpr = desc.dtype

        if BACKWARD:
            slope = -2.0 * gl.abs(slope)
        blocks = cols // N
        col = gl.program_id(0) % blocks * N
        first = gl.program_id(0) // blocks
        step = gl.num_programs(0) // blocks
        tiles = (rows // M - first + step - 1) // step
        chunks = tiles * CHUNKS

        x = gl.allocate_shared_memory(dtype, [STAGES, M, K], desc.layout)
        w = gl.allocate_shared_memory(dtype, [CHUNKS, N, K], desc.layout)
        bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for place in gl.static_range(STAGES):
            mbarrier.init(bars.index(place), count=1)
        fence_async_shared()
        _barrier()
        for early in gl.static_range(STAGES - 1):
            _ask(desc, x, bars, early, chunks, first, step, CHUNKS, STAGES)

        n = gl.arange(0, N, gl.SliceLayout(1, LOAD))
        k = gl.arange(0, K, gl.SliceLayout(0, LOAD))
        of = n // 32 * 32 + n // 2 % 4 * 8 + n // 8 % 4 * 2 + n % 2
        source = weight + gl.expand_dims((col + of) * stride_n, 1) + gl.expand_dims(k * stride_k, 0)
        for slab in gl.static_range(CHUNKS):
            w.index(slab).store(gl.load(source + slab * K * stride_k))
        fence_async_shared()
        _barrier()

        r = gl.arange(0, M, gl.SliceLayout(1, PART))
        c = gl.arange(0, 32, gl.SliceLayout(0, PART))
        inner = gl.expand_dims(r * cols, 1) + gl.expand_dims(c, 0)  # within a tile: 32 bits are enough
        words = r * (cols // 64)
        at = first.to(gl.int64) * (M * cols) + col  # of the tile whose products are made; a sign word is 64 elements
        jump = step.to(gl.int64) * (M * cols)
        before = gl.full([M, 32], 0.0, gl.float32, PART)
        piece0, piece1, piece2, piece3 = before, before, before, before
        nothing = gl.full([M, 32], 0.0, dtype, PART)
        a0, a1, a2, a3 = nothing, nothing, nothing, nothing
        word0 = gl.full([M], 0, gl.int64, gl.SliceLayout(1, PART))
        word1 = word0
        half = gl.arange(0, 2 * M, gl.BlockedLayout([1], [32], [8], [0]))  # one of a row's two halves for each thread
        for tile in range(tiles):
            done = tile > 0
            if AHEAD > 0:
                # The programs of a block of rows meet at rows that none has seen: each fetches some of them in advance.
                soon = (first + (tile + AHEAD) * step) * M + half // 2
                known = soon < rows
                line = left + soon.to(gl.int64) * stride_l + half % 2 * (DEPTH // 2)
                _warm(line, known & (half // 2 % blocks == col // N), DEPTH)
                if BACKWARD:
                    _warm(a + soon.to(gl.int64) * cols + col + half % 2 * (N // 2), known, N)
            of_a, of_signs = a + at, signs + at // 64
            to, to_signs = out + (at - jump), signs + (at - jump) // 64
            acc = gl.full([M, N], 0.0, gl.float32, MMA)
            for part in gl.static_range(CHUNKS):
                chunk = tile * CHUNKS + part
                stage = chunk % STAGES
                mbarrier.wait(bars.index(stage), chunk // STAGES & 1)
                acc = warpgroup_mma(x.index(stage), w.index(part).permute((1, 0)), acc, use_acc=part > 0, is_async=True)
                if EARLY:
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    # The chunk before this one has been multiplied by both warp groups: its place is free.
                    _barrier()
                    _ask(desc, x, bars, chunk + STAGES - 1, chunks, first, step, CHUNKS, STAGES)
                if part == 0:
                    word0 = _finish(piece0, a0, word0, to, to_signs, inner, words, slope, done, 0, BACKWARD, PART)
                    if BACKWARD:
                        a0 = gl.load(of_a + inner)
                elif part == EVERY:
                    word0 = _finish(piece1, a1, word0, to, to_signs, inner, words, slope, done, 1, BACKWARD, PART)
                    if BACKWARD:
                        a1 = gl.load(of_a + 32 + inner)
                        word0 = gl.load(of_signs + words)
                elif part == 2 * EVERY:
                    word1 = _finish(piece2, a2, word1, to, to_signs, inner, words, slope, done, 2, BACKWARD, PART)
                    if BACKWARD:
                        a2 = gl.load(of_a + 64 + inner)
                elif part == 3 * EVERY:
                    word1 = _finish(piece3, a3, word1, to, to_signs, inner, words, slope, done, 3, BACKWARD, PART)
                    if BACKWARD:
                        a3 = gl.load(of_a + 96 + inner)
                        word1 = gl.load(of_signs + 1 + words)
                if not EARLY:
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    # The chunk before this one has been multiplied by both warp groups: its place is free.
                    _barrier()
                    _ask(desc, x, bars, chunk + STAGES - 1, chunks, first, step, CHUNKS, STAGES)
            acc = warpgroup_mma_wait(0, deps=[acc])
            piece0, piece1, piece2, piece3 = _quarters(acc, M, PART)
            at += jump
        done = tiles > 0
        to, to_signs = out + (at - jump), signs + (at - jump) // 64
        word0 = _finish(piece0, a0, word0, to, to_signs, inner, words, slope, done, 0, BACKWARD, PART)
        word0 = _finish(piece1, a1, word0, to, to_signs, inner, words, slope, done, 1, BACKWARD, PART)
        word1 = _finish(piece2, a2, word1, to, to_signs, inner, words, slope, done, 2, BACKWARD, PART)
        word1 = _finish(piece3, a3, word1, to, to_signs, inner, words, slope, done, 3, BACKWARD, PART)


def launch_config(*, early: bool = False, ahead: int = 0, chunks: int = 4) -> Launch:
    """chunks: into how many parts the depth is cut; three quarters of as many are on their way or in use.
    early: the place of a chunk is filled again before, not after, a part of the tile in front is finished.
    ahead: how many tiles in advance what comes from memory is brought into the L2 cache; 0: not at all."""
    return Launch({"RESIDENT": True, "EARLY": early, "AHEAD": ahead, "CHUNKS": chunks}, 8, 3 * chunks // 4)


def fits(left: Tensor, right: Tensor) -> bool:
    """Whether the kernel is made for this product: whole tiles, and the one depth that fills shared memory."""
    return (
        HAS_GLUON
        and left.shape[0] % ROWS == 0
        and right.shape[0] % COLS == 0
        and left.shape[1] == DEPTH
        and left.element_size() == 2
    )


def launch_product(
    left: Tensor, right: Tensor, a: Tensor | None, out: Tensor, signs: Tensor, slope: float, launch: Launch
) -> None:
    """out and signs from left (rows, depth) and right (cols, depth), stored either way round; backward where a is given."""
    rows, cols = left.shape[0], right.shape[0]
    chunks = launch.blocks["CHUNKS"]
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    desc = TensorDescriptor(left, list(left.shape), list(left.stride()), [ROWS, DEPTH // chunks], layout)
    blocks = cols // COLS
    lines = max(1, min(persistent_programs(left.device, 1, 1 << 30) // blocks, rows // ROWS))
    kernel: Any = _mlp_hopper_kernel
    with on_device(left.device):
        kernel[(lines * blocks,)](
            desc, left, right, out if a is None else a, out, signs.view(torch.int64), rows, cols,
            left.stride(0), right.stride(0), right.stride(1), slope,
            K_MAJOR=right.stride(1) == 1, BACKWARD=a is not None, M=ROWS, N=COLS, DEPTH=DEPTH, CHUNKS=chunks,
            STAGES=launch.num_stages, EARLY=launch.blocks["EARLY"], AHEAD=launch.blocks["AHEAD"],
            num_warps=launch.num_warps,
        )  # fmt: skip
