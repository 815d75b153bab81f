"""Models with integer linears as checkpoints: what save_pretrained wrote is described from the files themselves."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.errors import BaracudaError
from ...core.types import ElementKind
from ...nn import FakeQuantize, QATLinear, QuantizedLinear, SmoothQuantLinear
from ...nn.linear import IntegerLinear
from ...schemes import ActivationFormat, Scheme, WeightFormat
from ...schemes.registry import is_checkpoint_scheme
from ..checkpoint.check import require_stored
from ..checkpoint.config import quantization_config
from ..checkpoint.directory import Checkpoint
from ..checkpoint.fusion import fused_with
from ..checkpoint.groups import unserved_groups
from ..checkpoint.targets import layer_recipe
from ..errors import FlowError, some
from .head import ties_quantized, untied
from .layers import EXPERT, Structure
from .packed import PackedLinear
from .repack import stored_groups
from .structure import stored_structure


def save(model: nn.Module, out: str | Path, **options: Any) -> None:
    """Write a transformers model with integer or QAT linears as a checkpoint, with the scales that it holds.

    QATLinears are stored as the integer linears that they train for, with their observed or learned scales; the model
    itself stays as it is. Layers that servers fuse share one input scale: the largest of theirs, and a warning says so.
    The options are those of transformers' `save_pretrained`.
    """
    if not hasattr(model, "save_pretrained"):
        raise FlowError(f"baracuda.save: expected a transformers model, got {type(model).__name__}; use torch.save")
    with _converted(model):
        if not require_savable(model):
            raise FlowError("baracuda.save: the model has no integer or QAT linears; save it with save_pretrained")
        written: Any = model
        written.save_pretrained(out, **options)  # which describes what it wrote


def require_savable(model: nn.Module) -> list[str]:
    """The names of the model's integer linears; raises where one of them has no place in a checkpoint."""
    found, groups = [], stored_groups(model)
    for name, module in model.named_modules():
        if isinstance(module, QATLinear | FakeQuantize):
            raise FlowError(
                f"{name}: a {type(module).__name__}, which is for training; baracuda.save writes the integer linears "
                "that it trains for, baracuda.convert puts them in its place"
            )
        if isinstance(module, IntegerLinear) and not is_checkpoint_scheme(scheme_of(module, groups.get(name))):
            raise FlowError(
                f"{name}: {module} has no layout in checkpoints; expected symmetric w8a8, dynamic or static, w4a8 with "
                "columns in multiples of 32, or w4a16; quantize the model with one of these, or keep its state_dict() "
                "with torch.save"
            )
        if isinstance(module, PackedLinear) and module.input_order is not None:
            raise FlowError(
                f"{name}: its groups were out of order (act-order) and have been put in order, which checkpoints have "
                "no tensor for; copy the directory that it was loaded from"
            )
        if isinstance(module, IntegerLinear | PackedLinear):
            if name.endswith(".base_layer"):
                raise FlowError(
                    f"{name}: a linear under an adapter, whose name no reader knows; save the adapter with the PEFT "
                    "model's save_pretrained, or take the adapter off with its unload() and save what that returns"
                )
            found.append(name)
    return found


def require_state(state: Mapping[str, Any] | None, linears: Collection[str], rewritten: Collection[str]) -> None:
    """Raise where a state_dict that save_pretrained was given does not hold what a checkpoint stores of the linears."""
    if state is None:
        return
    if rewritten:
        raise FlowError(
            f"save_pretrained(state_dict=...): {some(sorted(rewritten))} are stored otherwise than in memory, which is "
            "made from the model itself; leave state_dict out"
        )
    if lacking := [name for name in linears if f"{name}.weight_scale" not in state]:
        raise FlowError(
            f"save_pretrained(state_dict=...): expected the integers and scales of the model, got no weight_scale of "
            f"{some(lacking)}; leave state_dict out"
        )


def scheme_of(module: IntegerLinear, group_size: int | None = None) -> Scheme:
    """What an integer linear computes; ranges that are the scheme's own are not named.

    Servers clamp static activations at -128. Linears that were trained with -127 as their lowest integer count as the
    same scheme: a value that is clipped there comes out one step lower.
    """
    kind = "static" if isinstance(module, SmoothQuantLinear) else "dynamic"
    usual = type(module)(1, 1, activation=module.activation, mode=module.mode, device="meta")
    own = module.q_min, module.q_max
    same = own == (usual.q_min, usual.q_max) or (kind == "static" and own == (-127, 127))
    ends = (None, None) if same else own
    weight = WeightFormat(module.weight_element, group_size)
    return Scheme(weight, ActivationFormat(kind, module.activation, module.mode, *ends))  # type: ignore[arg-type]


