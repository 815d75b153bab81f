"""Which tensors of a checkpoint are weights of Linears: asked of the model's own code, or told by names and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...core.patterns import matches
from ..checkpoint.directory import Checkpoint
from ..checkpoint.experts import stacked_experts, unstacked_experts
from ..checkpoint.scheme import FLOATS, Scheme
from ..errors import CheckpointError, FlowError, some
from .names import Names, cuts_weights, match_names
from .surroundings import casts_to_its_type, needs_float_weights, taken_apart

#: Used when transformers does not know the model. The report says so.
RULES = (
    "two-dimensional floating-point tensors called *.weight with at least 16 rows and columns, except those whose name "
    "contains embed, wte, wpe, lm_head, norm or router, or head as a whole word, or ends in shared.weight or "
    ".gate.weight"
)
_NOT_LINEAR = re.compile(
    r"embed|wte|wpe|lm_head|norm|\bhead\b|router|(^|\.)gate\.weight$|shared\.weight$", re.IGNORECASE
)
HEAD = "lm_head"
#: Linears that choose experts, as does all that is in a `router`: servers read them in floating point only.
ROUTERS = ("gate", "shared_expert_gate")
#: Subclasses of nn.Linear that compute what it does.
PLAIN = ("FalconLinear",)
_EXPERTS = re.compile(r"^(.*\.experts)\.\d+\.[^.]+$")
#: Layers that servers run as one: they share a scheme and an input scale.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"), ("w1", "w3"))
NOT_STORED = "not stored"
SHARED = "shares its weight with another module"
#: Settings that say how often something is built, and more than any model has: building that would take for ever.
_COUNT = re.compile(r"(^|_)(layers?|blocks?|depths?|experts?)$")
_NO_COUNT = re.compile(r"vocab|size|dim")
MAX_REPEATS, MAX_EXPERTS = 10_000, 100_000


@dataclass
class Structure:
    """`linears` maps the weight tensors to quantize to their module names; `left` says why others are not."""

    source: str
    linears: dict[str, str] = field(default_factory=dict)
    #: Module name -> reason, for every Linear (or what looks like one) that stays in floating point.
    left: dict[str, str] = field(default_factory=dict)
    #: Checkpoint module name -> module name in the transformers model.
    modules: dict[str, str] = field(default_factory=dict)
    #: Which stored tensor is which of the transformers model.
    names: Names = field(default_factory=Names)
    #: Why transformers' own reader of compressed-tensors cannot open the result, and who can.
    unopened: str | None = None
    #: The kind of stacked experts that it does not read.
    unstacked: str | None = None

    def notes(self) -> list[str]:
        """What a reader of the checkpoint should know."""
        notes = []
        if any(_EXPERTS.match(module) for module in self.left):
            notes.append(
                "The experts stay in floating point. baracuda.load and servers read them; transformers' own reader of "
                "compressed-tensors looks for packed experts only and would start with random ones. --scheme w4a16, "
                "with a --group-size that divides their columns, packs them, and everybody reads those."
            )
        if self.unopened is not None:
            notes.append(f"transformers' own reader of compressed-tensors cannot open this checkpoint: {self.unopened}")
        elif self.unstacked is not None:
            notes.append(
                "The experts stay in floating point, in a stack that baracuda.load and servers read. transformers' own "
                f"reader of compressed-tensors looks for single ones in place of {self.unstacked}, and fails or starts "
                "with random ones."
            )
        elif lost := [tensor for tensor in self.joined() if not _EXPERTS.match(tensor.removesuffix(".weight"))]:
            notes.append(
                f"transformers joins {some(lost)} with others when it loads them. They stay in floating point, which "
                "baracuda.load and servers read; its own reader of compressed-tensors looks for quantized ones only, "
                "and would start with random values instead."
            )
        return notes

    def joined(self) -> list[str]:
        """The float tensors that transformers makes others of by rules for weights alone."""
        rules = self.names.collected.items()
        weights = [tensor for tensor, sources in rules if all(name.endswith(".weight") for name in sources)]
        return [tensor for tensor in weights if tensor not in self.linears]

    def ignore(self) -> list[str]:
        """Names for the config: readers must not expect these to be quantized. Numbered families become patterns."""
        taken = {_family(module) for module in self.linears.values()}
        taken |= {_family(self.modules.get(module, module)) for module in self.linears.values()}
        names: set[str] = set()
        for module in self.left:
            if (experts := _EXPERTS.match(module)) is not None:
                # vLLM asks for the layer, and for projections under names of its own.
                names.add(rf"re:^{_family(experts[1])}(\..*)?$")
                continue
            for name in {module, self.modules.get(module, module)}:
                family = _family(name)
                plain = family == re.escape(name) or family in taken
                names.add(name if plain else f"re:^{family}$")
        return sorted(names)


def _family(module: str) -> str:
    return re.sub(r"(?<=\\\.)\d+(?=\\\.|$)", r"\\d+", re.escape(module))


def find_linears(source: Checkpoint, scheme: Scheme, ignore: tuple[str, ...] = ()) -> Structure:
    if "quantization_config" in source.config:
        raise FlowError(f"{source.directory}: already quantized; start from the floating-point checkpoint")
    try:
        model, why = skeleton(source.config)
    except CheckpointError:
        raise
    except Exception as error:  # a config can be wrong in any way; transformers then raises anything
        raise FlowError(
            f"transformers cannot build the model of config.json: {type(error).__name__}: {error}"
        ) from None
    structure = _from_model(model, source, scheme) if model is not None else _from_rules(source, why)
    for tensor, module in list(structure.linears.items()):
        name = structure.modules.get(module, module)
        reason = scheme.declines(source.entry(tensor))
        if any(matches(pattern, name) or matches(pattern, module) for pattern in ignore):
            reason = "ignored on request"
        if _ends_in(name, HEAD) or _ends_in(module, HEAD):
            reason = "the output head"
        if reason is not None:
            del structure.linears[tensor]
            structure.left[module] = reason
    _require_matches(structure, source, ignore)
    _require_found(structure, source, ignore)
    _require_whole_families(structure)
    _leave_whole_families(structure, source)
    if not structure.linears:
        raise FlowError(f"{source.directory}: nothing to quantize. {_why_nothing(structure.left)}")
    if model is not None:
        structure.unstacked = unstacked_experts(model)
        structure.unopened = _why_unopened(structure, model, scheme)
    return structure


def _why_unopened(structure: Structure, model: torch.nn.Module, scheme: Scheme) -> str | None:
    """What transformers' own reader fails on, or None; `model` is of no use afterwards."""
    kind = type(model).__name__
    packed = [structure.modules[module] for module in structure.linears.values() if module in structure.modules]
    if cuts_weights(model, packed if scheme.packed else []):
        return (
            f"its rules for {kind} cut a weight into several, which it refuses to do with quantized ones, even where "
            "no file holds such a weight. baracuda.load opens it."
        )
    if scheme.packed and needs_float_weights(model, packed):
        return (
            f"its {kind} asks Linears for a float weight when it has loaded, and packed ones have none. baracuda.load "
            "opens it; --scheme w8a8 packs nothing."
        )
    return None


