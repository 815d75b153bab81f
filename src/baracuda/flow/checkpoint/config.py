"""The quantization_config of config.json: which layers have which scheme, as compressed-tensors spells it."""

from __future__ import annotations

import fnmatch
from typing import Any

from ...core.types import ElementKind
from ...schemes import ActivationFormat, Choice, Recipe, Scheme, WeightFormat
from ...schemes.formats import ActivationKind
from ...schemes.registry import EXPERTS, is_checkpoint_scheme
from ..errors import FlowError, require_pattern
from .storage import Storage

#: The target of the group for all layers that no other group names.
ALL_LINEARS = ["Linear"]
MIXED = "mixed-precision"


def quantization_config(recipe: Recipe, ignore: list[str]) -> dict[str, Any]:
    """A group for the default scheme, and one for each other scheme with the patterns of its layers."""
    groups: list[tuple[list[str], Scheme]] = [(ALL_LINEARS, recipe.default.scheme)]
    for pattern, choice in recipe.rules:
        if len(groups) > 1 and groups[-1][1] == choice.scheme:
            groups[-1][0].append(_as_regex(pattern))
        else:
            groups.append(([_as_regex(pattern)], choice.scheme))
    return _config(groups, ignore)


def _config(groups: list[tuple[list[str], Scheme]], ignore: list[str]) -> dict[str, Any]:
    formats = list(dict.fromkeys(Storage(scheme).format for _, scheme in groups))
    written = {f"group_{i}": _group(targets, scheme) for i, (targets, scheme) in enumerate(groups)}
    # compressed-tensors would take packed weights with integer activations for unpacked ones, unless a group says so.
    if len(formats) > 1 or any(Storage(s).packed and s.activation.kind != "float" for _, s in groups):
        written = {
            name: group | {"format": Storage(scheme).format}
            for (name, group), (_, scheme) in zip(written.items(), groups, strict=True)
        }
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "ignore": ignore,
        "config_groups": written,
    }


def _as_regex(pattern: str) -> str:
    return pattern if pattern.startswith("re:") else f"re:{fnmatch.translate(pattern)}"


def _group(targets: list[str], scheme: Scheme) -> dict[str, Any]:
    weight, activation = scheme.weight, scheme.activation
    strategy = "channel" if weight.group_size is None else "group"
    inputs = None
    if activation.kind != "float":
        static = activation.kind == "static"
        inputs = _arguments(8, "tensor" if static else "token", dynamic=not static, group_size=None)
    return {
        "targets": targets,
        "weights": _arguments(weight.bits, strategy, dynamic=False, group_size=weight.group_size),
        "input_activations": inputs,
        "output_activations": None,
    }


def _arguments(bits: int, strategy: str, *, dynamic: bool, group_size: int | None) -> dict[str, Any]:
    """Only these six keys: newer ones fail in older readers."""
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
        "group_size": group_size,
    }


def parse_config(config: dict[str, Any]) -> Recipe:
    """The scheme of each layer that a quantization_config describes; a FlowError says what cannot be read."""
    try:
        groups = list(config["config_groups"].values())
        if config["quant_method"] != "compressed-tensors" or not all(g["weights"]["symmetric"] for g in groups):
            raise FlowError("expected compressed-tensors' symmetric weights of target Linear")
        if not groups or groups[0]["targets"] != ALL_LINEARS:
            raise FlowError("expected compressed-tensors' symmetric weights of target Linear")
        ignore = config["ignore"]
        schemes = [_parse_group(group) for group in groups]
        if EXPERTS in schemes[1:] or schemes == [EXPERTS]:
            raise FlowError("quantization_config: 8-bit weights without activations are read for experts only")
        if not isinstance(ignore, list) or not all(isinstance(pattern, str) for pattern in ignore):
            raise FlowError(f"quantization_config: its ignore should be a list of names, got {str(ignore)[:80]}")
        targets = [list(group["targets"]) for group in groups]
        patterns = [pattern for named in targets[1:] for pattern in named]
        for pattern, where in [*((p, "ignore") for p in ignore), *((p, "targets") for p in patterns)]:
            require_pattern(pattern, f"quantization_config: {where}")
        pairs = list(zip(targets, schemes, strict=True))
        rules = [(pattern, Choice(scheme)) for named, scheme in pairs[1:] for pattern in named]
        recipe = Recipe(Choice(schemes[0]), tuple(rules))
        expected = _config(pairs, ignore)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise FlowError("quantization_config: not the layout of compressed-tensors as baracuda writes it") from None
    if config.get("format") != expected["format"]:
        raise FlowError("quantization_config: its format is not one baracuda reads")
    if _with_formats(config) != _with_formats(expected):
        raise FlowError("quantization_config: its config_groups is not one baracuda reads")
    return recipe


def _with_formats(config: dict[str, Any]) -> dict[str, Any]:
    """The groups, each with its format: one that names none has that of the file."""
    return {name: {"format": config["format"]} | group for name, group in config["config_groups"].items()}


def _parse_group(group: dict[str, Any]) -> Scheme:
    weights, inputs = group["weights"], group["input_activations"]
    bits, size = weights["num_bits"], weights["group_size"]
    if bits not in (4, 8) or type(size if bits == 4 else 128) is not int or (bits == 4 and size % 8):
        raise FlowError(f"quantization_config: {bits!r}-bit weights in groups of {size!r} are not read here")
    kind: ActivationKind = "float" if inputs is None else "dynamic" if inputs["dynamic"] else "static"
    element = ElementKind.S4 if bits == 4 else ElementKind.S8
    scheme = Scheme(WeightFormat(element, size), ActivationFormat(kind))
    if scheme != EXPERTS and not is_checkpoint_scheme(scheme):
        raise FlowError("quantization_config: its config_groups is not one baracuda reads")
    return scheme
