"""What is in a checkpoint, read from its headers: the scheme, the sizes, and how each module is stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ...schemes import Recipe, Scheme
from ..checkpoint.config import parse_config
from ..checkpoint.directory import Checkpoint
from ..checkpoint.storage import FLOATS, Storage
from ..checkpoint.tensorfile import NAMES, Entry
from ..errors import FlowError, shown
from ..hf.config import require_sane
from ..hf.hub import local_directory

#: Tensors of a quantized weight: ours and those of other formats. What holds the integers comes first.
_INTEGERS = ("weight_packed", "qweight", "weight")


def inspect_checkpoint(checkpoint: str | Path) -> dict[str, Any]:
    """What is in a checkpoint, quantized or not: its scheme, its sizes, and a record for each module.

    Only headers are read, so that this is quick at any size. Formats of other tools are listed as they are stored.
    """
    directory = local_directory(checkpoint)
    with Checkpoint.open(directory) as source:
        require_sane(source.config)
        config = source.config.get("quantization_config")
        if config is not None and not isinstance(config, dict):
            raise FlowError(f"{directory}: config.json: quantization_config: expected a table, got {shown(config)}")
        recipe, note = _recipe(config, source.where)
        tensors: dict[str, dict[str, Entry]] = defaultdict(dict)
        for name in source.where:
            module, _, part = name.rpartition(".")
            tensors[module][part] = source.entry(name)
        modules = [_module(name, parts, recipe, config) for name, parts in tensors.items()]
        files = {name: file.path.stat().st_size for name, file in source.shards.items()}
    quantized = [module for module in modules if module["quantized"]]
    return {
        "name": directory.resolve().name,
        "model_type": source.config.get("model_type"),
        "architectures": source.config.get("architectures"),
        "quant_method": None if config is None else config.get("quant_method"),
        "format": None if config is None else config.get("format"),
        "note": note,
        "files": files,
        "bytes": sum(module["bytes"] for module in modules),
        "quantized_bytes": sum(module["bytes"] for module in quantized),
        "quantized_parameters": sum(module["parameters"] for module in quantized),
        "parameters": sum(module["parameters"] for module in modules),
        "ignored": _ignored(config),
        "modules": modules,
    }


def _ignored(config: dict[str, Any] | None) -> list[str]:
    """The layers that a config says stay float; other tools write what they like."""
    ignored = (config or {}).get("ignore") or []
    return [str(name) for name in ignored] if isinstance(ignored, list) else [shown(ignored)]


def described(scheme: Scheme) -> str:
    """A scheme in a few words: w4a16, groups of 128."""
    activation = {"float": "a16", "dynamic": "a8", "static": "a8, static"}[scheme.activation.kind]
    size = scheme.weight.group_size
    return f"w{scheme.weight.bits}{activation}" + (f", groups of {size}" if size is not None else "")


def _recipe(config: dict[str, Any] | None, names: Collection[str]) -> tuple[Recipe | None, str | None]:
    """The schemes of a checkpoint that baracuda reads; else why it does not read them."""
    if config is None:
        return None, "not quantized: its config.json has no quantization_config"
    try:
        return parse_config(config, names), None
    except FlowError as error:
        return None, f"quantized by another tool: {error}"


def _module(name: str, parts: dict[str, Entry], recipe: Recipe | None, config: dict[str, Any] | None) -> dict[str, Any]:
    integers = next((parts[part] for part in _INTEGERS if part in parts), None)
    quantized = integers is not None and integers.dtype not in FLOATS
    scheme = recipe.of(name).scheme if recipe is not None and quantized else None
    if scheme is not None and integers is not None and len(integers.shape) == 2:
        shape = [integers.shape[0], Storage(scheme).columns(integers)]
        stored = described(scheme)
    elif quantized and integers is not None:
        shape, stored = list(integers.shape), f"{(config or {}).get('quant_method', 'integers')}, {_type(integers)}"
    else:
        largest = max(parts.values(), key=lambda entry: entry.nbytes)
        shape, stored = list(largest.shape), _type(largest)
    parameters = 1
    for size in shape:
        parameters *= size
    return {
        "name": name,
        "stored": stored,
        "quantized": quantized,
        "shape": shape,
        "parameters": parameters,
        "bytes": sum(entry.nbytes for entry in parts.values()),
        "tensors": {part: [_type(entry), list(entry.shape)] for part, entry in parts.items()},
    }


def _type(entry: Entry) -> str:
    return NAMES.get(entry.dtype, str(entry.dtype)).lower()