def _why_nothing(left: dict[str, str]) -> str:
    """Each reason once, with an example."""
    alike: dict[str, list[str]] = {}
    for module, why in left.items():
        alike.setdefault(why, []).append(module)
    told = [f"{some(modules, 1)}: {why}" for why, modules in list(alike.items())[:8]]
    return "; ".join(told) or "No Linear weights were found."


def _require_matches(structure: Structure, source: Checkpoint, ignore: tuple[str, ...]) -> None:
    """A pattern that matches nothing is a typing error. What stays as it is anyway, a norm or the head, does match."""
    names = {tensor.rpartition(".")[0] for tensor in source.where}.union(structure.left, structure.modules.values())
    names.add(HEAD)
    for pattern in ignore:
        if not any(matches(pattern, name) for name in names):
            example = next(iter([*structure.linears.values(), *structure.left]), "")
            raise FlowError(
                f"--ignore {pattern}: expected names of modules, such as {example}; it matches none of this model's: "
                "correct it, or drop it"
            )


def _require_found(structure: Structure, source: Checkpoint, ignore: tuple[str, ...]) -> None:
    """Linears without a weight beside weights without a place: the names differ, and half a model would stay float."""
    lost = [
        module
        for module, reason in structure.left.items()
        if reason == NOT_STORED and not any(matches(pattern, module) for pattern in ignore)
    ]
    matrices = [name for name in structure.names.unread if source.entry(name).dtype in FLOATS]
    matrices = [name for name in matrices if len(source.entry(name).shape) == 2]
    if lost and matrices:
        raise FlowError(
            f"{source.directory}: {structure.source} and the names in the files differ: {some(lost)} found no weight, "
            f"and nothing reads {some(matrices)}; load and save the model with this transformers or install the one "
            "it was saved with, or leave these Linears with --ignore"
        )


