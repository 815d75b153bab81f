"""Experts of a mixture: each is a matrix in the checkpoint, and a slice of one stacked tensor in transformers' model.

transformers' reader of compressed-tensors collects experts from `weight_packed`, `weight_scale` and `weight_shape`, and
from no other names; vLLM's kernels for packed experts take float activations. Experts are therefore weight-only and
packed in every scheme. Their scheme is the default of the config, where readers look for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...core.versions import minor
from ...schemes import ActivationFormat, Scheme
from ..checkpoint.storage import Storage
from ..errors import FlowError

#: What packed experts are stored as; a plain weight is one that stayed in floating point.
SERIALIZED = ("weight_packed", "weight_scale", "weight_shape", "weight")
#: Since this transformers a quantizer, ours too, is asked for the rules by which experts are collected.
HOOK = (5, 8)
#: Since this one its own reader of compressed-tensors collects packed experts, and no longer finds float ones.
PACKED = (5, 13)
_FLOAT = re.compile(r"(?<!shared_)experts")


def weight_only(scheme: Scheme) -> Scheme:
    """The scheme of the experts of a model whose Linears have this one: the same weights, float activations."""
    weight = replace(scheme.weight, factors=False)  # which integer linears alone need
    return replace(scheme, weight=weight, activation=ActivationFormat("float"))


def stacked_experts(model: nn.Module) -> Callable[[str], bool]:
    """A function that tells whether transformers stacks a checkpoint tensor into the experts of this model."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # an older transformers, whose experts are nn.Linear modules
        return lambda tensor: False
    sources = {source for conversion in get_model_conversion_mapping(model) for source in expert_sources(conversion)}
    endings = "|".join(re.escape(source.lstrip(".")).replace(r"\*", r"\d+") for source in sorted(sources))
    pattern = re.compile(rf"(^|\.)({endings})$") if sources else None
    return lambda tensor: pattern is not None and pattern.search(tensor) is not None


def require_readable_experts(model: nn.Module, ignore: Iterable[str]) -> None:
    """Raise where this transformers would fill the experts of a checkpoint with random numbers.

    A config that leaves experts in floating point says so in `ignore`, of all of them.
    """
    version = _transformers()
    if version >= HOOK or any(_FLOAT.search(pattern) for pattern in ignore):
        return
    from transformers import __version__
    from transformers.conversion_mapping import get_model_conversion_mapping

    if any(expert_sources(rule) for rule in get_model_conversion_mapping(model)):
        raise FlowError(
            f"{type(model).__name__}: quantized experts need transformers 5.8 or newer, got {__version__}: "
            "pip install 'transformers>=5.8,<6'"
        )


def who_reads_packed() -> str | None:
    """What to know about packed experts where this transformers does not read them by itself."""
    if _transformers() >= PACKED:
        return None
    from transformers import __version__

    needs = "" if _transformers() >= HOOK else ", which needs transformers 5.8 or newer for it"
    return (
        f"transformers {__version__} does not find quantized experts with its own reader of compressed-tensors, and "
        f"would start with random ones: 5.13 and newer do. Servers read them, and so does baracuda.load{needs}."
    )


def _transformers() -> tuple[int, int]:
    """The version of transformers, a build without numbers being the newest."""
    from transformers import __version__

    return minor(__version__) or (99, 0)


def unstacked_experts(model: nn.Module) -> str | None:
    """The class of experts in this model that transformers' reader of compressed-tensors replaces, or None."""
    try:
        from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION as PATCHED
    except ImportError:  # a transformers that does not
        return None
    kinds = {type(module).__name__ for module in model.modules()}
    return next((kind for kind in PATCHED if kind in kinds), None)


def expert_sources(conversion: Any) -> list[str]:
    """The patterns of expert weights that one of transformers' conversions takes."""
    return [name for name in conversion.source_patterns if "experts.*." in name and name.endswith(".weight")]


def float_experts(storage: Storage, collected: dict[str, list[Tensor]], dtype: torch.dtype) -> dict[str, Any]:
    """Experts as float ones are collected: `collected` maps a pattern of names to the tensors of all experts.

    They stay a list. Every version of transformers stacks one; before 5.13 it takes nothing else.
    """
    made: dict[str, Any] = {}
    for pattern, tensors in collected.items():
        if pattern.endswith(".weight"):
            made[pattern] = tensors
        elif pattern.endswith(".weight_packed"):
            scales = collected[pattern.replace("weight_packed", "weight_scale")]
            stored = ({"weight_packed": q, "weight_scale": s} for q, s in zip(tensors, scales, strict=True))
            made[pattern] = [storage.dequantize(one).to(dtype) for one in stored]
    return made
