"""baracuda's quantizer for transformers. Importing this module registers it, and needs transformers.

The classes have a module of their own, so that a loaded model, which holds them, can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from transformers.core_model_loading import ConversionOps, build_glob_alternation
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...core.patterns import matches
from ...schemes import Choice, Recipe, checkpoint_scheme
from ..checkpoint.config import parse_config
from ..checkpoint.storage import Storage
from ..errors import FlowError
from .experts import SERIALIZED, expert_sources, float_experts, require_readable_experts
from .live import quantize_loaded
from .modules import quantized_linear
from .packed import make_ready
from .skeleton import stay_float

METHOD = "baracuda"
#: Where a model has patterns for the names of what transformers loads as float32 whatever the type of the model.
KEPT = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


@register_quantization_config(METHOD)
class BaracudaConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """For `from_pretrained(MODEL, quantization_config=BaracudaConfig("w8a8"))`: the model's Linears as integers.

    A float model is quantized while it is loaded, with the layers and the bits of `baracuda quantize`. The schemes are
    those that need no calibration; `group_size` is that of w4a16, `ignore` names Linears to leave, as patterns. A
    quantized checkpoint is computed as it is stored, whatever is given here.
    """

    def __init__(
        self,
        scheme: str = "w8a8",
        *,
        ignore: Iterable[str] = (),
        group_size: int | None = None,
        compressed_tensors: dict[str, Any] | None = None,
        checked: bool = False,
        **_: Any,
    ) -> None:
        self.quant_method = METHOD
        self.checked = checked  # by the caller, who compares the shapes afterwards
        self.scheme, self.ignore, self.group_size = scheme, tuple(ignore), group_size
        self.compressed_tensors = compressed_tensors or {}
        if not self.compressed_tensors:
            self.recipe()  # says what is wrong with the scheme

    def recipe(self) -> Recipe:
        """What the checkpoint stores, or else what was asked for."""
        if self.compressed_tensors:
            return parse_config(self.compressed_tensors)
        scheme, smooth = checkpoint_scheme(self.scheme)
        if smooth or scheme.activation.kind == "static":
            raise FlowError(
                f"BaracudaConfig: {self.scheme} needs calibration data, which from_pretrained has not; make a "
                "checkpoint with `baracuda quantize`, or use w8a8 or w4a16"
            )
        if self.group_size is not None:
            if scheme.weight.group_size is None or self.group_size < 8 or self.group_size % 8:
                raise FlowError(f"group_size: expected a multiple of 8, for w4a16, got {self.group_size}")
            scheme = scheme.with_groups(self.group_size)
        return Recipe(Choice(scheme))

    def to_dict(self) -> dict[str, Any]:
        """As config.json has it: compressed-tensors' own words where the layers are known."""
        if self.compressed_tensors:
            return dict(self.compressed_tensors)
        asked = {"scheme": self.scheme, "ignore": list(self.ignore), "group_size": self.group_size}
        return {"quant_method": METHOD, **asked}


class FloatExperts(ConversionOps):  # type: ignore[misc]
    """Packed experts, made float for the stack that transformers computes with."""

    def __init__(self, quantizer: Any) -> None:
        self.recipe = quantizer.quantization_config.recipe()

    def convert(self, input_dict: Any, *_: Any, model: Any, full_layer_name: str, **__: Any) -> dict[str, Any]:
        storage = Storage(self.recipe.of(full_layer_name).scheme)
        return float_experts(storage, input_dict, model.get_parameter(full_layer_name).dtype)


