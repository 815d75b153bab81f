"""The GEMM for the fewest tokens and packed weights: out.T = weight @ x.T, with no stop on the way to the registers.

A tile is 16 rows of the weight, and the warps of a program share out K: a thread reads the bytes that it multiplies,
straight from memory, one tile ahead. The activations stay in shared memory, in the order in which they are multiplied.
What the warps have summed up meets in shared memory, tile by tile.

A chunk is what shares a factor: 128 weights of a row, or the 64 of a smaller group. The factor multiplies the chunk's
sum, not its weights.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ...numerics.decode import decode_words, even_and_odd_words, factor_in, without_16
from .few import let_next_kernel_start, prefetch_rows, store, unit_scales, wait_for_previous_kernel
from .tokens import appended, fragment_tokens, operand_of

#: Rows of a tile: those of an instruction.
ROWS = gl.constexpr(16)


class Sizes(NamedTuple):
    """Of the problem, and the chunks of its K."""

    M: Any
    N: Any
    K: Any
    chunks: Any


@triton.constexpr_function
def words_layout(warps: int, rows: int, words: int) -> gl.DistributedLinearLayout:
    """[warps, rows, words]: of every eighth row, a thread has a quarter of the words, side by side."""
    each = words // 4
    registers = [[0, 0, 1 << i] for i in range(each.bit_length() - 1)]
    registers += [[0, 8 << i, 0] for i in range((rows // 8).bit_length() - 1)]
    lanes = [[0, 0, each], [0, 0, 2 * each], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    of_warps = [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, rows, words])


@triton.constexpr_function
def fragments_layout(warps: int, k: int, tokens: int) -> gl.SharedLinearLayout:
    """[warps, k, tokens] so that a thread finds 16 bytes of its part of the right operand side by side, and the threads
    of a warp theirs in turn."""
    bases = [[0, k_bit, 0] for k_bit in (1, 2, 16, 32, 4, 8)] + [[0, 0, token] for token in (1, 2, 4)]
    bases += [[0, 64, 0]] if k > 64 else []
    bases += [[0, 0, 8]] if tokens > 8 else []
    return gl.SharedLinearLayout(bases + [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)])


@gluon.jit
def in_order(even, odd, LAYOUT: gl.constexpr):
    """The even and the odd values along K of what a thread holds, as an operand: [warps, rows, K].

    An instruction multiplies 32 neighbours of this order: from each of the four threads that share a row, the even and
    the odd values of one word. Both operands have it.
    """
    W: gl.constexpr = even.shape[0]
    R: gl.constexpr = even.shape[1]
    C: gl.constexpr = even.shape[2]
    apart = gl.reshape(gl.join(even, odd), [W, R, 4, C // 16, 4, 2])
    if LAYOUT.operand_index == 0:
        joined = gl.reshape(gl.permute(apart, [0, 1, 3, 5, 2, 4]), [W, R, 2 * C])
    else:
        joined = gl.reshape(gl.permute(apart, [0, 3, 5, 2, 4, 1]), [W, 2 * C, R])
    return gl.convert_layout(joined, LAYOUT, assert_trivial=True)


@gluon.jit
def left(words, LAYOUT: gl.constexpr):
    """The operand of a chunk's words, each weight times 16."""
    even, odd = decode_words(words)
    return in_order(even, odd, LAYOUT)


