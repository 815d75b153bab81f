"""Packed weights to s8 in registers: four at a time, as bytes of a word.

A byte holds the weights of two neighbours along K, the even one in its low half, both in two's complement. A decoded
weight is its value times a factor of 1 to 15, which fits s8, or without factors 16 times its value, which takes fewer
instructions and is undone exactly in the sum.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....core import types

#: The low bits of a stored factor count.
MAX_FACTOR = gl.constexpr(types.MAX_FACTOR)
#: q becomes q + 8 in 0..15, times f; 0x80 - 8 f on top makes that f * q + 0x80, and the last bit flip f * q. No byte
#: carries into the next.
_TIMES_FACTOR = gl.constexpr(
    "{ .reg .b32 t, u;"
    " lop3.b32 t, $2, 0x08080808, 0x0F0F0F0F, 0x28; mad.lo.u32 t, t, $3, $7; xor.b32 $0, t, 0x80808080;"
    " shr.u32 u, $2, 4;"
    " lop3.b32 u, u, 0x08080808, 0x0F0F0F0F, 0x28; mad.lo.u32 u, u, $3, $7; xor.b32 $1, u, 0x80808080; }"
)
_TIMES_16 = gl.constexpr("{ .reg .b32 t; shl.b32 t, $2, 4; and.b32 $0, t, 0xF0F0F0F0; and.b32 $1, $2, 0xF0F0F0F0; }")


@gluon.jit
def decode(packed):
    """16 times the even and 16 times the odd weights of packed bytes."""
    return gl.inline_asm_elementwise(_TIMES_16, "=r,=r,r", [packed], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)


@gluon.jit
def without_16(acc):
    """A sum of `decode`d weights in whole weights; the division is exact."""
    return acc >> 4


@gluon.jit
def factor_in(word, index):
    """The factor at this index of a word that holds four, or fewer."""
    return (word >> (index % 4 * 8)) & MAX_FACTOR


@gluon.jit
def factor_offset(factor):
    """What `decode_grouped` adds to the products with a factor."""
    return (-0x7F7F7F80) - factor * 0x08080808


@gluon.jit
def decode_grouped(packed, factor, offset):
    """The even and the odd weights of packed bytes times their factor: an int32 that is the same for the four bytes
    that a thread holds side by side, with its `factor_offset`."""
    return gl.inline_asm_elementwise(
        _TIMES_FACTOR, "=r,=r,r,r,r,r,r,r,r,r,r", [packed, factor, offset], dtype=(gl.int8, gl.int8), is_pure=True,
        pack=4,
    )  # fmt: skip


@gluon.jit
def even_and_odd(pairs):
    """The low and the high bytes of int16: two neighbours along K each."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;", "=r,=r,r,r", [pairs], dtype=(gl.int8, gl.int8),
        is_pure=True, pack=4,
    )  # fmt: skip
