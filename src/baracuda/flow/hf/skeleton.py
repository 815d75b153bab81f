"""The model that transformers makes of a config: its class, its structure without weights, what stays float in it.

This folder is the only one that imports transformers, and only when a function that needs it is called.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...core.versions import why_unfit
from ..errors import CheckpointError, FlowError
from .surroundings import taken_apart

SHARED = "shares its weight with another module"
#: Subclasses of nn.Linear that compute what it does.
PLAIN = ("FalconLinear",)
#: Settings that say how many parts are built, and limits that no real model reaches: more would never be built.
_COUNT = re.compile(r"(^|_)(layers?|blocks?|depths?|experts?)$")
_NO_COUNT = re.compile(r"vocab|size|dim")
MAX_REPEATS, MAX_EXPERTS = 10_000, 100_000


def require_transformers(why: str) -> None:
    try:
        import transformers
    except ImportError:
        raise FlowError(f"{why}: pip install 'baracuda[flow]'") from None
    if (unfit := why_unfit("transformers", transformers.__version__)) is not None:
        raise FlowError(f"{why}: {unfit}")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and notices of transformers: baracuda draws its own."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def model_config(directory: Path) -> Any:
    """The config.json as transformers parses it. Code that comes with a model is never run."""
    import transformers

    with quiet():
        try:
            return transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise FlowError(
                f"{directory}: expected a model that transformers {transformers.__version__} knows without code of its "
                f"own, which baracuda never runs; quantize it without calibration ({str(error)[:200]})"
            ) from None


def model_class(config: Any) -> Any:
    """The transformers class that a config names, or else the headless model of its kind; None where there is neither.

    A name that transformers does not know may be a class in code beside the model, of which nothing is known.
    """
    import transformers

    name = (getattr(config, "architectures", None) or [None])[0]
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        return found
    if getattr(config, "auto_map", None):
        return None
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
        return None, f"transformers {transformers.__version__} does not know model_type {kind!r}"
    _require_sane(config)
    reader = transformers.CONFIG_MAPPING[kind]
    # Infinities have a spelling of their own in the files of newer versions.
    decoded = getattr(reader, "_decode_special_floats", dict)(config)
    with quiet():
        parsed = reader.from_dict({k: v for k, v in decoded.items() if k != "quantization_config"})
    cls = model_class(parsed)
    if cls is None:
        return None, f"transformers {transformers.__version__} has no {config.get('architectures')}"
    with torch.device("meta"), quiet():
        model: torch.nn.Module = cls._from_config(parsed)
    return model, ""


def _require_sane(config: Any) -> None:
    """Raise for a config that asks for more layers than any model has: transformers would start to build them."""
    for key, value in config.items():
        if isinstance(value, dict):
            _require_sane(value)
        elif _COUNT.search(str(key)) and not _NO_COUNT.search(str(key)):
            limit = MAX_EXPERTS if "expert" in key else MAX_REPEATS
            for count in value if isinstance(value, list) else [value]:
                if type(count) is int and count > limit:
                    raise CheckpointError("bad-config", f"config.json: {key} is {count}, more than any model has")


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