@gluon.jit
def right(words, LAYOUT: gl.constexpr):
    """The operand of the activations, four to a word."""
    W: gl.constexpr = words.shape[0]
    low, high = gl.split(gl.reshape(words, [W, words.shape[1], words.shape[2] // 2, 2]))
    even, odd = even_and_odd_words(low, high)
    return in_order(even, odd, LAYOUT)


@triton.constexpr_function
def ends(start: int, chunks: int) -> int:
    """Behind the two chunks, or the last one, that are decoded and fetched anew together."""
    return min(start + 2, chunks)


@gluon.jit
def load_words(ptr, rows, chunk, LINE, LAYOUT: gl.constexpr, TILE: gl.constexpr, MODIFIER: gl.constexpr):
    """The words of a chunk of each warp, of the next `rows` rows of LINE words; 0 behind the last one and behind K."""
    WORDS: gl.constexpr = LAYOUT.shape[2]
    warp = gl.arange(0, LAYOUT.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    row = gl.arange(0, LAYOUT.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    chunks = gl.expand_dims(gl.expand_dims(chunk + warp * TILE.chunks, 1), 2)
    inside = gl.expand_dims(gl.expand_dims(row < rows, 0), 2)
    if not TILE.whole:
        inside &= chunks < LINE // WORDS
    place = gl.expand_dims(gl.expand_dims(row * LINE, 0), 2) + chunks * WORDS
    place += gl.expand_dims(gl.expand_dims(word, 0), 1)
    return gl.load(ptr + place, inside, other=0, cache_modifier=MODIFIER)


@gluon.jit
def load_weight(w_ptr, tile, chunk, sizes, TILE: gl.constexpr):
    LAYOUT: gl.constexpr = words_layout(TILE.warps, 16, TILE.k // 4)
    line = sizes.K // 8
    rows = w_ptr + tile.to(gl.int64) * (ROWS * line)
    return load_words(rows, sizes.N - tile * ROWS, chunk, line, LAYOUT, TILE, "")


@gluon.jit
def load_factors(factor_ptr, tile, sizes, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """A tuple of the factors of a tile, as many in an element as `factor_ptr` holds; any behind the end."""
    EACH: gl.constexpr = factor_ptr.dtype.element_ty.primitive_bitwidth // 8
    row = gl.minimum(tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT)), sizes.N - 1)
    warp = gl.arange(0, LAYOUT.parent.warps_per_cta[0], gl.SliceLayout(1, LAYOUT))
    COUNT: gl.constexpr = TILE.chunks // EACH
    found = ()
    for i in gl.static_range(COUNT):
        at = gl.minimum(warp * TILE.chunks // EACH + i, sizes.chunks // EACH - 1)
        place = gl.expand_dims(row * (sizes.chunks // EACH), 0) + gl.expand_dims(at, 1)
        found = appended(found, gl.load(factor_ptr + place).to(gl.int32))
    return found


@gluon.jit
def load_tile(w_ptr, factor_ptr, tile, sizes, TILE: gl.constexpr, MMA: gl.constexpr, GROUPED: gl.constexpr):
    """A tile's words, a tuple of each warp's chunks, and its factors."""
    CHUNKS: gl.constexpr = TILE.chunks
    ring = ()
    for c in gl.static_range(CHUNKS):
        ring = appended(ring, load_weight(w_ptr, tile, c, sizes, TILE))
    factors = (0,)
    if GROUPED:
        factors = load_factors(factor_ptr, tile, sizes, TILE, gl.SliceLayout(2, MMA))
    return ring, factors


@gluon.jit
def multiply_tile(
    held, later, w_ptr, factor_ptr, tokens, sizes, TILE: gl.constexpr, MMA: gl.constexpr, GROUPED: gl.constexpr
):  # fmt: skip
    """The sums of the warps' chunks of a tile that is `held`, 16 times as large, and the tile `later` in its place."""
    W: gl.constexpr = TILE.warps
    BT: gl.constexpr = TILE.tokens
    CHUNKS: gl.constexpr = TILE.chunks
    A: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=4)
    B: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=4)
    EACH: gl.constexpr = factor_ptr.dtype.element_ty.primitive_bitwidth // 8
    ring, factors = held
    total = gl.zeros([W, ROWS, BT], gl.int32, MMA)
    following = ()
    for start in gl.static_range(0, CHUNKS, 2):
        decoded = ()
        for c in gl.static_range(start, ends(start, CHUNKS)):
            decoded = appended(decoded, left(ring[c], A))
        # The registers are free again: the later tile's words come into them.
        for c in gl.static_range(start, ends(start, CHUNKS)):
            following = appended(following, load_weight(w_ptr, later, c, sizes, TILE))
        for c in gl.static_range(start, ends(start, CHUNKS)):
            if GROUPED:
                acc = mma_v2(decoded[c - start], operand_of(tokens[c], BT, B), gl.zeros([W, ROWS, BT], gl.int32, MMA))
                total += acc * gl.expand_dims(factor_in(factors[c // EACH], c % EACH), 2)
            else:
                total = mma_v2(decoded[c - start], operand_of(tokens[c], BT, B), total)
    if GROUPED:
        factors = load_factors(factor_ptr, later, sizes, TILE, gl.SliceLayout(2, MMA))
    return total, (following, factors)


@gluon.jit
def gemm_direct(
    x_ptr, w_ptr, factor_ptr, out_ptr, terms, shape, TILE: gl.constexpr, FORM: gl.constexpr, KINDS: gl.constexpr
):  # fmt: skip
    """A program has every so manieth tile."""
    W: gl.constexpr = gl.num_warps()
    BT: gl.constexpr = TILE.tokens
    SPAN: gl.constexpr = 2 * TILE.k
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8])
    B: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=MMA, k_width=4)
    WORDS: gl.constexpr = TILE.k // 4
    CHUNKS: gl.constexpr = TILE.chunks
    GROUPED: gl.constexpr = FORM.group > 0
    TOKENS: gl.constexpr = FORM.tokens
    if FORM.early != "no":
        let_next_kernel_start()
    sizes = Sizes(M=shape.m, N=shape.n, K=shape.k, chunks=shape.k // SPAN)
    first = gl.program_id(0)
    step = gl.num_programs(0)
    if FORM.early == "prefetch":
        prefetch_rows(w_ptr, first * ROWS, shape.n, 0, W * CHUNKS * TILE.k, shape.k // 2, ROWS)
        wait_for_previous_kernel()
    held = load_tile(w_ptr, factor_ptr, first, sizes, TILE, MMA, GROUPED)
    if FORM.early == "copy":
        wait_for_previous_kernel()

    tokens = ()
    kept = None
    if TOKENS is not None:
        tokens, kept = fragment_tokens(x_ptr, TILE, TOKENS)
    else:
        LAYOUT: gl.constexpr = words_layout(W, BT, 2 * WORDS)
        FRAGMENTS: gl.constexpr = fragments_layout(W, SPAN, BT)
        for c in gl.static_range(CHUNKS):  # not by way of L1, which the previous kernel does not write
            words = load_words(x_ptr, shape.m, c, shape.k // 4, LAYOUT, TILE, ".cg")
            room = gl.allocate_shared_memory(gl.int8, [W, SPAN, BT], FRAGMENTS)
            room.store(right(words, B))
            tokens = appended(tokens, room)
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    sums = gl.allocate_shared_memory(gl.int32, [W, ROWS, BT], SUMS)
    ADDED: gl.constexpr = gl.BlockedLayout([W, 1, 1], [1, 32 // BT, BT], [1, W, 1], [2, 1, 0])
    OUT: gl.constexpr = gl.SliceLayout(0, ADDED)
    for tile in range(first, gl.cdiv(shape.n, ROWS), step):
        scales = unit_scales(tile, ROWS, BT, OUT, terms, shape.m, shape.n, KINDS, kept)
        total, held = multiply_tile(held, tile + step, w_ptr, factor_ptr, tokens, sizes, TILE, MMA, GROUPED)
        sums.store(without_16(total))
        store(gl.sum(sums.load(ADDED), axis=0), tile, scales, out_ptr, terms, shape.m, shape.n, KINDS)
