"""How much of a model is quantized: most of it, or the run stops before it begins."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..checkpoint.directory import Checkpoint
from ..checkpoint.groups import usable_size
from ..errors import FlowError, some
from .layers import EXPERTS, HEAD_STAYS, IGNORED, NO_LINEAR, Structure
from .skeleton import SHARED

#: A larger share of floats has to be allowed.
MOST = 0.5


def require_mostly_quantized(structure: Structure, source: Checkpoint, group_size: int) -> None:
    """Raise where most of the parameters of the Linears would stay in floating point; say what to pass instead."""
    if (share := float_share(structure, source)) <= MOST:
        return
    alike: dict[str, list[str]] = {}
    for module, _ in _floats(structure, source):
        alike.setdefault(structure.left[module], []).append(module)
    largest = sorted(alike.items(), key=lambda item: -len(item[1]))[:3]
    why = "; ".join(f"{some(modules, 1)}: {reason}" for reason, modules in largest)
    raise FlowError(
        f"{source.directory}: {share:.0%} of the parameters of its Linears would stay in floating point ({why}). "
        f"{_remedy(structure, source, group_size)}, or pass --allow-float (in Python, allow_float=True) to accept that"
    )


def float_share(structure: Structure, source: Checkpoint) -> float:
    """The part of the parameters of the Linears, experts included, that stays float; the output head does not count."""
    quantized = sum(math.prod(source.entry(tensor).shape) for tensor in structure.linears)
    left = sum(count for _, count in _floats(structure, source))
    return left / max(1, left + quantized)


def _floats(structure: Structure, source: Checkpoint) -> Iterator[tuple[str, int]]:
    """The Linears that stay float, with their parameters."""
    for module, reason in structure.left.items():
        if reason in (SHARED, HEAD_STAYS, NO_LINEAR):
            continue
        for tensor in (f"{module}.weight", module):
            if tensor in source.where:
                shape = source.entry(tensor).shape
                if len(shape) == 2 or EXPERTS in reason:
                    yield module, math.prod(shape)


def _remedy(structure: Structure, source: Checkpoint, group_size: int) -> str:
    """The option that quantizes more."""
    floats = [module for module, _ in _floats(structure, source)]
    reasons = [structure.left[module] for module in floats]
    unfit = [m for m, reason in zip(floats, reasons, strict=True) if "multiple of the group size" in reason]
    columns = [source.entry(f"{module}.weight").shape[1] for module in unfit if f"{module}.weight" in source.where]
    size = usable_size(columns, group_size) if columns else None
    if size is not None:
        return f"Pass --group-size {size}"
    if any(EXPERTS in reason for reason in reasons):
        return "Use --scheme w4a16, which packs experts that are stored one by one"
    if IGNORED in reasons:
        return "Drop --ignore for some of them"
    return "Use another --scheme"
