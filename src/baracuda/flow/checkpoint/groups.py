"""Group sizes of 4-bit weights: which one fits a layer, and which ones servers take."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ...schemes import Scheme

#: Group sizes of 4-bit weights that the kernels of servers take.
SERVED_GROUPS = (32, 64, 128)
#: Packed weights are read in words of eight: every group size is a multiple of it.
STEP = 8


def fitting(scheme: Scheme, *columns: int) -> Scheme:
    """The scheme in groups that divide these columns: the size asked for, else the next smaller one that servers take.

    Where none fits, the scheme comes back as it is, and the layer stays in floating point.
    """
    size = scheme.weight.group_size
    if size is None or not any(k % size for k in columns):
        return scheme
    served = [s for s in SERVED_GROUPS if s < size and not any(k % s for k in columns)]
    return scheme.with_groups(max(served)) if served else scheme


def usable_size(columns: Iterable[int], most: int) -> int | None:
    """The largest group size up to `most` that divides all these columns, to be asked for; None where none does."""
    common = math.gcd(*columns)
    return next((size for size in range(most - most % STEP, 0, -STEP) if common % size == 0), None)


def unserved_groups(sizes: Iterable[int | None]) -> str | None:
    """A sentence about group sizes that servers may refuse, or None where there are none."""
    odd = sorted({size for size in sizes if size is not None} - set(SERVED_GROUPS))
    if not odd:
        return None
    sizes_served = ", ".join(map(str, SERVED_GROUPS))
    return (
        f"Groups of {', '.join(map(str, odd))} are read by baracuda.load and transformers; vLLM's kernels take groups "
        f"of {sizes_served}, and it may refuse this checkpoint."
    )
