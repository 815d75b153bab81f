"""Which GEMMs for the fewest tokens quantize their activations themselves, and with which tile: pure functions.

Every program quantizes all activations, once, and keeps them in shared memory. That costs little while the weight is
on its way, and saves the kernel before.
"""

from __future__ import annotations

from dataclasses import replace

from ..tune import power_of_two
from . import tune

#: The most tokens a GEMM quantizes.
TOKENS = 4
#: The most bytes of activations that a thread holds, between its look for the largest and the division.
HELD = 128
#: Bytes of shared memory of a multiprocessor, and of a program besides its weights and activations: what the system
#: takes, barriers, scales and the exchange between warps.
SHARED, BESIDES = 228 * 1024, 1536


def few(tile: tune.Few, m: int, n: int, k: int, element_bytes: int, packed: bool, processors: int) -> tune.Few | None:
    """The tile of a GEMM that quantizes: the one it has anyway, with fewer programs where all fit one round, or with
    more warps that share the work. None where a kernel before does it."""
    if m > TOKENS or tile.wgmma:
        return None
    for warps in (tile.warps, 2 * tile.warps):
        rows = max(tile.rows, 16 * warps)
        most = tile.programs * tile.rows // rows
        wide = replace(tile, rows=rows, warps=warps)
        kept = tile.tokens * steps(wide, k, packed) * wide.span(packed)
        programs = min(most, SHARED // (rows * tile.k * tile.stages + kept + BESIDES))
        one_round = -(-n * tile.fold // rows) <= programs * processors
        if holds(m, k, element_bytes, warps) and programs and (programs == most or one_round):
            return replace(wide, programs=programs)
    return None


def direct(tile: tune.Direct, m: int, k: int, element_bytes: int) -> tune.Direct | None:
    """The tile of a direct GEMM that quantizes, the one it has anyway; None where a kernel before does it."""
    return tile if m <= TOKENS and holds(m, k, element_bytes, tile.warps) else None


def steps(tile: tune.Few, k: int, packed: bool) -> int:
    """Steps along a folded row."""
    return -(-k // (tile.fold * tile.span(packed)))


def holds(m: int, k: int, element_bytes: int, warps: int) -> bool:
    """Whether the threads of a program can hold all activations."""
    return power_of_two(m) * k * element_bytes <= HELD * 32 * warps
