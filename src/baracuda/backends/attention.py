"""Attention by baracuda's kernels: by the CPU's or the GPU's, or why by neither.

Both promise a row the same bits in every batch, behind any padding on the left, and whether a prompt is read at once or
token by token. The bits of the two differ: the GPU multiplies 16-bit floats in its matrix unit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu import attention as cpu

_FLOATS = {"cpu": (torch.bfloat16, torch.float16, torch.float32), "cuda": (torch.bfloat16, torch.float16)}
#: The most elements of a head, and the most queries that share a key, of a GPU's kernel.
_WIDEST = 256


def declines(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str | None:
    """Why the kernel of the device does not compute it; None where it does."""
    kind = query.device.type
    if kind not in _FLOATS:
        return f"the kernels run on CPUs and NVIDIA GPUs, not on {kind}"
    if (why := cpu.MISSING if kind == "cpu" else _device_declines(query.device.index)) is not None:
        return why
    if query.dtype not in _FLOATS[kind] or not query.dtype is key.dtype is value.dtype:
        wanted = "f16, bf16 or f32" if kind == "cpu" else "f16 or bf16"
        return f"expected {wanted} for all, got {query.dtype}, {key.dtype} and {value.dtype}"
    if not query.ndim == key.ndim == value.ndim == 4:
        return f"expected four axes, got {query.ndim}, {key.ndim} and {value.ndim}"
    (batch, heads, tokens, d), (_, shared, keys, _) = query.shape, key.shape
    if key.shape != (batch, shared, keys, d) or value.shape[:3] != key.shape[:3] or not shared or heads % shared:
        return f"expected keys and values that fit, got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
    if kind == "cuda" and max(d, value.shape[3], heads // shared) > _WIDEST:
        found = f"{d} and {value.shape[3]}, and {heads // shared} queries"
        return f"expected {_WIDEST} elements of a head and queries of a key at most, got {found}"
    if mask is not None and (
        mask.dtype is not torch.bool
        or mask.ndim != 4
        or mask.shape[0] not in (1, batch)
        or mask.shape[1] != 1
        or mask.shape[2] not in (1, tokens)
        or mask.shape[3] != keys
    ):
        wanted = str([batch, 1, tokens, keys])
        return f"expected a mask of bools {wanted}, got {mask.dtype} {list(mask.shape)}"
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _device_declines(index: int) -> str | None:
    from .triton.devices import cannot_run

    return cannot_run(torch.device("cuda", index))


def is_faster(query: Tensor) -> bool:
    """Whether the kernel takes less time than torch's: on a GPU for one token inside torch.compile, as elsewhere the
    host sets the pace; on a CPU not for prompts in bf16 where it has a matrix unit."""
    if query.is_cuda:
        return query.shape[2] == 1 and torch.compiler.is_dynamo_compiling()
    return query.dtype is not torch.bfloat16 or not cpu.HAS_MATRIX_UNIT or query.shape[2] == 1


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, causal: bool = False
) -> Tensor:
    """softmax(query @ key.T * scale) @ value as `[batch, tokens, heads, d]`, of `[batch, heads, tokens, d]` each.

    Several heads of queries may share one of keys. `mask` says which keys a token attends to; without one it attends
    to all, or with `causal` token t to the keys 0 to t. A token that attends to none gets zeros.
    """
    if query.is_cuda:
        from .triton.attention.launch import attend as on_gpu

        return on_gpu(query, key, value, mask, scale, causal)
    return cpu.attend(query, key, value, mask, scale, causal)