def describe_saved(directory: str | os.PathLike[str], integer_inputs: Collection[str] = ()) -> None:
    """Write the quantization_config that the files of a saved model call for into its config.json.

    `integer_inputs` names the modules with packed weights whose activations are integers: the files do not tell.
    """
    out = Path(directory)
    with Checkpoint.open(out) as stored:
        modules = list({name.rpartition(".")[0]: None for name in stored.where if name.endswith(".weight_scale")})
        structure = stored_structure(stored, modules)
        integers = {module for module in modules if structure.modules.get(module, module) in integer_inputs}
        found = {module: _stored_scheme(stored, module, module in integers) for module in modules}
        config = untied(stored.config) if ties_quantized(stored.config, modules) else dict(stored.config)
        floats = [name for module in modules for name in fused_with(module) if f"{name}.weight" in stored.where]
    if not found:
        raise FlowError(f"{out}: expected integer linears in the files that were written, found none")
    recipe = layer_recipe(found, structure.modules)
    config["quantization_config"] = quantization_config(recipe, structure.ignore())
    temporary = out / ".config.json.new"
    temporary.write_text(json.dumps(config, indent=2) + "\n")
    temporary.replace(out / "config.json")
    require_stored(out, recipe)
    _warn(structure, found, [name for name in floats if name not in found])


def _warn(structure: Structure, found: Mapping[str, Scheme], mixed: Collection[str]) -> None:
    """Say which readers do not read all of what was written."""
    if any(EXPERT.match(module) for module in structure.left):
        _tell(
            "the experts of this mixture are saved in floating point. baracuda.load and vLLM read them; transformers "
            "without baracuda looks for packed experts only, from 5.13 on: it starts with random ones, or raises. "
            "`baracuda quantize` packs experts, which all of these read"
        )
    if mixed:
        _tell(
            f"servers run {some(sorted(set(mixed)))} as one layer with neighbours that are quantized, and refuse the "
            "checkpoint; baracuda.load and transformers read it. Quantize all of them or none"
        )
    if (unserved := unserved_groups(scheme.weight.group_size for scheme in found.values())) is not None:
        _tell(unserved)


def _tell(message: str) -> None:
    warnings.warn(message, stacklevel=5)  # where save_pretrained was called


def _stored_scheme(stored: Checkpoint, module: str, integer_inputs: bool) -> Scheme:
    """The scheme of a Linear by the tensors under its name."""
    if f"{module}.weight_packed" in stored.where:
        columns = stored.entry(f"{module}.weight_packed").shape[1] * 8
        size = columns // stored.entry(f"{module}.weight_scale").shape[1]
        kind = "dynamic" if integer_inputs else "float"
        zero_points = f"{module}.weight_zero_point" in stored.where
        return Scheme(WeightFormat(ElementKind.S4, size, zero_points), ActivationFormat(kind))  # type: ignore[arg-type]
    kind = "static" if f"{module}.input_scale" in stored.where else "dynamic"
    return Scheme(WeightFormat(), ActivationFormat(kind))  # type: ignore[arg-type]


@contextmanager
def _converted(model: nn.Module) -> Iterator[None]:
    """QATLinears replaced by what they train for, for as long as the model is written."""
    trained = {name: module for name, module in model.named_modules() if isinstance(module, QATLinear)}
    made: dict[str, QuantizedLinear | SmoothQuantLinear] = {}
    for name, module in trained.items():
        try:
            made[name] = module.convert()
        except BaracudaError as error:
            raise FlowError(f"{name}: cannot be saved: {error}") from None
        for scale in (made[name].weight_scale, getattr(made[name], "input_scale", None)):
            if scale is not None and not bool((scale > 0).all()):
                raise FlowError(
                    f"{name}: cannot be saved: training has made a scale zero or negative; train on with a smaller "
                    "learning rate for the scales"
                )
    try:
        for name, linear in made.items():
            model.set_submodule(name, linear)
        yield
    finally:
        for name, module in trained.items():
            model.set_submodule(name, module)


@contextmanager
def shared_input_scales(model: nn.Module) -> Iterator[list[str]]:
    """One input scale for each family of linears that servers fuse, for as long as the model is written."""
    static = {name: module for name, module in model.named_modules() if isinstance(module, SmoothQuantLinear)}
    before = {name: module.input_scale for name, module in static.items()}
    changed = []
    for name, module in static.items():
        family = [static[other] for other in fused_with(name) if other in static]
        largest = torch.stack([before[other] for other in fused_with(name) if other in static]).amax(0)
        if len(family) > 1 and not torch.equal(largest, module.input_scale):
            module.input_scale = largest
            changed.append(name)
    if changed:
        warnings.warn(
            f"servers run {some(changed)} as one layer with their neighbours and keep one input scale for it: the "
            "largest of the layer is written",
            stacklevel=4,
        )
    try:
        yield changed
    finally:
        for name, module in static.items():
            module.input_scale = before[name]
