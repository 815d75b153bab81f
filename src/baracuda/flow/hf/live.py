"""A float model that transformers has just loaded, quantized in place: the layers and bits of `baracuda quantize`."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ...core.patterns import matches
from ...schemes import Recipe
from ..checkpoint.fusion import fused_with
from ..checkpoint.groups import fitting
from ..checkpoint.storage import Storage
from ..checkpoint.tensorfile import Entry
from ..errors import FlowError
from .layers import IGNORED
from .modules import quantized_linear
from .skeleton import stay_float, tied_weights
from .structure import why_float


def quantize_loaded(model: nn.Module, recipe: Recipe, ignore: Iterable[str] = ()) -> dict[str, str]:
    """Replace the Linears of a model; returns why others stay float. Data-free: nothing is calibrated."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    floats, tied, left = stay_float(model), tied_weights(model), dict[str, str]()
    for name, module in linears.items():
        weight = Entry(f"{name}.weight", module.weight.dtype, tuple(module.weight.shape))
        scheme = fitting(recipe.of(name).scheme, module.in_features)
        reason = why_float(model, name, floats) or Storage(scheme).declines(weight)
        if f"{name}.weight" in tied:
            reason = "shares its weight with another module"
        if any(matches(pattern, name) for pattern in ignore):
            reason = IGNORED
        if reason is not None:
            left[name] = reason
    for name in list(left):
        for other in fused_with(name):
            if other in linears:
                left.setdefault(other, f"servers run it as one layer with {name}, which stays in floating point")
    chosen = {name: module for name, module in linears.items() if name not in left}
    if not chosen:
        raise FlowError(f"{type(model).__name__}: nothing to quantize; load it without a quantization_config")
    for name, module in chosen.items():
        model.set_submodule(name, quantized(module, recipe, name))
    return left


def quantized(linear: nn.Linear, recipe: Recipe, name: str) -> nn.Module:
    """The module that computes a linear in its scheme; its buffers have the names and bits that a checkpoint has."""
    method, scheme = recipe.of(name).method, fitting(recipe.of(name).scheme, linear.in_features)
    storage, weight = Storage(scheme), linear.weight.detach()
    rows = storage.as_quantized_from(weight, weight.dtype)
    entry = Entry(f"{name}.weight", weight.dtype, tuple(weight.shape))
    stored = storage.store(method.quantize(rows, scheme.weight)) | storage.constants(entry, None)
    made = quantized_linear(linear, scheme, weight.dtype)
    for part, tensor in stored.items():
        setattr(made, part, tensor.to(weight.device))
    made.register_parameter("bias", linear.bias)
    return made.train(linear.training)
