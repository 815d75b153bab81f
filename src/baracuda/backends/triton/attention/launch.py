"""Attention from tensors to the device.

Triton's own launcher serves here: sizes differ from step to step, and where steps repeat they are in a CUDA graph.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from ..launch import captures_pdl
from ..tune import blocks_of
from . import kernels, tune
from .kernels import Sizes, Strides

#: What twice a byte of the mask must be at least: one of a key that is seen, or any. Neither is 1 or a multiple of 16,
#: for which Triton compiles a kernel of its own.
SEEN, EVERY = 2, -2


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, causal: bool = False
) -> Tensor:
    """As `backends.attention.attend`, of operands that it does not decline."""
    query, key, value = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (query, key, value))
    batch, count, tokens, d = query.shape
    shared, keys, dv = key.shape[1], key.shape[2], value.shape[-1]
    out = query.new_empty(batch, tokens, count, dv)
    if not out.numel():
        return out
    tile, places = tune.heads(count // shared, d, dv), batch * tokens * shared
    sizes = Sizes(shared, count // shared, tokens, keys, max(blocks_of(keys, tile.part), 1), d, dv)
    # Without a mask every byte will do; the kernel is the same.
    seen, step, least = out.view(torch.uint8)[:1, :1, :1, :1], 0, EVERY
    if mask is not None:
        seen, step, least = mask.view(torch.uint8), mask.stride(3), SEEN
    partial = None
    if sizes.parts > 1:
        partial = query.new_empty(places * sizes.parts * sizes.group * (tile.dv + 2), dtype=torch.float32)
    # As in `launch.compile_kernel`: measured on Hopper alone.
    pdl = query.is_cuda and torch.cuda.get_device_capability(query.device)[0] == 9 and captures_pdl()
    # No product is fused with a sum: the compiler chooses which anew for calls with a mask and for calls with parts.
    options = {"TILE": tile, "PDL": pdl, "launch_pdl": pdl, "num_warps": tile.warps, "enable_fp_fusion": False}
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        kernels.attend[(places * sizes.parts,)](
            query, key, value, seen, out, partial, *map(_strides, (query, key, value, seen)),
            step, least, sizes, SCALE=d**-0.5 if scale is None else scale, CAUSAL=causal, num_stages=tile.stages,
            **options,
        )  # fmt: skip
        if partial is not None:
            kernels.merge[(places,)](out, partial, sizes, **options)
    return out


def _strides(x: Tensor) -> Strides:
    """Of four axes; 0 along one of length 1, which is the same for all."""
    return Strides(*(0 if size == 1 else step for size, step in zip(x.shape[:3], x.stride()[:3], strict=True)))
