"""Indices and offsets: their width, and their division by numbers that are known at the launch."""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
# ruff: noqa: RET505
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .conversions import INTERPRETED


class Split(NamedTuple):
    """A number to divide indices by, with its reciprocal as an integer factor and a shift: see `split_by`."""

    by: Any
    factor: Any
    shift: Any


def split_by(by: int) -> Split:
    """What `split_index` takes: n // by is the high half of 2n * factor, shifted, for all n below 2**31.

    With by <= 2**shift, factor * by exceeds 2**(31 + shift) by at most `by`, too little for n of them to reach the next
    quotient. A factor has its highest bit set, so that as an int32, which it is passed as, it is negative.
    """
    shift = (by - 1).bit_length()
    return Split(by, 2 ** (31 + shift) // by + 1 - 2**32, shift)


class Place(NamedTuple):
    """Where a tile lies: the offsets at which its lines start, its first column, how wide the lines are and which of
    them exist."""

    start: Any
    column: Any
    width: Any
    valid: Any


@triton.jit
def split_index(n, split, WIDE: tl.constexpr):
    """(n // split.by, n % split.by) of an index of 31 bits.

    A division by a number that only the launch knows takes thirty instructions, and a program's first load waits for
    them.
    """
    quotient = (tl.umulhi(n.to(tl.uint32) * 2, split.factor.to(tl.uint32)) >> split.shift.to(tl.uint32)).to(tl.int32)
    rest = n - quotient * split.by
    if WIDE:
        return quotient.to(tl.int64), rest.to(tl.int64)
    else:
        return quotient, rest


@triton.jit
def loop_bound(n):
    """An integer that `range` takes: the interpreter keeps scalars in arrays of one element, which numpy refuses."""
    if INTERPRETED:
        return n.handle.data.item()
    else:
        return n


@triton.jit
def as_offset(n, WIDE: tl.constexpr):
    """An index or a size in the bits that offsets into the tensor take. Widen before multiplying, not after."""
    return n.to(tl.int64) if WIDE else n


@triton.jit
def lanes(COLS: tl.constexpr, VECTOR: tl.constexpr):
    """0, 1, ..., COLS - 1, of which a thread is given VECTOR neighbours at most (0: as many as one access takes).

    Where each column has a scale of its own, fewer columns in a thread mean fewer scales to keep and more use of each.
    """
    if VECTOR == 0:
        return tl.arange(0, COLS)
    else:
        return tl.max_contiguous(tl.arange(0, COLS), VECTOR)


@triton.jit
def existing(place, columns, width):
    """Which elements of a tile exist: those of its valid lines, in columns below `width`."""
    inside = place.valid & (columns < width)
    if INTERPRETED:  # where a comparison of scalars is int32 once it is spread over a tile, and 3.9 takes no such mask
        return inside != 0
    else:
        return inside


@triton.jit
def columns_at(place, COLS: tl.constexpr, VECTOR: tl.constexpr):
    """(a tile's columns, which of its elements exist). Add place.start to a pointer first, then the columns: the start
    is the same for a whole line."""
    columns = place.column + lanes(COLS, VECTOR)[None, :]
    return columns, existing(place, columns, place.width)
