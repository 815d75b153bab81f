"""Who computes attention in a transformers model: found by a pass, and marked in the modules that call it."""

from __future__ import annotations

from torch import nn

from ..nn.attention import FASTER, MARK, ORDERED, TORCHS, recording
from .merge import Inputs, PassError, Passes

_NOT_TORCHS, _ONE_ORDER = "not torch's to the last bit", "has one order of summation, whatever the batch"
_SAID = {
    "cpu": {
        FASTER: f"is computed by baracuda's kernel where that is faster, {_NOT_TORCHS}",
        ORDERED: f"{_ONE_ORDER}, the padding and the number of tokens",
    },
    "cuda": {
        FASTER: f"of single tokens is computed by baracuda's kernel inside torch.compile, {_NOT_TORCHS}",
        ORDERED: f"{_ONE_ORDER}, padding on the left and the number of tokens",
    },
}


def switch_attention(model: nn.Module, to: str, inputs: Inputs | None = None) -> dict[str, str]:
    """Let modules that compute attention by torch's take our kernel: those whose calls it takes in a pass.

    `inputs` are those of the pass; transformers has its own. Says who computes the attention of which module now.
    Modules that are to keep torch's, or have one order already, do.
    """
    given = inputs if inputs is not None else getattr(model, "dummy_inputs", None)
    kinds = {parameter.device.type for parameter in model.parameters()}
    if given is None or len(kinds) != 1 or not kinds <= {"cpu", "cuda"}:
        return {}
    try:
        with Passes(model, given) as passes, recording() as called:
            passes.run(list)
    except PassError:  # the caller's own passes say it
        return {}
    switched = {}
    for name, module in model.named_modules():
        if module in called and called[module] is None and module.__dict__.get(MARK) not in (TORCHS, ORDERED):
            module.__dict__[MARK] = to
        if called.get(module) is None and module.__dict__.get(MARK) == to:
            switched[name] = _SAID[next(iter(kinds))][to]
    return switched


def keep_torchs_attention(model: nn.Module) -> None:
    """Modules that compute attention by torch's go on doing so, whatever is fused later."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.__dict__[MARK] = TORCHS


def has_one_order(module: nn.Module) -> bool:
    return module.__dict__.get(MARK) == ORDERED
