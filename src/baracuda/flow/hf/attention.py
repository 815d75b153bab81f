"""Attention of transformers models on a CPU by baracuda's kernel: two entries of transformers' own table of functions.

torch's attention of one bf16 token takes ten times as long as ours on a CPU, and its order of summation depends on the
sizes. `FEW` computes calls of one token, `ORDERED` all of them; both leave the rest to torch, `ORDERED` with a warning.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ...autograd import straight_through
from ...backends.cpu.attention import attend, declines
from ...models.attention import FEW, ORDERED
from ...nn.launches import is_plain_call

#: What transformers may hand on that changes the result, beyond what the kernel computes.
_OTHERS = ("softcap", "position_bias", "cache", "s_aux", "output_attentions", "head_mask")
_is_traced = torch.compiler.is_dynamo_compiling


def install() -> None:
    """Add ours to transformers' tables; masks are those that torch's attention gets."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name, function in ((FEW, few), (ORDERED, ordered)):
        ALL_ATTENTION_FUNCTIONS.register(name, function)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def _theirs(*args: Any, **options: Any) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found: tuple[Tensor, None] = sdpa_attention_forward(*args, **options)
    return found


def few(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """One token by our kernel, where nothing is out of the ordinary; more are quicker by torch."""
    if (
        _is_traced()
        or query.shape[2] != 1
        or not is_plain_call(query)
        or _why_not(query, key, value, attention_mask, options) is not None
        or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
    ):
        return _theirs(module, query, key, value, attention_mask, **options)
    return attend(query, key, value, attention_mask, options.get("scaling")), None


def ordered(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """All calls that our kernel takes, with the gradients of torch's."""
    why = _why_not(query, key, value, attention_mask, options)
    if why is None and (_is_traced() or not is_plain_call(query)):
        why = "inside torch.compile, a transform or a mode torch computes it"
    if why is not None:
        warnings.warn(
            f"attention: {why}; the bits of a row may depend on the batch there", RuntimeWarning, stacklevel=2
        )
        return _theirs(module, query, key, value, attention_mask, **options)
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    with torch.no_grad():
        made = attend(query, key, value, attention_mask, options.get("scaling"), causal)
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        made = straight_through(_theirs(module, query, key, value, attention_mask, **options)[0], made)
    return made, None


def _why_not(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> str | None:
    """Why our kernel does not compute a call; None where it does."""
    for name in _OTHERS:
        given = options.get(name)
        if given is not None and given is not False:
            return f"{name} is not in the kernel's formula"
    if options.get("dropout"):
        return "dropout is not in the kernel's formula"
    if torch._C._is_any_autocast_enabled():
        return "autocast decides the type"
    return declines(query, key, value, mask)
