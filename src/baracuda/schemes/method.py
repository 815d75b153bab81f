"""The seam where a weight becomes integers: what a method is given, what it gives back, and how it registers.

A method is a function in a file of its own in `methods/`, which is all that adding one takes:

    @register_method("gptq", needs="hessian", nearest=False)
    def gptq(weight: Tensor, format: WeightFormat, data: CalibrationData | None) -> QuantizedWeight:
        ...
        return QuantizedWeight.pack(integers, scale, format)
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.errors import InvalidProblem
from ..core.optable import packed_shape
from ..core.packing import pack_int4
from ..functional import dequantize
from .calibration import ORDER, CalibrationData, Needs
from .formats import WeightFormat


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight `[N, K]` as integers: `scale * q` stands for it."""

    q: Tensor
    """s8 `[N, K]`, or s4 packed two in a byte, `[N, ceil(K / 2)]`."""
    scale: Tensor
    """`[N]`, or `[N, K / group_size]`, in the type `WeightFormat.scale_dtype` names."""
    zero_point: Tensor | None = None
    """None for symmetric formats, which are all there are today."""
    factors: Tensor | None = None
    """Integers `[N, K / group_size]`: where given, `scale` is `[N]` and that of a group is `scale * factors`."""
    report: Mapping[str, float] = field(default_factory=dict)
    """Figures for the report that add up over rows, such as a squared error."""

    @classmethod
    def pack(
        cls, integers: Tensor, scale: Tensor, format: WeightFormat, report: Mapping[str, float] | None = None
    ) -> QuantizedWeight:
        """From integers `[N, K]` of any integer or float type, one in each element."""
        q = integers.to(torch.int8)
        return cls(pack_int4(q, format.element) if format.element.is_packed else q, scale, report=report or {})

    def dequantize(self, format: WeightFormat, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The float weight that these integers stand for."""
        size, scale = columns if format.element.is_packed else None, self.segment_scale
        scale = scale if scale.dtype is dtype else scale.float()
        return dequantize(self.q, scale, scope=format.scope, element=format.element, dtype=dtype, size=size)

    @property
    def segment_scale(self) -> Tensor:
        """The scale of each channel or group, its integer factor included."""
        return self.scale if self.factors is None else self.scale[:, None] * self.factors


Function = Callable[[Tensor, WeightFormat, CalibrationData | None], QuantizedWeight]


@dataclass(frozen=True)
class Method:
    """A way to turn a float weight into integers of a format."""

    name: str
    function: Function
    needs: Needs | None = None
    """What calibration must measure first; None for methods that look at the weight alone."""
    nearest: bool = True
    """Whether each integer is the nearest one to its weight: `baracuda verify --against` then checks each of them."""

    def quantize(self, weight: Tensor, format: WeightFormat, data: CalibrationData | None = None) -> QuantizedWeight:
        """Quantize whole rows `[N, K]` of a weight.

        Rows must not depend on each other: flow hands over blocks of rows, in any order, from several threads.
        """
        if self.needs is not None:
            measured = None if data is None else "moments" if data.hessian is None else "hessian"
            if ORDER.index(measured) < ORDER.index(self.needs):
                raise InvalidProblem(
                    f"method {self.name}: expected calibration data with its {self.needs}, got "
                    f"{'none' if measured is None else f'its {measured} alone'}; calibrate first, or use the method rtn"
                )
        made = self.function(weight, format, data)
        self._require_fits(made, weight, format)
        return made

    def _require_fits(self, made: QuantizedWeight, weight: Tensor, format: WeightFormat) -> None:
        rows, columns = weight.shape
        size = format.scale_shape(rows, columns) if made.factors is None else (rows,)
        for name, tensor, shape, dtype in (
            ("q", made.q, packed_shape((rows, columns), format.element), format.element.dtype),
            ("scale", made.scale, size, format.scale_dtype(weight.dtype)),
        ):
            if tuple(tensor.shape) != tuple(shape) or tensor.dtype is not dtype:
                raise InvalidProblem(
                    f"method {self.name}: expected {name} of {dtype} {list(shape)} for {format}, "
                    f"got {tensor.dtype} {list(tensor.shape)}; correct the method"
                )


_METHODS: dict[str, Method] = {}


def register_method(name: str, *, needs: Needs | None = None, nearest: bool = True) -> Callable[[Function], Method]:
    """Register a function as the method `name`."""

    def register(function: Function) -> Method:
        _METHODS[name] = made = Method(name, function, needs, nearest)
        return made

    return register


def get_method(name: str | Method) -> Method:
    if isinstance(name, Method):
        return name
    name = name.lower() if isinstance(name, str) else name
    if name not in method_names():
        raise InvalidProblem(f"method: expected one of {', '.join(method_names())}, got {name!r}")
    return _METHODS[name]


def method_names() -> list[str]:
    """All methods there are, rtn first: every file in `methods/` registers its own."""
    from . import methods

    for module in sorted(found.name for found in pkgutil.iter_modules(methods.__path__)):
        importlib.import_module(f"{methods.__name__}.{module}")
    return sorted(_METHODS, key=lambda name: (name != "rtn", name))
