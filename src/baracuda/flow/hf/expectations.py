"""What the model that transformers builds from config.json expects of a checkpoint's files."""

from __future__ import annotations

from typing import Any

import torch

from ...core.patterns import matches
from ...schemes import Recipe
from ...schemes.search import split_factors
from ..checkpoint.check import Check
from ..checkpoint.inventory import is_made_by_quantize
from ..checkpoint.targets import is_head
from .names import match_names
from .skeleton import skeleton, stay_float, tied_weights
from .structure import float_name


def check_model(check: Check, config: dict[str, Any], recipe: Recipe) -> None:
    """Add a finding for each Linear of the model whose stored tensors do not fit it."""
    try:
        model, _ = skeleton(config)
        names = match_names(model, map(float_name, check.entries)) if model is not None else None
    except Exception as error:  # a config can be wrong in any way; transformers then raises anything
        text = f"transformers cannot build it: {type(error).__name__}: {error}"
        return check.add("bad-config", "config.json", text)
    if model is None or names is None:
        return None
    ignore = config["quantization_config"]["ignore"]
    tied, floats = tied_weights(model), stay_float(model)
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        stored = names.module(name)
        if f"{name}.weight" in tied:
            if stored in check.modules:
                text = "it is stored quantized, but config.json ties it to the embedding: readers take that instead"
                check.add("config-mismatch", name, text)
            continue
        if stored in check.modules and is_head(name):
            _check_head(check, name, recipe)
        if stored in check.modules and name in floats:
            text = f"it is stored quantized, but must stay in floating point: {floats[name]}"
            check.add("config-mismatch", name, text)
        if names.origin(name) is None:
            _check_linear(check, name, stored, module, ignore)
    return None


def _check_head(check: Check, name: str, recipe: Recipe) -> None:
    """A quantized output head has a group of its own: vLLM's class for it is no Linear."""
    if not any(matches(pattern, name) for pattern, _ in recipe.rules):
        text = "no group of config.json names the quantized output head: vLLM takes its integers for floats"
        check.add("config-mismatch", name, text)


def _check_linear(check: Check, name: str, stored: str | None, module: torch.nn.Linear, ignore: list[str]) -> None:
    if stored is None:
        if not _damaged(check):
            check.add("missing-tensor", f"{name}.weight", "the model has this Linear, no shard its weight")
        return
    ignored = any(matches(pattern, name) or matches(pattern, stored) for pattern in ignore)
    if not ignored and stored not in check.modules:
        check.add("config-mismatch", name, "config.json says it is quantized, but it is stored in floating point")
    shape = (module.out_features, module.in_features)
    for entry, expected, packed in (
        (check.entries.get(f"{stored}.weight"), shape, ""),
        (check.entries.get(f"{stored}.weight_packed"), (shape[0], shape[1] // 8), ", packed"),
    ):
        if entry is not None and entry.shape != expected:
            got = "" if packed else f", got {list(entry.shape)}"
            check.add("shape-mismatch", entry.name, f"config.json makes it {list(shape)}{packed}{got}")


def check_factors(check: Check, recipe: Recipe) -> None:
    """Scales of w4a8, as baracuda writes them: those of a row's groups are small multiples of one."""
    if not is_made_by_quantize(check):  # servers multiply with any scales
        return
    for module in check.modules:
        scheme, name = recipe.of(module).scheme, f"{module}.weight_scale"
        integers = scheme.activation.kind != "float" and scheme.weight.group_size is not None
        if not integers or module in check.flagged or not check.entries[name].nbytes:
            continue
        if split_factors(check.file(name).read(name)) is None:
            text = "expected scales of groups that are 1 to 15 times a scale of their row, as w4a8 has them"
            check.add("bad-scale", name, text)


def _damaged(check: Check) -> bool:
    return any(f.code in ("truncated", "bad-offsets", "missing-file", "path-escape") for f in check.findings)