@register_quantizer(METHOD)
class Quantizer(HfQuantizer):  # type: ignore[misc]
    """Puts our modules where the config says: before the weights are loaded, or, quantizing them, afterwards."""

    _rules: Sequence[tuple[Any, Any]] = ()

    def update_weight_conversions(self, weight_conversions: list[Any], *_: Any) -> list[Any]:
        """Build experts from the serialized tensors. All other tensors that transformers joins or cuts are float.

        Some versions of transformers also pass the model.
        """
        updated = [self._collecting(rule) if expert_sources(rule) else rule for rule in weight_conversions]
        self._rules = list(zip(updated, weight_conversions, strict=True))
        return updated

    def _collecting(self, rule: Any) -> Any:
        """The rule for stacked experts, which then also takes what packed ones are stored as, and makes them float."""
        sources = [source.removesuffix("weight") + name for source in expert_sources(rule) for name in SERIALIZED]
        sources += [source for source in rule.source_patterns if source not in expert_sources(rule)]
        targets, operations = list(rule._original_target_patterns), [FloatExperts(self), *rule.operations]
        if hasattr(rule, "copy"):
            return rule.copy(sources, targets, operations=operations)
        made = type(rule)(sources, targets, operations=operations)
        for name in ("scope_prefix", "base_model_prefix", "force_cpu"):
            if hasattr(rule, name):
                setattr(made, name, getattr(rule, name))
        return made

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        if not self.pre_quantized:
            return
        recipe, ignore = self.quantization_config.recipe(), self.quantization_config.compressed_tensors["ignore"]
        require_readable_experts(model, ignore)
        floats = stay_float(model)
        for name, module in list(model.named_modules()):
            if not isinstance(module, nn.Linear) or name in floats:
                continue
            if not any(matches(pattern, name) for pattern in ignore):
                model.set_submodule(name, quantized_linear(module, recipe.of(name).scheme, module.weight.dtype))
        leave_integers(model)
        self.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self.dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        """Quantize a model loaded as floats; check the shapes of others, as transformers does not."""
        config = self.quantization_config
        # Saving runs the rules backwards. Experts are float by now, so it takes transformers' own.
        own = {id(ours): theirs for ours, theirs in self._rules}
        if hasattr(model, "_weight_conversions"):
            rules: Any = model._weight_conversions or []
            model._weight_conversions = [own.get(id(rule), rule) for rule in rules]  # type: ignore[assignment]
        if not self.pre_quantized:
            quantize_loaded(model, config.recipe(), config.ignore)
            return make_ready(model)
        self._cast(model)
        for name, tensor in model.state_dict().items():
            if tensor.shape == self.shapes.get(name, tensor.shape):
                continue
            if config.checked:
                return model  # the reader names every tensor of another shape
            raise FlowError(
                f"{name}: expected {list(self.shapes[name])}, the file has {list(tensor.shape)}; make or download "
                "the checkpoint again"
            )
        computing = make_ready(model)
        self.shapes = {name: tensor.shape for name, tensor in computing.state_dict().items()}
        return computing

    def _cast(self, model: nn.Module) -> None:
        """Give floats the type of the model. Some versions of transformers leave renamed ones in that of the file."""
        kept = {part for name in KEPT for part in getattr(model, name, None) or ()}
        for name, parameter in model.named_parameters():
            wanted = self.dtypes.get(name, parameter.dtype)
            if parameter.is_floating_point() and parameter.dtype is not wanted and not kept & {name, *name.split(".")}:
                parameter.data = parameter.data.to(wanted)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters beside the integer linears, which pass gradients to their inputs."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Without this `generate` with a static cache runs eagerly."""
        return True


def leave_integers(model: nn.Module) -> None:
    """Narrow the patterns of what is loaded as float32 to floats: the oldest versions of transformers cast whatever a
    pattern matches, such as the packed integers of T5's `wo`, which float32 has too few bits for."""
    tensors = model.state_dict()

    def narrowed(pattern: str) -> list[str]:
        found = build_glob_alternation([pattern])[0]
        matched = [name for name in tensors if found.search(name)]
        floats = [name for name in matched if tensors[name].is_floating_point()]
        return floats if len(floats) < len(matched) else [pattern]

    for attribute in KEPT:
        if patterns := getattr(model, attribute, None):
            setattr(model, attribute, type(patterns)(name for pattern in patterns for name in narrowed(pattern)))
    if plan := getattr(model, "dtype_plan", None):  # made of them when the model is, in the oldest versions
        narrower = {name: dtype for pattern, dtype in plan.items() for name in narrowed(pattern)}
        setattr(model, "dtype_plan", narrower)  # noqa: B010 - a module's own attributes are tensors to mypy
