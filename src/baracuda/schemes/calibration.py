"""What calibration measured of the input of a linear, for the methods that quantize by data."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

#: What a method asks calibration for: the mean square of each input channel, or the mean product of each two.
Needs = Literal["moments", "hessian"]
#: Each includes those before it.
ORDER: tuple[Needs | None, ...] = (None, "moments", "hessian")


@dataclass
class CalibrationData:
    """Second moments of the input x of a linear, over `count` tokens; f32, on the CPU.

    Linears that read the same tensor share one object. Where smoothing divides the input, these are of the divided one.
    """

    count: int
    moments: Tensor
    """`[K]`: the mean of x[k] ** 2."""
    hessian: Tensor | None = None
    """`[K, K]`: the mean of x[i] * x[j]; there when the method needs "hessian"."""
    _lock: Any = field(default_factory=threading.RLock, repr=False, compare=False)
    _made: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """`make()`, called once for each key: a weight arrives in blocks of rows, from several threads."""
        with self._lock:
            if key not in self._made:
                self._made[key] = make()
            return self._made[key]


def strongest(needs: list[Needs | None]) -> Needs | None:
    """What satisfies all of them."""
    return max(needs, key=ORDER.index, default=None)
