"""The config.json of a quantized checkpoint beside the original's: quantizing adds a key, and may untie the head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..checkpoint.check import Check
from ..checkpoint.config import BESIDE, parse_config, quantization_config
from ..checkpoint.directory import Checkpoint
from ..checkpoint.inventory import is_made_by_quantize
from ..errors import CheckpointError, FlowError, shown
from .config import LOADS_BY_NAME, parse
from .head import untied
from .layers import Head

#: Settings without a meaning for the model: who wrote the file, and from where.
_NO_MATTER = ("transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "quantization_config")


def compare_configs(check: Check, config: dict[str, Any], directory: Path, head: Head | None = None) -> None:
    """Add a finding for each setting that differs from the original's, and each that baracuda does not write.

    `head` is that of the original, where it is stored quantized.
    """
    try:
        with Checkpoint.open(directory) as source:
            original, dtype = dict(source.config), source.dtype
    except CheckpointError:  # a finding of those who compare the tensors
        return
    if not original.get("dtype") and not original.get("torch_dtype") and dtype is not None:
        original["torch_dtype"] = dtype  # the type that readers take then, which quantizing writes down
    if head is not None and head.tied:
        original = untied(original)
    differing = [key for key in sorted({*config, *original}) if not _same(config.get(key), original.get(key))]
    differing = [key for key in differing if key != "quantization_config"]
    # `baracuda quantize` copies settings as they are. Saving a model through transformers spells them anew: what it
    # parses them to is compared then.
    parsed = None if is_made_by_quantize(check) or not differing else _parsed(config, original)
    for key in differing:
        if parsed is not None and key not in LOADS_BY_NAME - {*_NO_MATTER} and key not in _different(*parsed):
            continue
        check.add("config-mismatch", "config.json", f"{key}: the original has {shown(original.get(key))}, this has "
                  f"{shown(config.get(key))}")  # fmt: skip
    _compare_quantization(check, config.get("quantization_config"))


def _compare_quantization(check: Check, quantization: Any) -> None:
    """Nothing but what baracuda writes is in the quantization_config: readers obey keys that are not checked here."""
    try:
        written = quantization_config(parse_config(quantization), quantization["ignore"])
    except (FlowError, TypeError, KeyError):  # a finding already
        return
    # Of another tool's config, `parse_config` has compared the groups, but for how their scales were found.
    told = {"config_groups", *BESIDE} if "version" in quantization else set()
    for key in sorted({*quantization, *written} - told):
        if not _same(quantization.get(key), written.get(key)):
            check.add("config-mismatch", "config.json", f"quantization_config.{key}: expected "
                      f"{shown(written.get(key))}, got {shown(quantization.get(key))}")  # fmt: skip


def _parsed(*configs: dict[str, Any]) -> tuple[dict[str, Any], ...] | None:
    """The configs as transformers parses them; None where it cannot, or is not here."""
    try:
        return tuple(parse(config).to_dict() for config in configs)
    except Exception:  # a config can be wrong in any way; the raw settings are compared then
        return None


def _different(mine: dict[str, Any], original: dict[str, Any]) -> set[str]:
    """The settings that differ, under every name that a file may have for them."""
    found = {key for key in {*mine, *original} if key not in _NO_MATTER and not _same(mine.get(key), original.get(key))}
    return found | ({"torch_dtype", "dtype"} if found & {"torch_dtype", "dtype"} else set())


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True, default=str) == json.dumps(other, sort_keys=True, default=str)
