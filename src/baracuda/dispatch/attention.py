"""`baracuda::attention`: what compilers, modes and tracers see of attention by baracuda's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends.attention import attend
from .operators import LIBRARY


def _fake(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    batch, heads, tokens, _d = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1])


LIBRARY.define(  # type: ignore[no-untyped-call]
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float? scale, bool causal) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _key in ("CPU", "CUDA"):
    LIBRARY.impl("attention", attend, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("baracuda::attention", _fake, lib=LIBRARY)
#: `attend` through torch's dispatcher.
attention = torch.ops.baracuda.attention.default
