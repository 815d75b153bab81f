"""Layers that servers fuse: they run as one, so they share a scheme and an input scale."""

from __future__ import annotations

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"), ("w1", "w3"))
#: The names of the fused layers in vLLM, in the same order.
FUSED_NAMES = ("qkv_proj", "gate_up_proj", "qkv_proj", "gate_up_proj")


def fused_with(module: str) -> list[str]:
    """The modules that servers fuse with this one, by their names, this one included."""
    parent, dot, leaf = module.rpartition(".")
    return [f"{parent}{dot}{name}" for name in next((family for family in FUSED if leaf in family), (leaf,))]


def fused_name(leaf: str) -> str | None:
    """What servers call the layer that they fuse this one into; None for a layer that runs alone."""
    return next((fused for family, fused in zip(FUSED, FUSED_NAMES, strict=True) if leaf in family), None)
