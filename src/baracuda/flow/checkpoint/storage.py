"""How a linear of a scheme is stored, in the layout of compressed-tensors that vLLM and transformers load."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...functional import dequantize
from ...schemes import QuantizedWeight, Scheme
from ..errors import FlowError
from .groups import usable_size
from .nibbles import in_order, order_of_groups, unpack_rows
from .tensorfile import Entry

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Eight-bit floats. A Linear of one has no scale here, so it is carried over as it is.
EIGHT_BIT_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)
#: What a scheme may store under the name of a Linear, besides its bias.
STORED = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "input_scale",
)
#: Bits -> what turns the bytes of two's complement into those of compressed-tensors, and back: it stores value + 8, or
#: value + 128, which is the same bits with the top one of each integer flipped.
_FLIP = {4: 0x88, 8: 0x80}


@dataclass(frozen=True, slots=True)
class Storage:
    """The tensors of a Linear: their names, types and shapes, and how they are made and read."""

    scheme: Scheme

    @property
    def packed(self) -> bool:
        """Whether integers are stored several in an int32: 4-bit ones, and 8-bit ones of weight-only layers."""
        return self.scheme.weight.element.is_packed or self.scheme.activation.kind == "float"

    @property
    def _per_word(self) -> int:
        return 32 // self.scheme.weight.bits if self.packed else 1

    @property
    def format(self) -> str:
        return "pack-quantized" if self.packed else "int-quantized"

    @property
    def integers(self) -> str:
        """The tensor that holds the integers of the weight."""
        return "weight_packed" if self.packed else "weight"

    def columns(self, integers: Entry) -> int:
        """The columns of the weight whose integers these are."""
        return integers.shape[1] * self._per_word

    def integers_shape(self, n: int, k: int) -> tuple[int, int]:
        return n, k // self._per_word

    def declines(self, entry: Entry) -> str | None:
        """Why this weight stays as it is, or None."""
        if entry.dtype not in FLOATS:
            return f"its elements are {entry.dtype}; it is carried over as it is"
        if len(entry.shape) != 2 or 0 in entry.shape:
            return f"its shape is {list(entry.shape)}"
        size = self.scheme.weight.group_size
        if size is not None and entry.shape[1] % size:
            usable = usable_size([entry.shape[1]], size)
            remedy = f"; --group-size {usable} divides them" if usable is not None else ""
            return f"its {entry.shape[1]} columns are not a multiple of the group size {size}{remedy}"
        if entry.shape[1] % self._per_word:
            return f"its {entry.shape[1]} columns are not a multiple of {self._per_word}, which are packed together"
        return None

    def entries(self, module: str, weight: Entry) -> list[Entry]:
        """The tensors stored for a Linear; they follow from the type and shape of its float weight."""
        n, k = weight.shape
        format = self.scheme.weight
        integers = torch.int32 if self.packed else torch.int8
        scale_shape = (n, 1) if format.group_size is None else (n, k // format.group_size)
        stored = [
            Entry(f"{module}.{self.integers}", integers, self.integers_shape(n, k)),
            Entry(f"{module}.weight_scale", format.scale_dtype(weight.dtype), scale_shape),
        ]
        if self.packed:
            stored.append(Entry(f"{module}.weight_shape", torch.int64, (2,)))
        if format.zero_points:
            stored.append(Entry(f"{module}.weight_zero_point", torch.int32, (-(-n // 8), scale_shape[1])))
        if format.act_order:
            stored.append(Entry(f"{module}.weight_g_idx", torch.int32, (k,)))
        if self.scheme.activation.kind == "static":
            stored.append(Entry(f"{module}.input_scale", torch.float32, (1,)))
        return stored

    def constants(self, weight: Entry, input_scale: Tensor | None) -> dict[str, Tensor]:
        """The stored tensors that do not depend on the values of the weight."""
        found = {}
        if self.packed:
            found["weight_shape"] = torch.tensor(weight.shape, dtype=torch.int64)
        if self.scheme.activation.kind == "static":
            assert input_scale is not None
            found["input_scale"] = input_scale
        return found

    def as_quantized_from(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of a weight in the type they are quantized from; the checkpoint has them in `dtype`.

        Smoothed rows are f32. Where scales have the checkpoint's type, they are rounded to it first.
        """
        format = self.scheme.weight
        wanted = torch.float32 if rows.dtype is torch.float64 else rows.dtype
        if format.group_size is not None:
            wanted = format.scale_dtype(dtype)
        return rows if rows.dtype is wanted else rows.to(wanted)

    def store(self, made: QuantizedWeight) -> dict[str, Tensor]:
        """The stored tensors of a quantized weight, whose memory they take over."""
        if made.zero_point is not None:
            raise FlowError("the method gave zero points, which symmetric formats do not store; use another method")
        scale = made.segment_scale
        scale = scale.unsqueeze(1) if scale.ndim == 1 else scale
        q = made.q
        if self.packed:  # in place: nobody else reads it
            q = q.view(torch.uint8).bitwise_xor_(_FLIP[self.scheme.weight.bits]).view(torch.int32)
        return {self.integers: q, "weight_scale": scale}

    def dequantize(self, stored: dict[str, Tensor]) -> Tensor:
        """The f32 weight that stored rows stand for; zero points begin with the first of these rows."""
        format, q, scale = self.scheme.weight, stored[self.integers], stored["weight_scale"].float()
        zero_point = order = None
        if format.act_order and format.group_size is not None:
            order = order_of_groups(stored["weight_g_idx"], format.group_size, "weight_g_idx")
        if self.packed:
            q = q.contiguous() if order is None else in_order(q.contiguous(), order)
            q = (q.view(torch.uint8) ^ _FLIP[format.bits]).view(format.element.dtype)
        if format.zero_points:
            zero_point = unpack_rows(stored["weight_zero_point"], len(q)).to(torch.int32) - 8
        if format.group_size is None:
            scale, zero_point = scale.squeeze(1), None if zero_point is None else zero_point.squeeze(1)
        whole = dequantize(q, scale, zero_point, scope=format.scope, element=format.element)
        return whole if order is None else torch.empty_like(whole).index_copy_(1, order, whole)

    def holds(self, original: Tensor, restored: Tensor, scale: Tensor) -> bool:
        """Whether `restored`, whole rows, is `original` rounded to nearest: no error is larger than rounding explains.

        That is half a step, plus what rounding the scale to its stored type moves a value by. A step is the scale, but
        at most twice what the values need, so that a scale far too large for its values is not accepted as coarse.
        Searched scales clip a few values: one that became the first or last integer may have been twice as large.
        """
        groups, found = (rows.float().view(*scale.shape, -1) for rows in (original, restored))
        largest, stored, single = self.scheme.weight.range[1], torch.finfo(scale.dtype), torch.finfo(torch.float32)
        needed = groups.abs().amax(-1)
        # Groups of one scale throughout a row are a channel, stored in groups: the row's largest value has set it.
        needed = torch.where((scale == scale[:, :1]).all(1, keepdim=True), needed.amax(1, keepdim=True), needed)
        half = torch.minimum(scale.float() / 2, needed / largest)[..., None]
        # Scales are normal f32 numbers, and in a type of few exponents multiples of its smallest one.
        least = max(single.tiny, largest * stored.tiny * stored.eps)
        allowed = half + (half + found.abs()) * max(stored.eps, single.eps) + least
        near = (found - groups).abs() <= allowed
        if not self.scheme.weight.element.is_packed:
            return bool(near.all())
        edge = torch.where(found < 0, largest + 1, largest) * scale.float()[..., None]
        clipped = (found.abs() >= edge) & (groups * found.sign() >= edge) & (groups.abs() <= 2 * edge)
        return bool((near | clipped).all())

    def resembles(self, original: Tensor, restored: Tensor) -> bool:
        """Whether rows that a method did not round to nearest can be `original`: their error is below half their size.

        Zero weights are exempt, since there the error is what others' errors made of them.
        """
        error, size = (original - restored).double().norm(), original.double().norm()
        return bool(error <= size / 2) or not bool(size > 0)
