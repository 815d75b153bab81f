"""The public names of the plans: QuantizePerTokenPlan has QuantizePerTokenDescriptor and QuantizePerTokenArgs.

One descriptor or one set of arguments may serve several plans. It has a name for each of them, derived here from the
plans' declarations. `names.pyi` says the same to type checkers; a test compares the two.
"""

from __future__ import annotations

from typing import Any

from . import declarations
from .plan import Plan

#: The declared plans, in their order.
_PLANS: tuple[type[Plan[Any, Any]], ...] = tuple(
    [value for value in vars(declarations).values() if isinstance(value, type) and value.__mro__[1] is Plan]
)


def _names() -> dict[str, type]:
    found: dict[str, type] = {"Plan": Plan}
    for plan in _PLANS:
        descriptor, args, stem = plan._descriptor_type, plan._args_type, plan.__name__.removesuffix("Plan")
        found |= {descriptor.__name__: descriptor, args.__name__: args}
        found |= {f"{stem}Descriptor": descriptor, f"{stem}Args": args, plan.__name__: plan}
    return found


_NAMES = _names()
globals().update(_NAMES)
__all__ = sorted(_NAMES)  # noqa: PLE0605
