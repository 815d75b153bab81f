"""Stored weights to s8 or 16-bit floats in registers: four bytes at a time, as a word.

A packed byte holds the weights of two neighbours along K, the even one in its low half. Decoded to s8, a weight is its
value times a factor of 1 to 15, or without factors 16 times its value, which takes fewer instructions and is undone
exactly in the sum.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505
from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....core import types

#: The low bits of a stored factor count.
MAX_FACTOR = gl.constexpr(types.MAX_FACTOR)
MAX_ZERO_POINT = gl.constexpr(types.MAX_ZERO_POINT)
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
def decode_words(words):
    """`decode` of words of four bytes: four even and four odd weights for each word along the last axis."""
    return gl.inline_asm_elementwise(
        _TIMES_16, "=r,=r,r,r,r,r", [four_times(words)], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )


@gluon.jit
def even_and_odd_words(low, high):
    """Of the eight bytes of two words, the even and the odd ones."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $6, 0x6420; prmt.b32 $1, $2, $6, 0x7531;", "=r,=r,r,r,r,r,r,r,r,r",
        [four_times(low), four_times(high)], dtype=(gl.int8, gl.int8), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def four_times(words):
    """Each word four times along the last axis: what is computed for four bytes at once takes it once."""
    pairs = gl.join(words, words)
    return gl.reshape(gl.join(pairs, pairs), [words.shape[0], words.shape[1], 4 * words.shape[2]])


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


# -- to 16-bit floats ---------------------------------------------------------------------------------------------
# (q - zero_point) * scale as `dequantize` computes it: a product in f32 that is rounded to 16 bits. Bits of an integer
# below those of a power of two are the sum of both as a float; the subtraction that leaves the integer is exact.


@triton.constexpr_function
def name_of(dtype: gl.dtype) -> str:
    return "bf16" if dtype.name == "bf16" else "f16"


@triton.constexpr_function
def nibbles_asm(kind: str, signed: bool) -> str:
    """$0 to $3 = the pairs of the bytes of $4 times the two halves of $5 to $8, one word for each byte: products of
    integers of 5 bits and 16-bit floats, which one rounding to 16 bits makes what f32 and a second rounding make."""
    one = 0x43004300 if kind == "bf16" else 0x64006400
    less = one + 0x00080008 if signed else one
    text = ["{ .reg .b32 o, r, c;", f"mov.b32 c, {less:#x}; shr.u32 o, $4, 4;"]
    for j in range(4):
        # The sign bit of two's complement is flipped on the way: the value plus 8.
        text.append(f"prmt.b32 r, $4, o, {0x4400 + 0x1111 * j:#x}; lop3.b32 r, r, 0x000F000F, {less:#x}, 0x6A;")
        text.append(f"sub.rn.{kind}x2 r, r, c; mul.rn.{kind}x2 ${j}, r, ${5 + j};")
    return " ".join([*text, "}"])


@triton.constexpr_function
def exact_asm(kind: str, packed: bool, signed: bool) -> str:
    """The weights of a word, less f32 that have the power of two in them, times f32: one of each for a byte."""
    words = 4 if packed else 2
    source, s, c = words, words + 1, words + 5
    flip = (0x88888888 if packed else 0x80808080) if signed else 0
    text = [f"{{ .reg .b32 e, t; .reg .f32 a, b, s, c; xor.b32 e, ${source}, {flip:#x};"]
    for j in range(words):
        byte = j if packed else 2 * j  # of the pair in an output
        text.append(f"mov.b32 s, ${s + byte}; mov.b32 c, ${c + byte};")
        for i, name in ((2 * j, "a"), (2 * j + 1, "b")):
            if packed:
                text.append(f"shr.u32 t, e, {4 * i}; lop3.b32 t, t, 0xF, 0x4B000000, 0xEA;")
            else:
                text.append(f"prmt.b32 t, e, 0x4B000000, {0x7440 + i:#x};")
            text.append(f"mov.b32 {name}, t; sub.rn.f32 {name}, {name}, c; mul.rn.f32 {name}, {name}, s;")
        text.append(f"cvt.rn.{kind}x2.f32 ${j}, b, a;")
    return " ".join([*text, "}"])


@triton.constexpr_function
def apart_asm(kind: str, signed: bool) -> str:
    """$0 = two weights of the word $1, those at bit $2 and at bit $2 + 16, times the halves of $3: as `nibbles_asm`."""
    one = 0x43004300 if kind == "bf16" else 0x64006400
    less = one + 0x00080008 if signed else one
    return (
        f"{{ .reg .b32 r, c; mov.b32 c, {less:#x}; shr.u32 r, $1, $2; lop3.b32 r, r, 0x000F000F, {less:#x}, 0x6A;"
        f" sub.rn.{kind}x2 r, r, c; mul.rn.{kind}x2 $0, r, $3; }}"
    )


@triton.constexpr_function
def neighbours_asm(kind: str, signed: bool) -> str:
    """$0 = the two weights of the byte $2 of the word $1, times the halves of $3: as `nibbles_asm`."""
    one = 0x43004300 if kind == "bf16" else 0x64006400
    less = one + 0x00080008 if signed else one
    return (
        f"{{ .reg .b32 r, c; mov.b32 c, {less:#x}; prmt.b32 r, $1, 0, $2; mul.lo.u32 r, r, 0x1001;"
        f" lop3.b32 r, r, 0x000F000F, {less:#x}, 0x6A; sub.rn.{kind}x2 r, r, c; mul.rn.{kind}x2 $0, r, $3; }}"
    )


