"""Attention of single tokens: a program has one token's queries that share a head of keys, and a part of the keys.

Parts begin at the first key that the token sees, so padding on the left moves no key into another part; `merge` adds
them up in their order. Each query is a row of the matrix unit's tile, whose sums know no other row.
"""

# A branch on a constexpr must end in `else`: Triton compiles what follows a `return` too.
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..numerics.indices import loop_bound
from ..numerics.softmax import average, exponent, hidden, raised, unseen, weight
from ..pdl import wait_for_previous

#: Bytes of a mask that are looked at together.
SCAN = tl.constexpr(1024)


class Strides(NamedTuple):
    """Between batch entries, heads, and tokens or keys."""

    batch: Any
    head: Any
    row: Any


class Sizes(NamedTuple):
    """Heads of keys, queries for each, tokens, keys, and parts of these; the widths of keys and values."""

    heads: Any
    group: Any
    tokens: Any
    keys: Any
    parts: Any
    d: Any
    dv: Any


@triton.jit
def are_seen(row_ptr, step, least, at, end):
    """Whether the keys before `end` are seen: twice the byte of each is at least so much."""
    byte = tl.load(row_ptr + at.to(tl.int64) * step, at < end, other=0)
    return (byte.to(tl.int32) * 2 >= least) & (at < end)


@triton.jit
def first_seen(row_ptr, step, least, keys):
    """The first key that is seen; `keys` if there is none."""
    first = keys
    start = keys * 0
    while (first == keys) & (start < keys):
        at = start + tl.arange(0, SCAN)
        first = tl.min(tl.where(are_seen(row_ptr, step, least, at, keys), at, keys), 0)
        start += SCAN
    return first


@triton.jit
def partial_place(partial_ptr, number, rows, sizes, DV: tl.constexpr):
    """Where a part's rows lie: DV sums each, and behind these the greatest exponent and the sum of the weights."""
    return partial_ptr + (number * sizes.group + rows).to(tl.int64) * (DV + 2)


@triton.jit
def store_average(out_ptr, place, total, weights, sizes):
    """The output's rows of a head of keys, from their sums."""
    rows = tl.arange(0, total.shape[0])[:, None]
    wide = tl.arange(0, total.shape[1])[None, :]
    y = average(total, weights[:, None]).to(out_ptr.dtype.element_ty)
    out = out_ptr + place.to(tl.int64) * sizes.group * sizes.dv
    tl.store(out + rows * sizes.dv + wide, y, (rows < sizes.group) & (wide < sizes.dv))


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, mask_ptr, out_ptr, partial_ptr, q, k, v, mask, mask_step, least, sizes, SCALE: tl.constexpr,
    CAUSAL: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """out[batch, token, head, dv] = softmax(q . k * SCALE) . v; with more than one part the sums of each, as they are.

    `mask_step` is between the keys of the mask; a key is seen whose byte, twice, is `least` or more. There always is a
    mask: by the narrowest type that goes into a product, Triton chooses the order in which the matrix unit takes it.
    CAUSAL: token t sees the keys 0 to t.
    """
    R: tl.constexpr = TILE.rows
    BK: tl.constexpr = TILE.keys
    D: tl.constexpr = TILE.d
    DV: tl.constexpr = TILE.dv
    PART: tl.constexpr = TILE.part
    wait_for_previous(PDL)
    pid = tl.program_id(0)
    part = pid % sizes.parts
    place = pid // sizes.parts  # of the output's rows of a head of keys
    head = (place % sizes.heads).to(tl.int64)
    token = (place // sizes.heads % sizes.tokens).to(tl.int64)
    batch = (place // sizes.heads // sizes.tokens).to(tl.int64)
    keys = tl.full([], sizes.keys, tl.int32)  # also of one key, which the compiler takes for a constant
    if CAUSAL:
        keys = tl.minimum(keys, token.to(tl.int32) + 1)
    seen_ptr = mask_ptr + batch * mask.batch + token * mask.row
    begin = part * PART + first_seen(seen_ptr, mask_step, least, keys)
    end = tl.minimum(begin + PART, keys)

    rows = tl.arange(0, R)
    columns = tl.arange(0, D)
    wide = tl.arange(0, DV)
    of_group = rows < sizes.group
    queries = q_ptr + batch * q.batch + token * q.row
    queries += ((head * sizes.group + rows) * q.head)[:, None] + columns[None, :]
    query = tl.load(queries, of_group[:, None] & (columns < sizes.d)[None, :], other=0)
    k_ptr += batch * k.batch + head * k.head
    v_ptr += batch * v.batch + head * v.head
    greatest = unseen([R])
    weights = tl.zeros([R], tl.float32)
    total = tl.zeros([R, DV], tl.float32)
    for start in range(loop_bound(begin), loop_bound(end), BK):
        at = start + tl.arange(0, BK)
        seen = are_seen(seen_ptr, mask_step, least, at, end)
        row = at.to(tl.int64)
        key = tl.load(
            k_ptr + (row * k.row)[None, :] + columns[:, None], seen[None, :] & (columns < sizes.d)[:, None], other=0
        )
        value = tl.load(
            v_ptr + (row * v.row)[:, None] + wide[None, :], seen[:, None] & (wide < sizes.dv)[None, :], other=0
        )
        exponents = hidden(exponent(tl.dot(query, key), SCALE), seen[None, :])
        greater, base = raised(greatest, tl.max(exponents, 1))
        shares = weight(exponents, base[:, None])
        less = weight(greatest, base)
        weights = weights * less + tl.sum(shares, 1)
        total = tl.dot(shares.to(value.dtype), value, total * less[:, None])
        greatest = greater
    if partial_ptr is None:
        store_average(out_ptr, place, total, weights, sizes)
    else:
        to = partial_place(partial_ptr, pid, rows, sizes, DV)
        tl.store(to[:, None] + wide[None, :], total, of_group[:, None])
        tl.store(to + DV, greatest, of_group)
        tl.store(to + DV + 1, weights, of_group)


@triton.jit
def merge(out_ptr, partial_ptr, sizes, TILE: tl.constexpr, PDL: tl.constexpr = False):
    """The output from the sums of the parts, the earlier ones first."""
    R: tl.constexpr = TILE.rows
    DV: tl.constexpr = TILE.dv
    wait_for_previous(PDL)
    place = tl.program_id(0)
    rows = tl.arange(0, R)
    wide = tl.arange(0, DV)
    of_group = rows < sizes.group
    greatest = unseen([R])
    weights = tl.zeros([R], tl.float32)
    total = tl.zeros([R, DV], tl.float32)
    for part in range(loop_bound(sizes.parts)):
        of = partial_place(partial_ptr, place * sizes.parts + part, rows, sizes, DV)
        further = tl.load(of + DV, of_group, other=0)
        greater, base = raised(greatest, further)
        less, its = weight(greatest, base), weight(further, base)
        weights = weights * less + tl.load(of + DV + 1, of_group, other=0) * its
        sums = tl.load(of[:, None] + wide[None, :], of_group[:, None], other=0)
        total = total * less[:, None] + sums * its[:, None]
        greatest = greater
    store_average(out_ptr, place, total, weights, sizes)
