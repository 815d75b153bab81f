"""baracuda: quantization kernels behind plans, the same bits on every backend."""

# ruff: noqa: F403

from __future__ import annotations

import logging as _logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import functional as _functional
from . import importing as _importing
from .core import errors as _errors
from .core import packing as _packing
from .core import scope as _scope
from .core import types as _types
from .core.errors import *
from .core.packing import *
from .core.scope import *
from .core.types import *
from .functional import *
from .plans import names as _plans
from .plans.names import *

if TYPE_CHECKING:
    # The documentation reads this file without running it, so it does not see the names that `plans.names` derives.
    from . import autograd as autograd
    from . import flow as flow
    from . import nn as nn
    from . import parallel as parallel
    from .flow.hf.load import load as load
    from .flow.hf.quantizer import BaracudaConfig as BaracudaConfig
    from .flow.hf.save import save as save
    from .models import *
    from .plans.declarations import *
    from .plans.descriptors import *
    from .plans.plan import Plan as Plan
    from .plans.produced import *

#: Loaded when first asked for, so that `import baracuda` stays quick.
_LAZY = {
    "LinearScheme": "models",
    "Report": "models",
    "autograd": "autograd",
    "convert": "models",
    "flow": "flow",
    "load": "flow",
    "nn": "nn",
    "parallel": "parallel",
    "prepare_qat": "models",
    "quantize_model": "models",
    "deterministic": "models",
    "save": "flow",
}
#: Not in __all__: its base class is one of transformers, which need not be installed.
_OF_TRANSFORMERS = {"BaracudaConfig": "flow.hf.quantizer"}

__version__ = "0.1.0"

#: What each module above declares public, and what is loaded when first asked for; not the modules themselves, so that
#: `from baracuda import *` leaves `nn` and `autograd` to torch.
__all__ = [  # noqa: PLE0604
    name for module in (_errors, _functional, _packing, _plans, _scope, _types) for name in module.__all__
] + ["__version__", *(name for name, module in _LAZY.items() if name != module)]


def __getattr__(name: str) -> Any:
    where = _LAZY.get(name) or _OF_TRANSFORMERS.get(name)
    if where is None:
        raise AttributeError(f"module 'baracuda' has no attribute {name!r}")
    module = import_module(f".{where}", __name__)
    value = module if name == where else getattr(module, name)
    globals()[name] = value
    return value


# What the library does is logged under this name, and shown to nobody who has not asked: logging.basicConfig().
_logging.getLogger(__name__).addHandler(_logging.NullHandler())
_importing.watch()
