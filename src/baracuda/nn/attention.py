"""Attention of modules by baracuda's kernels, in the place of a function that computes it by torch's.

torch's attention of one bf16 token takes ten times as long as ours on a CPU, that of a prompt up to three times. On a
GPU it copies keys and values for each head of queries that shares them. And its order of summation depends on the
sizes. A module takes the kernel when it is marked; the mark is a string in its dictionary, which copies and files keep.
`flow.hf.attention` puts the function into transformers' table.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import straight_through
from ..backends.attention import attend, declines, is_faster
from ..dispatch.attention import attention as dispatched
from .launches import has_tangents, is_plain_call, is_transformed

Function = Callable[..., tuple[Tensor, Any]]

#: Where a module says who computes its attention: our kernel where it is the faster one; our kernel in every call, for
#: its order of summation; or torch's alone, because someone asked for that.
MARK = "_baracuda_attention"
FASTER, ORDERED, TORCHS = "faster", "ordered", "torch"
#: Options that change the result and are not in the kernel's formula.
_OTHERS = frozenset({"softcap", "position_bias", "cache", "s_aux", "output_attentions", "head_mask"})
_is_traced = torch.compiler.is_dynamo_compiling
Calls = dict[nn.Module, str | None]


class _Recorder(local):
    """While a thread records calls: why the kernel would not take those of a module, by module."""

    calls: Calls | None = None


_recorder = _Recorder()


@contextmanager
def recording() -> Iterator[Calls]:
    """The modules whose attention is called while in use, each with the reason why the kernel declines one; or None."""
    found: Calls = {}
    _recorder.calls = found
    try:
        yield found
    finally:
        _recorder.calls = None


def marked(theirs: Function) -> Function:
    """A function of transformers' kind, in the place of `theirs`: that, but for modules that are marked."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Any]:
        given = (query, key, value, attention_mask)
        if _is_traced():
            how, calls = getattr(module, MARK, None), None
        else:
            how, calls = module.__dict__.get(MARK), _recorder.calls
        if calls is not None:
            calls[module] = calls.get(module) or _why_not(*given, options)
        elif how == ORDERED:
            return _ordered(theirs, module, *given, options)
        elif how == FASTER and is_faster(query) and not _learns(*given[:3]) and _why_not(*given, options) is None:
            kernel = _kernel(*given[:3])
            if kernel is not None:
                return kernel(*given, *_constants(module, query, attention_mask, options)), None
        return theirs(module, *given, **options)

    attention.__dict__["theirs"] = theirs
    return attention


def _ordered(
    theirs: Function,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Any]:
    """By our kernel, with the gradients of theirs; a warning where it does not take the call."""
    why, kernel = _why_not(query, key, value, mask, options), _kernel(query, key, value)
    if why is not None or kernel is None:
        if not _is_traced():
            why = why or "a transform or a subclass must see torch's operators"
            text = f"attention is torch's in this call: {why}; the bits of a row may depend on the batch"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        return theirs(module, query, key, value, mask, **options)
    with torch.no_grad():
        made = kernel(query, key, value, mask, *_constants(module, query, mask, options))
    if _learns(query, key, value):
        made = straight_through(theirs(module, query, key, value, mask, **options)[0], made)
    return made, None


def _constants(
    module: nn.Module, query: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> tuple[float | None, bool]:
    """The factor of the scores, and whether tokens do not see later ones: by the module where no one says it."""
    causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    return options.get("scaling"), causal and mask is None and query.shape[2] > 1


def _kernel(query: Tensor, key: Tensor, value: Tensor) -> Callable[..., Tensor] | None:
    """The kernel, or its operator where compilers and modes must see it; None where only torch's will do."""
    if _is_traced():
        return dispatched
    tensors = (query, key, value)
    if torch._C._get_tracing_state() is None and all(is_plain_call(x) and not x.is_neg() for x in tensors):
        return attend
    return None if has_tangents() or any(is_transformed(x) for x in tensors) else dispatched


def _learns(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _why_not(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> str | None:
    """Why our kernel does not compute such a call; None where it does."""
    for name in () if _OTHERS.isdisjoint(options) else _OTHERS:
        given = options.get(name)
        if given is not None and given is not False:
            return f"{name} is not in the kernel's formula"
    if options.get("dropout"):
        return "dropout is not in the kernel's formula"
    if torch._C._is_any_autocast_enabled():
        return "autocast decides the type"
    return declines(query, key, value, mask)