@triton.constexpr_function
def pair_exact_asm(kind: str, signed: bool, apart: int) -> str:
    """$0 = two weights of the word $1, those at bit $2 and `apart` above, less the f32 $4, which has the power of two
    in it, times the f32 $3: as `exact_asm`."""
    flip = f" xor.b32 t, t, {8 + (8 << apart):#x};" if signed else ""
    return (
        f"{{ .reg .b32 t, u; .reg .f32 a, b, s, c; shr.u32 t, $1, $2;{flip} shr.u32 u, t, {apart};"
        " lop3.b32 t, t, 0xF, 0x4B000000, 0xEA; lop3.b32 u, u, 0xF, 0x4B000000, 0xEA;"
        " mov.b32 a, t; mov.b32 b, u; mov.b32 s, $3; mov.b32 c, $4;"
        " sub.rn.f32 a, a, c; mul.rn.f32 a, a, s; sub.rn.f32 b, b, c; mul.rn.f32 b, b, s;"
        f" cvt.rn.{kind}x2.f32 $0, b, a; }}"
    )


@gluon.jit
def bits_of_scale(scale, PAIR: gl.constexpr):
    """A scale as a word: of f32, or twice those of a 16-bit float."""
    if PAIR:
        return (scale.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x10001
    else:
        return scale.to(gl.float32).to(gl.int32, bitcast=True)


@gluon.jit
def shift_of(zero_point, PACKED: gl.constexpr, SIGNED: gl.constexpr):
    """The bits of what is subtracted from 2**23 plus the stored, unsigned value."""
    HALF: gl.constexpr = (8 if PACKED else 128) if SIGNED else 0
    zero_point = gl.minimum(gl.maximum(zero_point, -MAX_ZERO_POINT), MAX_ZERO_POINT)
    return (zero_point + (8388608 + HALF)).to(gl.float32).to(gl.int32, bitcast=True)


@gluon.jit
def decode_nibbles(packed, scale, DTYPE: gl.constexpr, SIGNED: gl.constexpr):
    """The two weights of each byte times a scale of their own type, as the halves of an int32."""
    ASM: gl.constexpr = nibbles_asm(name_of(DTYPE), SIGNED)
    return gl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r,r,r,r,r", [packed, scale], dtype=gl.int32, is_pure=True, pack=4
    )


@gluon.jit
def decode_nibbles_exactly(packed, scale, shift, DTYPE: gl.constexpr, SIGNED: gl.constexpr):
    """The two weights of each byte, less a `shift_of` and times a scale in f32, as the halves of an int32."""
    ASM: gl.constexpr = exact_asm(name_of(DTYPE), True, SIGNED)
    return gl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [packed, scale, shift], dtype=gl.int32, is_pure=True, pack=4
    )


@gluon.jit
def decode_apart(word, bit, scale, DTYPE: gl.constexpr, SIGNED: gl.constexpr):
    """Of words of eight weights, those at a bit and 16 above, times a scale of their own type, as the halves of an
    int32."""
    ASM: gl.constexpr = apart_asm(name_of(DTYPE), SIGNED)
    return gl.inline_asm_elementwise(ASM, "=r,r,r,r", [word, bit, scale], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def decode_apart_exactly(word, bit, scale, shift, DTYPE: gl.constexpr, SIGNED: gl.constexpr):
    """The same, less a `shift_of` and times a scale in f32."""
    ASM: gl.constexpr = pair_exact_asm(name_of(DTYPE), SIGNED, 16)
    return gl.inline_asm_elementwise(ASM, "=r,r,r,r,r", [word, bit, scale, shift], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def decode_neighbours(word, byte, scale, DTYPE: gl.constexpr, SIGNED: gl.constexpr):
    """The two weights of a byte of each word times a scale of their own type, as the halves of an int32."""
    ASM: gl.constexpr = neighbours_asm(name_of(DTYPE), SIGNED)
    return gl.inline_asm_elementwise(
        ASM, "=r,r,r,r", [word, 0x4440 + byte, scale], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def decode_neighbours_exactly(word, byte, scale, shift, DTYPE: gl.constexpr, SIGNED: gl.constexpr):
    """The same, less a `shift_of` and times a scale in f32."""
    ASM: gl.constexpr = pair_exact_asm(name_of(DTYPE), SIGNED, 4)
    return gl.inline_asm_elementwise(
        ASM, "=r,r,r,r,r", [word, 8 * byte, scale, shift], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def halves(pairs, DTYPE: gl.constexpr):
    """The low and the high 16 bits of int32, each a float."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)


@gluon.jit
def decode_bytes(stored, scale, shift, DTYPE: gl.constexpr):
    """s8 weights, less a `shift_of` and times a scale in f32."""
    ASM: gl.constexpr = exact_asm(name_of(DTYPE), False, True)
    if name_of(DTYPE) == "bf16":  # Triton 3.6 takes no constexpr for a type
        return gl.inline_asm_elementwise(
            ASM, "=r,=r,r,r,r,r,r,r,r,r,r", [stored, scale, shift], dtype=gl.bfloat16, is_pure=True, pack=4
        )
    else:
        return gl.inline_asm_elementwise(
            ASM, "=r,=r,r,r,r,r,r,r,r,r,r", [stored, scale, shift], dtype=gl.float16, is_pure=True, pack=4
        )
