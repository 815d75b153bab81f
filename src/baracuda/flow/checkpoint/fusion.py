"""Layers that servers fuse: they run as one, so they share a scheme and an input scale."""

from __future__ import annotations

from collections.abc import Iterable

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"), ("w1", "w3"))


def fused_with(module: str) -> list[str]:
    """The modules that servers fuse with this one, by their names, this one included."""
    parent, dot, leaf = module.rpartition(".")
    return [f"{parent}{dot}{name}" for name in next((family for family in FUSED if leaf in family), (leaf,))]


#: Group sizes of 4-bit weights that the kernels of servers take.
SERVED_GROUPS = (32, 64, 128)


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
