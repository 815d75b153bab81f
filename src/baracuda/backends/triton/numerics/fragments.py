"""Words of four-bit weights to the fragments of a tensor-core instruction, without shared memory.

A thread that loads 16 bytes of a row has two blocks of 16 weights. An instruction adds up one block, a quarter of which
each of the four threads has that share the row (a quad). So the quad exchanges pieces of 4 weights. Piece p of the
blocks that thread s has loaded goes to thread s ^ p: what is sent does not depend on the thread, and the activations
lie in shared memory in that order.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.constexpr_function
def exchange_asm() -> str:
    """$0, $1: of the first blocks of threads 0 and 2, and of threads 1 and 3, this thread's pieces; $2, $3: of their
    second ones. $4 to $7 are the words that were loaded, $8, $12 and $16 the `orders` of the thread.

    First the threads that differ in bit 1 exchange words, then those that differ in bit 0 halves of words. The bytes
    of a piece come out at 0 and 2 for the lower of the two threads, at 1 and 3 for the other.
    """
    swap = "shfl.sync.bfly.b32 {0}, {1}, {2}, 0x1f, 0xffffffff;"
    text = ["{ .reg .b32 a, b, k, l, s, t, h;"]
    text += [swap.format("a", "$5", 2), swap.format("b", "$7", 2), "add.u32 h, $8, 0x2222;"]
    text += ["prmt.b32 k, $4, a, $8; prmt.b32 s, $4, a, h;", "prmt.b32 l, $6, b, $8; prmt.b32 t, $6, b, h;"]
    text += [swap.format("s", "s", 1), swap.format("t", "t", 1)]
    text += ["prmt.b32 $0, k, s, $12; prmt.b32 $1, k, s, $16;", "prmt.b32 $2, l, t, $12; prmt.b32 $3, l, t, $16; }"]
    return " ".join(text)


@gluon.jit
def orders(thread):
    """What `exchanged` needs to know of the threads of a quad, numbered by `thread`."""
    upper = thread & 2
    odd = thread & 1
    return gl.where(upper == 0, 0x5140, 0x1504), gl.where(odd == 0, 0x3210, 0x7654), gl.where(odd == 0, 0x7654, 0x3210)


@gluon.jit
def exchanged(words, orders):
    """Words that hold in turn, in byte order and beginning with the low half of a byte, one weight of a block that
    the lower and one of a block that the upper two threads have loaded: of first blocks, even then odd threads, and of
    second ones. The last axis is the four words that a thread has loaded."""
    pieces, even, odd = orders
    ASM: gl.constexpr = exchange_asm()
    return gl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r" + ",r" * 16, [words, pieces, even, odd], dtype=gl.int32, is_pure=True, pack=4
    )


@gluon.jit
def every_other(units):
    """Of the four 16-bit values of an int64, the even and the odd ones, as two words."""
    low = units.to(gl.int32)
    high = (units >> 32).to(gl.int32)
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;", "=r,=r,r,r", [low, high],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
