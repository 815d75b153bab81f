"""Quantized integers in memory: packed into bytes and words when they are stored, nibbles decoded when loaded.

A thread that holds neighbours adds them up, each shifted to its place, and stores one word.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too. It has no `*` in tuples.
# ruff: noqa: RET505, RUF005
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .indices import columns_at, existing, lanes

#: PACKED is 0 for one element a byte; two a byte are unsigned or signed.
UNSIGNED_PAIRS = tl.constexpr(1)
SIGNED_PAIRS = tl.constexpr(2)


class Storage(NamedTuple):
    """How quantized elements lie in memory, known when a kernel is compiled: the constant STORAGE."""

    #: 0, UNSIGNED_PAIRS or SIGNED_PAIRS.
    packed: int
    #: Neighbours that are stored as one word.
    each: int

    def one_by_one(self) -> Storage:
        """A byte at a time instead of words."""
        return self._replace(each=2 if self.packed else 1)


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
def low_bytes(bits):
    """The lowest byte of each int32, four neighbours in a word."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b; prmt.b32 a, $1, $2, 0x0040; prmt.b32 b, $3, $4, 0x0040; prmt.b32 $0, a, b, 0x5410; }",
        "=r,r,r,r,r", [bits], tl.int8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def store_quantized(
    out_ptr, x, rest, place, MASKED: tl.constexpr, PACKED: tl.constexpr, EACH: tl.constexpr, LACKS: tl.constexpr,
    PER_COLUMN: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Store x + rest + LACKS, EACH neighbours at a time; with PER_COLUMN each column has a rest of its own."""
    if EACH == 1:
        columns, inside = columns_at(place, COLS, VECTOR)
        mask = inside if MASKED else None
        tl.store(out_ptr + place.start + columns, (x + rest + LACKS).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        width_in_bits: tl.constexpr = 4 if PACKED else 8
        signed: tl.constexpr = is_signed(PACKED) if PACKED else out_ptr.dtype.element_ty.is_int_signed()
        words = place.column // EACH + lanes(COLS // EACH, VECTOR // EACH)[None, :]
        mask = existing(place, words, place.width // EACH) if MASKED else None
        word = pack(x, rest, width_in_bits, signed, EACH, LACKS, PER_COLUMN)
        if width_in_bits * EACH == 32:
            words_ptr = out_ptr.to(tl.pointer_type(tl.int32))
        elif width_in_bits * EACH == 16:
            words_ptr = out_ptr.to(tl.pointer_type(tl.int16))
        else:
            words_ptr = out_ptr.to(tl.pointer_type(tl.int8))
        tl.store(words_ptr + place.start // EACH + words, word.to(words_ptr.dtype.element_ty), mask=mask)


# -- nibbles -----------------------------------------------------------------------------------------------------
# The first of a pair is in the low four bits. What decodes more than one byte at a time belongs here too.


@triton.constexpr_function
def is_signed(packed: int) -> bool:
    return packed == SIGNED_PAIRS.value


@triton.jit
def nibble(byte, SIGNED: tl.constexpr):
    """The low four bits as an integer."""
    n = byte & 15
    return (n ^ 8) - 8 if SIGNED else n


@triton.jit
def nibble_at(byte, HALF: tl.constexpr, SIGNED: tl.constexpr):
    """The first or second element of a byte, given as an int32."""
    return nibble(byte >> (4 * HALF), SIGNED)


@triton.jit
def nibble_bits(q, HALF: tl.constexpr):
    """An integer's four bits where the first or second element of a byte has them."""
    return (q & 15) << (4 * HALF)


@triton.jit
def load_pairs(ptr, place, MASKED: tl.constexpr, SIGNED: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr):
    """The integers at a place, int32, from bytes of two: no pair may straddle lines, so the packed lines are those of
    the place, half as long."""
    pairs = place.column // 2 + lanes(COLS // 2, VECTOR // 2)[None, :]
    mask = existing(place, pairs, place.width // 2) if MASKED else None
    byte = tl.load(ptr + place.start // 2 + pairs, mask=mask).to(tl.int32)
    return tl.interleave(nibble_at(byte, 0, SIGNED), nibble_at(byte, 1, SIGNED))