def _require_whole_families(structure: Structure) -> None:
    """Servers refuse a fused layer of which a part is quantized, so an --ignore must not split one."""
    quantized = set(structure.linears.values())
    left, taken = (next(filter(_EXPERTS.match, modules), None) for modules in (structure.left, sorted(quantized)))
    if left is not None and taken is not None:
        raise FlowError(
            f"--ignore leaves {left} but not {taken}: readers look for experts of one kind; ignore all of them or none"
        )
    for module, reason in structure.left.items():
        family = fused_with(module)
        split = [name.rpartition(".")[2] for name in family if name in quantized]
        if split and reason == "ignored on request":
            leaves = ", ".join(name.rpartition(".")[2] for name in family)
            raise FlowError(
                f"--ignore leaves {module} but not {', '.join(split)}: servers run {leaves} as one layer; "
                "ignore all of them or none"
            )


def fused_with(module: str) -> list[str]:
    """The modules that servers run as one layer with this one, by their names; itself among them, or alone."""
    parent, dot, leaf = module.rpartition(".")
    return [f"{parent}{dot}{name}" for name in next((family for family in FUSED if leaf in family), (leaf,))]


def _leave_whole_families(structure: Structure, source: Checkpoint) -> None:
    """A Linear that must stay float keeps those beside it float that servers run as one layer with it."""
    for module in [name for name in structure.left if f"{name}.weight" in source.where]:
        for name in fused_with(module):
            if structure.linears.pop(f"{name}.weight", None) is not None:
                structure.left[name] = f"servers run it as one layer with {module}, which stays in floating point"


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without its own bars and notices: this program draws its own."""
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
    """What transformers makes of a config.json, alone: code that comes with a model is not run, nor asked about."""
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
    """The transformers model a config names, or else the one below the heads of its kind; None where it has neither.

    A name that is not transformers' own may be that of code beside the model, which can be built in any way.
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
    """The model on the meta device: its structure without its weights; None with the reason where there is none."""
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
    """A config can ask for a billion layers, and transformers would start to make them."""
    for key, value in config.items():
        if isinstance(value, dict):
            _require_sane(value)
        elif _COUNT.search(str(key)) and not _NO_COUNT.search(str(key)):
            limit = MAX_EXPERTS if "expert" in key else MAX_REPEATS
            for count in value if isinstance(value, list) else [value]:
                if type(count) is int and count > limit:
                    raise CheckpointError("bad-config", f"config.json: {key} is {count}, more than any model has")


