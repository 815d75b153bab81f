"""The quantization_config of config.json: which layers have which scheme, as compressed-tensors spells it."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from typing import Any

from ...core.types import ElementKind
from ...schemes import ActivationFormat, Choice, Recipe, Scheme, WeightFormat
from ...schemes.formats import ActivationKind
from ...schemes.registry import EXPERTS, is_checkpoint_scheme
from ..errors import FlowError, require_pattern, require_quick
from .storage import Storage

#: The target of the group for all layers that no other group names.
ALL_LINEARS = ["Linear"]
MIXED = "mixed-precision"
#: No group has as many columns.
MAX_GROUP = 2**31


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
        inputs = _arguments(8, "tensor" if static else "token", not static)
    symmetric = not weight.zero_points
    return {
        "targets": targets,
        "weights": _arguments(weight.bits, strategy, False, group_size=weight.group_size, symmetric=symmetric),
        "input_activations": inputs,
        "output_activations": None,
    }


def _arguments(
    bits: int, strategy: str, dynamic: bool, *, group_size: int | None = None, symmetric: bool = True
) -> dict[str, Any]:
    """Only these six keys: newer ones fail in older readers."""
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "dynamic": dynamic,
        "group_size": group_size,
    }


#: What other tools write beside the six keys: how the scales were found, which changes nothing about reading them.
_TOLD = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "block_structure")
#: What compressed-tensors may name beside the groups, and none of which is read here.
_OTHERS = ("kv_cache_scheme", "sparsity_config", "transform_config")
#: What another tool's config has beside ours. None of it changes how tensors are read: `_OTHERS` must be empty.
BESIDE = frozenset({"version", "global_compression_ratio", *_OTHERS})
#: The orders of GPTQ that leave columns where they are, and the one that stores the group of each column.
_COLUMNS_STAY, _GROUPS_STORED = (None, False, "weight", "static"), (True, "group", "dynamic")
#: What other tools call their own layouts.
_LAYOUTS = {
    "awq": "AutoAWQ's",
    "gptq": "AutoGPTQ's and GPTQModel's",
    "auto-round": "AutoRound's",
    "bitsandbytes": "bitsandbytes'",
}


def parse_config(config: dict[str, Any], names: Collection[str] = ()) -> Recipe:
    """The scheme of each layer that a quantization_config describes; a FlowError says what cannot be read.

    `names` are those of the layers that its patterns will be matched with, as far as they are known.
    """
    try:
        _require_compressed_tensors(config["quant_method"])
        groups = [_six_keys(group) for group in config["config_groups"].values()]
        if not groups or groups[0]["targets"] != ALL_LINEARS:
            raise FlowError(f"quantization_config: expected a first group for all layers, with targets {ALL_LINEARS}")
        for key in _OTHERS:
            if config.get(key) and config[key] != {"format": "dense"}:
                raise FlowError(f"quantization_config: its {key} is not read here: {str(config[key])[:80]}")
        ignore = config["ignore"]
        schemes = [_parse_group(*pair) for pair in zip(groups, config["config_groups"].values(), strict=True)]
        if EXPERTS in schemes[1:] or schemes == [EXPERTS]:
            raise FlowError("quantization_config: 8-bit weights without activations are read for experts only")
        if not isinstance(ignore, list) or not all(isinstance(pattern, str) for pattern in ignore):
            raise FlowError(f"quantization_config: its ignore should be a list of names, got {str(ignore)[:80]}")
        targets = [list(group["targets"]) for group in groups]
        patterns = [pattern for named in targets[1:] for pattern in named]
        for pattern, where in [*((p, "ignore") for p in ignore), *((p, "targets") for p in patterns)]:
            require_pattern(pattern, f"quantization_config: {where}")
        require_quick([*ignore, *patterns], names, "quantization_config")
        pairs = list(zip(targets, schemes, strict=True))
        rules = [(pattern, Choice(scheme)) for named, scheme in pairs[1:] for pattern in named]
        recipe = Recipe(Choice(schemes[0]), tuple(rules))
        expected = _config(pairs, ignore)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise FlowError("quantization_config: not the layout of compressed-tensors as baracuda reads it") from None
    if config.get("format") != expected["format"]:
        raise FlowError(
            f"quantization_config: its format is {str(config.get('format'))[:40]!r}; expected {expected['format']!r} "
            "for these groups"
        )
    read = {"format": config["format"], "config_groups": dict(zip(config["config_groups"], groups, strict=True))}
    if _with_formats(read) != _with_formats(expected):
        raise FlowError("quantization_config: its config_groups is not one baracuda reads")
    return recipe


def _with_formats(config: dict[str, Any]) -> dict[str, Any]:
    """The groups, each with its format: one that names none has that of the file."""
    return {name: {"format": config["format"]} | group for name, group in config["config_groups"].items()}


def _require_compressed_tensors(method: Any) -> None:
    if method == "compressed-tensors":
        return
    whose = f"{_LAYOUTS[method]} layout" if method in _LAYOUTS else "a layout"
    raise FlowError(
        f"quantization_config: its quant_method is {str(method)[:40]!r}, {whose} that is not read here; expected "
        "'compressed-tensors': quantize the float model with `baracuda quantize --scheme w4a16`, or take a "
        "compressed-tensors file of it (llm-compressor writes them, with AWQ or GPTQ, too)"
    )


def _six_keys(group: dict[str, Any]) -> dict[str, Any]:
    """A group as baracuda would write it: without what other tools tell beside it, and with every key."""
    made = {"targets": group["targets"], "output_activations": group.get("output_activations")}
    for part in ("weights", "input_activations"):
        given = group[part] if part == "weights" else group.get(part)
        if given is None:
            made[part] = None
            continue
        kept = {key: value for key, value in given.items() if key not in (*_TOLD, "actorder")}
        size = kept.get("group_size")
        made[part] = {"group_size": None, **kept} if size != -1 else {**kept, "group_size": None}
    if "format" in group:
        made["format"] = group["format"]
    return made


def _parse_group(group: dict[str, Any], told: dict[str, Any]) -> Scheme:
    weights, inputs = group["weights"], group["input_activations"]
    bits, size, symmetric = weights["num_bits"], weights["group_size"], weights["symmetric"]
    whole = size is None or (type(size) is int and 0 < size < MAX_GROUP)
    if bits not in (4, 8) or not whole or (bits == 4 and (size or 8) % 8):
        raise FlowError(f"quantization_config: {bits!r}-bit weights in groups of {size!r} are not read here")
    order = told["weights"].get("actorder")
    if order not in (*_COLUMNS_STAY, *_GROUPS_STORED):
        raise FlowError(f"quantization_config: expected an actorder of weight or group, got {str(order)[:40]!r}")
    kind: ActivationKind = "float" if inputs is None else "dynamic" if inputs["dynamic"] else "static"
    element = ElementKind.S4 if bits == 4 else ElementKind.S8
    act_order = order in _GROUPS_STORED and size is not None
    scheme = Scheme(
        WeightFormat(element, size, zero_points=symmetric is False, act_order=act_order), ActivationFormat(kind)
    )
    four_bits = element.is_packed and kind == "float"
    if scheme != EXPERTS and not four_bits and not is_checkpoint_scheme(scheme):
        raise FlowError(
            f"quantization_config: {'' if symmetric else 'asymmetric '}{bits}-bit weights in groups of {size} with "
            f"{kind} activations are not read here; expected symmetric 8-bit weights per channel with 8-bit "
            "activations, or 4-bit weights with float ones"
        )
    return scheme
