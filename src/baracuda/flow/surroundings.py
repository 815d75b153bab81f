"""What transformers' code around a Linear does with its weight, besides calling the Linear: read, or tried out."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn


def casts_to_its_type(around: nn.Module, name: str) -> bool:
    """Whether the module that holds a Linear under `name` casts to the type of its weight, whatever that is.

    Told by its source: `x.to(self.proj.weight.dtype)` would cut activations down to integers. Code that looks first
    whether the type is an integer's does no harm.
    """
    kind: Any = type(around)
    asked = rf"\bself\.{re.escape(name)}\.weight\.dtype\b"
    careful = rf"{asked}\s*(!=\s*torch\.u?int8\b|\)\.is_floating_point\b)"
    return any(re.search(asked, code) and not re.search(careful, code) for code in _functions(kind))


@cache
def _functions(kind: type) -> tuple[str, ...]:
    """The source of a model's module, function by function; nothing where it is none of transformers' models."""
    found = []
    for owner in kind.__mro__:
        if owner.__module__.startswith("transformers.models."):
            for value in map(inspect.unwrap, filter(callable, vars(owner).values())):
                if inspect.isfunction(value):
                    found.append(_source(value))
    return tuple(found)


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except OSError:  # installed without its source
        return ""


def needs_float_weights(model: nn.Module, packed: Iterable[str]) -> bool:
    """Whether transformers fails on `packed` Linears, which compressed-tensors leaves without a float weight.

    After loading it initializes what no file holds, and the code of some models asks every Linear for its weight then.
    This is that step, with everything marked as loaded; `model`, on the meta device, is of no use afterwards.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    for name in packed:
        del model.get_submodule(name).weight
    try:
        with torch.device("meta"):
            model.initialize_weights()  # type: ignore[operator]
    except AttributeError as error:
        return "attribute 'weight'" in str(error)
    except Exception:  # initialization of another kind fails on the meta device: nothing is known then
        return False
    return False
