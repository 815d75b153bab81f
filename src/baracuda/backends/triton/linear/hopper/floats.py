"""Stored weights to the activations' float type: the decoding warps of a weight-only linear."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...numerics.decode import bits_of_scale, decode_bytes, decode_nibbles, decode_nibbles_exactly, shift_of
from .few import wait_for_previous_kernel
from .rings import at_step, spread, unit_at
from .versions import reinterpreted


class FloatForm(NamedTuple):
    """What the weight of a weight-only linear is and when it may be read: the constant FORM."""

    #: Two weights lie in a byte.
    packed: bool
    signed: bool
    #: Weights along K that share a scale; 0: a row has one.
    group: int
    #: The scales have the activations' type and there are no zero points.
    plain: bool
    #: As in `few.Form`.
    early: str
    floats: bool = True


@gluon.jit
def load_qparams(scale_ptr, zero_ptr, at, FORM: gl.constexpr):
    """Scales and zero points as the words that decoding takes."""
    scale = bits_of_scale(gl.load(scale_ptr + at), FORM.plain)
    shift = gl.zeros_like(at)
    if not FORM.plain:
        if zero_ptr.dtype.element_ty == gl.int32:
            shift = gl.load(zero_ptr + at)
        shift = shift_of(shift, FORM.packed, FORM.signed)
    return scale, shift


@gluon.jit
def decode_to_floats(rings, scale_ptr, zero_ptr, work, WHICH: gl.constexpr, TILE: gl.constexpr, FORM: gl.constexpr):
    """Turn stored stages into stages of floats, a thread 16 bytes of a row at a time.

    Neighbouring lanes have different rows, so that their vectors lie in different banks.
    """
    BN: gl.constexpr = rings.stored.stages.shape[1]
    BK: gl.constexpr = rings.stored.stages.shape[2]
    XK: gl.constexpr = rings.x.stages.shape[2]
    STAGES: gl.constexpr = rings.w.stages.shape[0]
    PACKED_STAGES: gl.constexpr = rings.stored.stages.shape[0]
    TEAMS: gl.constexpr = TILE.teams
    DTYPE: gl.constexpr = rings.x.stages.dtype
    # Weights of 16 bytes share a scale.
    EACH: gl.constexpr = 32 if FORM.packed else 16
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = max(8, 512 // BK)
    BYTES: gl.constexpr = gl.BlockedLayout([1, 16], [ROWS, 32 // ROWS], [WARPS, 1], [0, 1])
    PARTS: gl.constexpr = gl.BlockedLayout([1, 1, 16], [ROWS, 32 // ROWS, 1], [WARPS, 1, 1], [0, 1, 2])
    AT: gl.constexpr = gl.SliceLayout(2, PARTS)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BK], gl.int32)
    done = 0
    groups = 1
    if FORM.group > 0:
        groups = work.K // FORM.group
    if FORM.early != "no":
        wait_for_previous_kernel()
    for unit in range(gl.program_id(0), work.units, gl.num_programs(0)):
        _, n, _, begin, count = unit_at(unit, work, TILE)
        first = begin + (WHICH + done) % TEAMS
        row = gl.minimum(n * BN + gl.arange(0, BN, gl.SliceLayout(1, AT)), work.N - 1)
        part = gl.expand_dims(gl.arange(0, BK // 16, gl.SliceLayout(0, AT)) * EACH, 0)
        base = gl.expand_dims(row, 1) * groups + part * 0
        if FORM.group > 0:
            at = base + gl.minimum((first * XK + part) // FORM.group, groups - 1)
            scale, shift = load_qparams(scale_ptr, zero_ptr, at, FORM)
        else:
            scale, shift = load_qparams(scale_ptr, zero_ptr, base, FORM)
        for k in range(first, begin + count, TEAMS):
            p_stage, p_phase = at_step(done + k - begin, PACKED_STAGES)
            stage, phase = at_step(done + k - begin, STAGES)
            next_scale = scale
            next_shift = shift
            if FORM.group > 0:  # before the step that needs them: they come from L2
                at = base + gl.minimum(((k + TEAMS) * XK + part) // FORM.group, groups - 1)
                next_scale, next_shift = load_qparams(scale_ptr, zero_ptr, at, FORM)
            mbarrier.wait(rings.stored.full.index(p_stage), p_phase)
            packed = rings.stored.stages.index(p_stage).load(BYTES)
            wide = spread(scale, BK, BYTES, PARTS)
            if FORM.plain:
                weight = decode_nibbles(packed, wide, DTYPE, FORM.signed)
            elif FORM.packed:
                weight = decode_nibbles_exactly(packed, wide, spread(shift, BK, BYTES, PARTS), DTYPE, FORM.signed)
            else:
                weight = decode_bytes(packed, wide, spread(shift, BK, BYTES, PARTS), DTYPE)
            mbarrier.wait(rings.w.empty.index(stage), phase ^ 1)
            if FORM.packed:
                reinterpreted(rings.w.stages.index(stage), gl.int32, [BN, BK], PAIRS).store(weight)
            else:
                rings.w.stages.index(stage).store(weight)
            fence_async_shared()
            mbarrier.arrive(rings.w.full.index(stage), count=1)
            # Not before: a barrier does not wait for loads under way, and the next copy overwrites what they read. What
            # was stored depends on them.
            mbarrier.arrive(rings.stored.empty.index(p_stage), count=1)
            scale = next_scale
            shift = next_shift
        done += count