def tied_weights(model: torch.nn.Module) -> dict[str, str]:
    """Tensor of the model -> the one that it is, under another name."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def stay_float(model: torch.nn.Module) -> dict[str, str]:
    """The Linears whose place no module of integers can take, with the reason."""
    reasons = dict.fromkeys((name.removesuffix(".weight") for name in tied_weights(model).values()), SHARED)
    reasons |= dict.fromkeys(taken_apart(model), "the code around it computes with its weight itself")
    for name, module in model.named_modules():
        kind = type(module)
        if isinstance(module, torch.nn.Linear) and kind is not torch.nn.Linear and kind.__name__ not in PLAIN:
            reasons[name] = f"a {kind.__name__}, which may do more than an nn.Linear"
    return reasons


def _casts(model: torch.nn.Module, name: str) -> str | None:
    """Why a Linear stays float, in every scheme, whose call alone integers could serve; or None."""
    parent, _, leaf = name.rpartition(".")
    casts = casts_to_its_type(model.get_submodule(parent), leaf)
    return "the module around it casts to the type of its weight" if casts else None


def _ends_in(name: str, *endings: str) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def _is_router(name: str) -> bool:
    return _ends_in(name, *ROUTERS) or "router" in name.split(".")


def _from_model(model: torch.nn.Module, source: Checkpoint, scheme: Scheme) -> Structure:
    structure = Structure(f"the nn.Linear modules of transformers' {type(model).__name__}")
    structure.names = names = match_names(model, source.where)
    spoken_for: set[str] = set()
    tied = tied_weights(model)
    floats = stay_float(model)
    for name, module in model.named_modules():
        stored = names.module(name)
        conv = type(module).__name__ == "Conv1D"
        if stored is not None and (conv or isinstance(module, torch.nn.Embedding)):
            spoken_for.add(f"{stored}.weight")
        if conv and stored is not None:
            structure.modules[stored] = name
            structure.left[stored] = (
                "a Conv1D; readers of the format know nn.Linear only, whose weight is the transpose"
            )
        if not isinstance(module, torch.nn.Linear):
            continue
        if f"{name}.weight" in tied:
            structure.left[name] = SHARED
        elif stored is None:
            origin = names.origin(name)
            structure.left[name] = f"transformers makes it from {origin}" if origin is not None else NOT_STORED
        else:
            structure.modules[stored] = name
            spoken_for.add(f"{stored}.weight")
            router = "a router, which servers read in floating point" if _is_router(name) else None
            reason = router or floats.get(name) or _casts(model, name)
            if reason is None:
                structure.linears[f"{stored}.weight"] = stored
            else:
                structure.left[stored] = reason
    if scheme.packed:
        _take_experts(structure, model, source, scheme)
        spoken_for |= set(structure.linears)
    _name_the_rest(structure, source, spoken_for)
    return structure


def _take_experts(structure: Structure, model: torch.nn.Module, source: Checkpoint, scheme: Scheme) -> None:
    """All experts or none: readers look for one kind of them."""
    known = stacked_experts(model)
    experts = {tensor: tensor.removesuffix(".weight") for tensor in source.where if known(tensor)}
    reasons = {module: scheme.declines(source.entry(tensor)) for tensor, module in experts.items()}
    declined = next(((module, why) for module, why in reasons.items() if why is not None), None)
    if declined is None:
        structure.linears |= experts
    else:
        structure.left |= dict.fromkeys(reasons, f"expert weights, of which {declined[0]} does not fit: {declined[1]}")


def _name_the_rest(structure: Structure, source: Checkpoint, spoken_for: set[str]) -> None:
    """Matrices that are no nn.Linear here may be one in a server: they are left, named, and told to it."""
    for tensor in source.where:
        entry = source.entry(tensor)
        if tensor in spoken_for or entry.dtype not in FLOATS or len(entry.shape) < 2:
            continue
        module = tensor.removesuffix(".weight")
        if module not in structure.left:
            what = "expert weights" if "expert" in module else "not an nn.Linear of the model"
            structure.left[module] = f"{what}, shape {list(entry.shape)}"


def _from_rules(source: Checkpoint, why: str) -> Structure:
    structure = Structure(f"names and shapes, since {why}: {RULES}")
    for tensor in source.where:
        entry = source.entry(tensor)
        if entry.dtype not in FLOATS or len(entry.shape) != 2 or not tensor.endswith(".weight"):
            continue
        module = tensor.removesuffix(".weight")
        if _NOT_LINEAR.search(tensor) or min(entry.shape) < 16:
            structure.left[module] = "not a Linear by its name or shape"
        else:
            structure.linears[tensor] = module
    return structure
