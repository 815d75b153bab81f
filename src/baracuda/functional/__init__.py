"""The functions most people call: tensors in, tensors out, a cached plan in between."""

# ruff: noqa: F403

from __future__ import annotations

from . import elementwise as _elementwise
from . import linears as _linears
from .elementwise import *
from .linears import *

__all__ = [name for module in (_elementwise, _linears) for name in module.__all__]
