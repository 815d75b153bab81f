"""The model that transformers makes of a config: its class, its structure without weights, what stays float in it.

This folder is the only one that imports transformers, and only when a function that needs it is called.
"""

from __future__ import annotations

from typing import Any

import torch

from ...core.versions import why_unfit
from ..errors import FlowError, shown
from .config import alone, has_own_code, model_config, parse, quiet
from .surroundings import taken_apart

__all__ = [
    "model_class",
    "model_config",
    "quiet",
    "require_transformers",
    "skeleton",
    "stay_float",
    "tied_weights",
]

SHARED = "shares its weight with another module"
#: Subclasses of nn.Linear that compute what it does.
PLAIN = ("FalconLinear",)


def require_transformers(why: str) -> None:
    try:
        import transformers
    except ImportError:
        raise FlowError(f"{why}: pip install 'baracuda[flow]'") from None
    if (unfit := why_unfit("transformers", transformers.__version__)) is not None:
        raise FlowError(f"{why}: {unfit}")


def model_class(config: Any) -> Any:
    """The transformers class that a config names, or else the headless model of its kind; None for neither."""
    import transformers

    name = (getattr(config, "architectures", None) or [None])[0]
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if isinstance(found, type) and issubclass(found, torch.nn.Module) and hasattr(found, "_from_config"):
        return found
    found = transformers.MODEL_MAPPING.get(type(config), None)
    return found[0] if isinstance(found, (list, tuple)) else found


def skeleton(config: dict[str, Any]) -> tuple[torch.nn.Module | None, str]:
    """The model on the meta device, without weights; or None, and the reason."""
    try:
        import transformers
    except ImportError:
        return None, "transformers is not installed"
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        return None, f"transformers {transformers.__version__} does not know model_type {shown(kind)}"
    parsed = parse(config)
    cls = None if has_own_code(config) else model_class(parsed)
    if cls is None:
        return None, f"transformers {transformers.__version__} has no {config.get('architectures')}"
    with torch.device("meta"), alone():
        model: torch.nn.Module = cls._from_config(parsed)
    return model, ""


def tied_weights(model: torch.nn.Module) -> dict[str, str]:
    """Tensor of the model -> the tensor that it shares its memory with."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def stay_float(model: torch.nn.Module) -> dict[str, str]:
    """The Linears that no integer module can replace, with the reason."""
    reasons = dict.fromkeys((name.removesuffix(".weight") for name in tied_weights(model).values()), SHARED)
    reasons |= dict.fromkeys(taken_apart(model), "the code around it computes with its weight itself")
    for name, module in model.named_modules():
        kind = type(module)
        if isinstance(module, torch.nn.Linear) and kind is not torch.nn.Linear and kind.__name__ not in PLAIN:
            reasons[name] = f"a {kind.__name__}, which may do more than an nn.Linear"
    return reasons
