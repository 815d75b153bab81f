"""Layers that servers fuse: they run as one, so they share a scheme and an input scale."""

from __future__ import annotations

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"), ("w1", "w3"))


def fused_with(module: str) -> list[str]:
    """The modules that servers fuse with this one, by their names, this one included."""
    parent, dot, leaf = module.rpartition(".")
    return [f"{parent}{dot}{name}" for name in next((family for family in FUSED if leaf in family), (leaf,))]
