"""Schemes: what a Linear becomes on disk, in the layout of compressed-tensors that vLLM and transformers load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...core.scope import PerChannel, PerGroup
from ...functional import dequantize, dynamic_quantize
from ..errors import FlowError
from ..patterns import require_pattern
from .tensorfile import Entry

SCHEMES = ("w8a8", "w8a8-smoothquant", "w4a16")
Activations = Literal["dynamic", "static"]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: What a scheme may store under a Linear's name, besides its bias.
STORED = ("weight", "weight_packed", "weight_scale", "weight_shape", "input_scale", "weight_zero_point")


@dataclass(frozen=True, slots=True)
class Scheme:
    """8-bit weights per output channel with 8-bit activations, or 4-bit weights per group with float activations."""

    bits: int = 8
    group_size: int = 128
    activations: Activations = "dynamic"
    smooth: bool = False

    @classmethod
    def of(cls, name: str, activations: str = "dynamic", group_size: int = 128) -> Scheme:
        if name not in SCHEMES:
            raise FlowError(f"scheme: expected one of {', '.join(SCHEMES)}, got {name!r}")
        if activations not in ("dynamic", "static"):
            raise FlowError(f"activations: expected dynamic or static, got {activations!r}")
        if name == "w4a16" and activations == "static":
            raise FlowError("w4a16 keeps activations in floating point: drop --activations static")
        if group_size < 8 or group_size % 8:
            raise FlowError(f"group_size: expected a positive multiple of 8, got {group_size}")
        kind: Activations = "static" if activations == "static" else "dynamic"
        return cls(4 if name == "w4a16" else 8, group_size, kind, name == "w8a8-smoothquant")

    @property
    def packed(self) -> bool:
        return self.bits == 4

    @property
    def needs_calibration(self) -> bool:
        return self.smooth or self.activations == "static"

    @property
    def format(self) -> str:
        return "pack-quantized" if self.packed else "int-quantized"

    def declines(self, entry: Entry) -> str | None:
        """Why this weight stays as it is, or None."""
        if entry.dtype not in FLOATS:
            return f"its elements are {entry.dtype}"
        if len(entry.shape) != 2 or 0 in entry.shape:
            return f"its shape is {list(entry.shape)}"
        if self.packed and entry.shape[1] % self.group_size:
            return f"its {entry.shape[1]} columns are not a multiple of the group size {self.group_size}"
        return None

    def entries(self, module: str, weight: Entry) -> list[Entry]:
        """What is stored for a Linear, known before any data is."""
        n, k = weight.shape
        if self.packed:
            return [
                Entry(f"{module}.weight_packed", torch.int32, (n, k // 8)),
                Entry(f"{module}.weight_scale", self.scale_dtype(weight.dtype), (n, k // self.group_size)),
                Entry(f"{module}.weight_shape", torch.int64, (2,)),
            ]
        stored = [
            Entry(f"{module}.weight", torch.int8, (n, k)),
            Entry(f"{module}.weight_scale", torch.float32, (n, 1)),
        ]
        if self.activations == "static":
            stored.append(Entry(f"{module}.input_scale", torch.float32, (1,)))
        return stored

    def scale_dtype(self, weight: torch.dtype) -> torch.dtype:
        """int8 scales are f32, as servers hold them; group scales have the model's type, as their kernels read them."""
        return weight if self.packed and weight is not torch.float64 else torch.float32

    def quantize(self, rows: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Whole rows of a weight as stored; `dtype` is the type the checkpoint had them in."""
        if rows.dtype is torch.float64:
            rows = rows.float()
        if not self.packed:
            q = dynamic_quantize(rows, scope=PerChannel(0))
            return {"weight": q.q, "weight_scale": q.scale.float().unsqueeze(1)}
        # A smoothed weight arrives in f32; its scales still have to be rounded to the type they are stored in.
        scale_dtype = self.scale_dtype(dtype)
        if rows.dtype is not scale_dtype:
            rows = rows.to(scale_dtype)
        q = dynamic_quantize(rows, scope=PerGroup(self.group_size), dtype="s4", scale_dtype=scale_dtype)
        # Stored offset by 8 where baracuda has two's complement: the same nibbles, the top bit of each flipped.
        return {"weight_packed": q.q.bitwise_xor_(0x88).view(torch.int32), "weight_scale": q.scale}

    def dequantize(self, stored: dict[str, Tensor]) -> Tensor:
        """The f32 weight that stored rows stand for."""
        if not self.packed:
            return dequantize(stored["weight"], stored["weight_scale"].float().squeeze(1), scope=PerChannel(0))
        nibbles = stored["weight_packed"].contiguous().view(torch.uint8) ^ 0x88
        return dequantize(nibbles, stored["weight_scale"].float(), scope=PerGroup(self.group_size), element="s4")

    def holds(self, original: Tensor, restored: Tensor, scale: Tensor) -> bool:
        """Whether `restored`, whole rows, is `original` quantized: no element is further off than rounding explains.

        That is half a step, and what rounding the scale to its stored type moves a value by. A step is the scale, but
        at most twice what the values need, so that a scale which swallows them all is not taken for a coarse one.
        """
        groups, found = (rows.float().view(*scale.shape, -1) for rows in (original, restored))
        largest, stored, single = 7 if self.packed else 127, torch.finfo(scale.dtype), torch.finfo(torch.float32)
        half = torch.minimum(scale.float() / 2, groups.abs().amax(-1) / largest)[..., None]
        # Scales are normal f32 numbers, and in a type of few exponents multiples of its smallest one.
        least = max(single.tiny, largest * stored.tiny * stored.eps)
        allowed = half + (half + found.abs()) * max(stored.eps, single.eps) + least
        return bool(((found - groups).abs() <= allowed).all())

    def config(self, ignore: list[str]) -> dict[str, Any]:
        """The quantization_config of config.json. Only these six argument keys: newer ones fail in older readers."""
        strategy = "group" if self.packed else "channel"
        weights = _arguments(self.bits, strategy, dynamic=False, group_size=self.group_size if self.packed else None)
        inputs = None
        if not self.packed:
            static = self.activations == "static"
            inputs = _arguments(8, "tensor" if static else "token", dynamic=not static, group_size=None)
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "ignore": ignore,
            "config_groups": {"group_0": group},
        }


def _arguments(bits: int, strategy: str, *, dynamic: bool, group_size: int | None) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
        "group_size": group_size,
    }


def parse_config(config: dict[str, Any]) -> Scheme:
    """The scheme a quantization_config describes, or a FlowError naming what this version cannot read."""
    try:
        (group,) = config["config_groups"].values()
        weights, inputs = group["weights"], group["input_activations"]
        if config["quant_method"] != "compressed-tensors" or group["targets"] != ["Linear"] or not weights["symmetric"]:
            raise FlowError("expected compressed-tensors' symmetric weights of target Linear")
        bits, group_size = weights["num_bits"], weights["group_size"]
        if bits not in (4, 8) or type(group_size if bits == 4 else 128) is not int or (bits == 4 and group_size % 8):
            raise FlowError(f"quantization_config: {bits!r}-bit weights in groups of {group_size!r} are not read here")
        ignore = config["ignore"]
        if not isinstance(ignore, list) or not all(isinstance(pattern, str) for pattern in ignore):
            raise FlowError(f"quantization_config: its ignore should be a list of names, got {str(ignore)[:80]}")
        for pattern in ignore:
            require_pattern(pattern, "quantization_config: ignore")
        static = inputs is not None and not inputs["dynamic"]
        scheme = Scheme(bits, group_size or 128, "static" if static else "dynamic")
        expected = scheme.config(ignore)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise FlowError("quantization_config: not the layout of compressed-tensors as baracuda writes it") from None
    for key in ("format", "config_groups"):
        if config.get(key) != expected[key]:
            raise FlowError(f"quantization_config: its {key} is not one baracuda reads")
    return scheme
