"""The host: whether the compiled module `baracuda._host` is there, how it spells types, what the CPU multiplies."""

from __future__ import annotations

import torch

try:
    from .. import _host  # noqa: F401
except ImportError as error:
    MISSING: str | None = f"the compiled module baracuda._host is missing ({error}): pip install ."
else:
    MISSING = None

#: dtypes as DLPack writes them: a code and a number of bits.
DLPACK_DTYPES = {
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.int8: (0, 8),
    torch.uint8: (1, 8),
    torch.int32: (0, 32),
}
DLPACK_DEVICES = {"cpu": 1, "cuda": 2}


def multiplies_bf16() -> bool:
    """Whether this processor has instructions for products of bf16; without them torch takes longer than for f32."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))
