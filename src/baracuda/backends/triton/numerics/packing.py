"""Quantized integers side by side: how they leave a thread, two or one to a byte, and how pairs come back.

A thread that holds neighbours adds them up, each shifted to its place, and stores one word. Like `numerics`, the only
GPU spelling of it.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too. It has no `*` in tuples.
# ruff: noqa: RET505, RUF005
from __future__ import annotations

import triton
import triton.language as tl

#: PACKED is 0 for one element a byte; two a byte are unsigned or signed.
UNSIGNED_PAIRS = tl.constexpr(1)
SIGNED_PAIRS = tl.constexpr(2)


@triton.jit
def lanes(COLS: tl.constexpr, VECTOR: tl.constexpr):
    """0, 1, ..., COLS - 1, of which a thread is given VECTOR neighbours at most (0: as many as one access takes).

    Where each column has a scale of its own, fewer columns a thread mean fewer scales to keep and more use of each.
    """
    if VECTOR == 0:
        return tl.arange(0, COLS)
    else:
        return tl.max_contiguous(tl.arange(0, COLS), VECTOR)


@triton.constexpr_function
def repeated(number: int, bits: int, each: int) -> int:
    """A number `each` times in a word, modulo 2**32, as an int32."""
    word = sum(number << (bits * i) for i in range(each)) % 2**32
    return word - 2**32 if word >= 2**31 else word


@triton.jit
def side_by_side(x, BITS: tl.constexpr, EACH: tl.constexpr):
    """[..., n] integers to [..., n / EACH] sums of neighbours, each BITS further to the left than the one before."""
    if EACH == 1:
        return x
    else:
        even, odd = tl.split(tl.reshape(x, x.shape[:-1] + (x.shape[-1] // 2, 2)))
        return side_by_side(even + (odd << BITS), 2 * BITS, EACH // 2)


@triton.jit
def pack(
    x, rest, BITS: tl.constexpr, SIGNED: tl.constexpr, EACH: tl.constexpr, LACKS: tl.constexpr,
    PER_COLUMN: tl.constexpr,
):  # fmt: skip
    """EACH neighbours of x + rest + LACKS in one word, the first in its lowest bits.

    With half their range added signed ones are positive too, and no carry runs from one to the next: one sum for all.
    """
    half: tl.constexpr = 2 ** (BITS - 1) if SIGNED else 0
    rest = side_by_side(rest, BITS, EACH) if PER_COLUMN else rest * repeated(1, BITS, EACH)
    word = side_by_side(x, BITS, EACH) + (rest + repeated(half + LACKS, BITS, EACH))
    return word ^ repeated(half, BITS, EACH) if SIGNED else word


@triton.jit
def store_quantized(
    out_ptr, x, rest, start, column, width, valid, MASKED: tl.constexpr, PACKED: tl.constexpr, EACH: tl.constexpr,
    LACKS: tl.constexpr, PER_COLUMN: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Store x + rest + LACKS, EACH neighbours at a time; each column may have a rest of its own."""
    if EACH == 1:
        columns = column + lanes(COLS, VECTOR)[None, :]
        mask = valid & (columns < width) if MASKED else None
        tl.store(out_ptr + start + columns, (x + rest + LACKS).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        width_in_bits: tl.constexpr = 4 if PACKED else 8
        signed: tl.constexpr = PACKED == SIGNED_PAIRS if PACKED else out_ptr.dtype.element_ty.is_int_signed()
        words = column // EACH + lanes(COLS // EACH, VECTOR // EACH)[None, :]
        mask = valid & (words < width // EACH) if MASKED else None
        word = pack(x, rest, width_in_bits, signed, EACH, LACKS, PER_COLUMN)
        if width_in_bits * EACH == 32:
            words_ptr = out_ptr.to(tl.pointer_type(tl.int32))
        elif width_in_bits * EACH == 16:
            words_ptr = out_ptr.to(tl.pointer_type(tl.int16))
        else:
            words_ptr = out_ptr.to(tl.pointer_type(tl.int8))
        tl.store(words_ptr + start // EACH + words, word.to(words_ptr.dtype.element_ty), mask=mask)


@triton.jit
def nibble(byte, SIGNED: tl.constexpr):
    """The low four bits as an integer."""
    n = byte & 15
    return (n ^ 8) - 8 if SIGNED else n


@triton.jit
def unpack_pairs(byte, SIGNED: tl.constexpr):
    """[..., n] bytes to [..., 2 n] integers."""
    byte = byte.to(tl.int32)
    return tl.interleave(nibble(byte, SIGNED), nibble(byte >> 4, SIGNED))
