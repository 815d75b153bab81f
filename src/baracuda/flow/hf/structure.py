"""Which tensors of a checkpoint are weights of Linears: by the model that transformers builds, or by name and shape."""

from __future__ import annotations

import re

import torch

from ...core.patterns import matches
from ...schemes import Choice, Recipe, Scheme
from ..checkpoint.directory import Checkpoint
from ..checkpoint.fusion import fused_with
from ..checkpoint.groups import fitting
from ..checkpoint.storage import EIGHT_BIT_FLOATS, FLOATS, Storage
from ..checkpoint.targets import HEAD, is_head
from ..checkpoint.tensorfile import Entry
from ..errors import CheckpointError, FlowError, some
from .experts import stacked_experts, unstacked_experts, weight_only, who_reads_packed
from .head import take_head
from .layers import EXPERT, EXPERTS, HEAD_STAYS, IGNORED, NO_LINEAR, NOT_STORED, Structure
from .names import RENAMED_ALONE, cuts_weights, match_names, renamed_alone
from .skeleton import SHARED, skeleton, stay_float, tied_weights
from .surroundings import casts, needs_float_weights

#: Used when transformers does not know the model. The report says so.
RULES = (
    "two-dimensional floating-point tensors called *.weight with at least 16 rows and columns, except those whose name "
    "contains embed, wte, wpe, lm_head, norm or router, or head as a whole word, or ends in shared.weight or "
    ".gate.weight"
)
_NOT_LINEAR = re.compile(
    r"embed|wte|wpe|lm_head|norm|\bhead\b|router|(^|\.)gate\.weight$|shared\.weight$", re.IGNORECASE
)
#: Linears that choose experts, as do all modules in a `router`: servers read them in floating point only.
ROUTERS = ("gate", "shared_expert_gate")
#: Tensors that other tools store beside quantized weights.
_SCALES = (".weight_scale", ".weight_scale_inv", ".scale_inv", ".SCB", ".absmax", ".qzeros", ".weight_scale_2")


def find_linears(
    source: Checkpoint, recipe: Recipe, ignore: tuple[str, ...] = (), quantize_head: bool = False
) -> Structure:
    """The Linears of a checkpoint to quantize, each with its scheme and method, and the reasons why others stay."""
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
    structure = _from_model(model, source, recipe) if model is not None else _from_rules(source, why)
    for tensor, module in list(structure.linears.items()):
        name = structure.modules.get(module, module)
        choice, entry = recipe.of(module, name), source.entry(tensor)
        scheme = structure.choices[module].scheme if module in structure.choices else fitted(choice.scheme, [entry])
        structure.choices[module] = Choice(scheme, choice.method)
        reason = Storage(scheme).declines(entry)
        if any(matches(pattern, name) or matches(pattern, module) for pattern in ignore):
            reason = IGNORED
        if is_head(name) or is_head(module):
            reason = HEAD_STAYS
        if reason is not None:
            del structure.linears[tensor]
            structure.left[module] = reason
    _require_floats(structure, source)
    _require_matches(structure, source, [("--ignore", pattern) for pattern in ignore])
    _require_matches(structure, source, [("recipe: match", pattern) for pattern, _ in recipe.rules])
    _require_found(structure, source, ignore)
    _require_whole_families(structure)
    _leave_whole_families(structure, source)
    if not structure.linears:
        raise FlowError(f"{source.directory}: nothing to quantize. {_why_nothing(structure.left)}")
    structure.choices = {module: structure.choices[module] for module in structure.linears.values()}
    if quantize_head:
        take_head(structure, model, source, ignore)
    _require_one_scheme(structure)
    for module, choice in structure.choices.items():
        asked = recipe.of(module, structure.modules.get(module, module)).scheme.weight.group_size
        if asked is not None and not is_head(module) and choice.scheme.weight.group_size != asked:
            structure.refitted[module] = asked
    if model is not None:
        structure.unstacked = unstacked_experts(model)
        structure.unread = who_reads_packed() if any(map(stacked_experts(model), structure.linears)) else None
        structure.unopened = _why_unopened(structure, model)
    return structure


def _why_unopened(structure: Structure, model: torch.nn.Module) -> str | None:
    """What transformers' own reader fails on, or None. `model` cannot be used afterwards."""
    kind = type(model).__name__
    choices = structure.choices.items()
    stored_packed = [module for module, choice in choices if Storage(choice.scheme).packed]
    packed = [structure.modules[module] for module in stored_packed if module in structure.modules]
    if cuts_weights(model, packed):
        return (
            f"its rules for {kind} cut a weight into several, which from 5.21 on it refuses to do with quantized ones, "
            "even where no file holds such a weight. baracuda.load opens it."
        )
    if stored_packed and needs_float_weights(model, packed):
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
    lines = [f"{some(modules, 1)}: {why}" for why, modules in list(alike.items())[:8]]
    return "; ".join(lines) or "No Linear weights were found."


def _require_floats(structure: Structure, source: Checkpoint) -> None:
    """Raise where a Linear holds integers: without their scales nobody can say what they stand for."""
    weights = {module: source.entry(name) for module in structure.left if (name := f"{module}.weight") in source.where}
    scaled = [n for n in source.where if n.endswith(_SCALES)]
    integers = [
        f"{module} ({entry.dtype})"
        for module, entry in weights.items()
        if len(entry.shape) == 2 and not entry.dtype.is_floating_point
    ]
    eight_bit = [f"{m} ({e.dtype})" for m, e in weights.items() if e.dtype in EIGHT_BIT_FLOATS]
    quantized = integers or (eight_bit if scaled else [])
    if quantized:
        raise FlowError(
            f"{source.directory}: expected Linears in floating point, got {some(quantized)}: a part of this model is "
            "quantized already, by another tool; start from the floating-point checkpoint"
        )


def _require_matches(structure: Structure, source: Checkpoint, patterns: list[tuple[str, str]]) -> None:
    """Raise for a pattern that matches no module, a typing error. Modules that always stay float count too.

    Each pattern comes with where it was given.
    """
    names = {tensor.rpartition(".")[0] for tensor in source.where}.union(structure.left, structure.modules.values())
    names.add(HEAD)
    for where, pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            example = next(iter([*structure.linears.values(), *structure.left]), "")
            raise FlowError(
                f"{where} {pattern}: expected names of modules, such as {example}; it matches none of this model's: "
                "correct it, or drop it"
            )


def _require_found(structure: Structure, source: Checkpoint, ignore: tuple[str, ...]) -> None:
    """Raise where Linears have no weight while nothing reads some weights: half the model would stay float."""
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
    """Raise where --ignore splits a fused layer: servers refuse one that is quantized in part."""
    quantized = set(structure.linears.values())
    left, taken = (next(filter(EXPERT.match, modules), None) for modules in (structure.left, sorted(quantized)))
    if left is not None and taken is not None:
        raise FlowError(
            f"--ignore leaves {left} but not {taken}: readers look for experts of one kind; ignore all of them or none"
        )
    for module, reason in structure.left.items():
        family = fused_with(module)
        split = [name.rpartition(".")[2] for name in family if name in quantized]
        if split and reason == IGNORED:
            leaves = ", ".join(name.rpartition(".")[2] for name in family)
            raise FlowError(
                f"--ignore leaves {module} but not {', '.join(split)}: servers run {leaves} as one layer; "
                "ignore all of them or none"
            )


def _require_one_scheme(structure: Structure) -> None:
    """Raise where a recipe gives layers that servers fuse different schemes: no server reads those."""
    for module, choice in structure.choices.items():
        for name in fused_with(module):
            if name in structure.choices and structure.choices[name].scheme != choice.scheme:
                leaves = ", ".join(n.rpartition(".")[2] for n in fused_with(module))
                raise FlowError(
                    f"the recipe gives {module} another scheme than {name}: servers run {leaves} as one layer; write "
                    "a pattern that matches all of them"
                )


def fitted(scheme: Scheme, entries: list[Entry]) -> Scheme:
    """The scheme in groups that divide the columns of all these weights."""
    return fitting(scheme, *(entry.shape[1] for entry in entries if len(entry.shape) == 2))


def _leave_whole_families(structure: Structure, source: Checkpoint) -> None:
    """Where a Linear stays float, leave those float that servers fuse with it."""
    for module in [name for name in structure.left if f"{name}.weight" in source.where]:
        for name in fused_with(module):
            if structure.linears.pop(f"{name}.weight", None) is not None:
                structure.left[name] = f"servers run it as one layer with {module}, which stays in floating point"


def why_float(model: torch.nn.Module, name: str, floats: dict[str, str]) -> str | None:
    """Why a Linear of a model stays float in every scheme, or None; `floats` is what `stay_float` found."""
    if is_head(name):
        return HEAD_STAYS
    router = "a router, which servers read in floating point" if _is_router(name) else None
    return router or floats.get(name) or casts(model, name)


def stored_structure(stored: Checkpoint, quantized: list[str]) -> Structure:
    """The structure of a checkpoint that holds these modules quantized: all its other Linears are left."""
    structure = Structure("the files", linears={f"{module}.weight": module for module in quantized})
    handled = {tensor for tensor in stored.where if tensor.rpartition(".")[0] in set(quantized)}
    model, _ = skeleton(stored.config)
    if model is not None:
        structure.names = names = match_names(model, map(float_name, stored.where))
        for name, module in model.named_modules():
            own = names.module(name) or name
            if isinstance(module, torch.nn.Embedding):
                handled.add(f"{own}.weight")
            if isinstance(module, torch.nn.Linear):
                structure.modules[own] = name
                if own not in quantized:
                    structure.left[own] = "stored in floating point"
    _name_the_rest(structure, stored, handled)
    return structure


def float_name(tensor: str) -> str:
    """The name that a packed weight had before it was quantized."""
    return tensor.removesuffix("_packed") if tensor.endswith(".weight_packed") else tensor


def _ends_in(name: str, *endings: str) -> bool:
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def _is_router(name: str) -> bool:
    return _ends_in(name, *ROUTERS) or "router" in name.split(".")


def _from_model(model: torch.nn.Module, source: Checkpoint, recipe: Recipe) -> Structure:
    structure = Structure(f"the nn.Linear modules of transformers' {type(model).__name__}")
    structure.names = names = match_names(model, source.where)
    handled: set[str] = set()
    tied = tied_weights(model)
    floats = stay_float(model)
    for name, module in model.named_modules():
        stored = names.module(name)
        conv = type(module).__name__ == "Conv1D"
        if stored is not None and (conv or isinstance(module, torch.nn.Embedding)):
            handled.add(f"{stored}.weight")
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
            handled.add(f"{stored}.weight")
            reason = why_float(model, name, floats)
            if reason is None:
                structure.linears[f"{stored}.weight"] = stored
            else:
                structure.left[stored] = reason
    for stored in renamed_alone(model, {stored: structure.modules[stored] for stored in structure.linears.values()}):
        del structure.linears[f"{stored}.weight"]
        structure.left[stored] = RENAMED_ALONE
    _take_experts(structure, model, source, recipe)
    handled |= set(structure.linears)
    _name_the_rest(structure, source, handled)
    return structure


def _take_experts(structure: Structure, model: torch.nn.Module, source: Checkpoint, recipe: Recipe) -> None:
    """Quantize all experts or none, since readers look for one kind of them."""
    known = stacked_experts(model)
    experts = {tensor: tensor.removesuffix(".weight") for tensor in source.where if known(tensor)}
    entries = [source.entry(tensor) for tensor in experts]
    choices = {module: recipe.of(module) for module in experts.values()}
    # Servers have one scheme, and with it one group size, for all experts.
    fits = {m: Choice(fitted(weight_only(c.scheme), entries), c.method) for m, c in choices.items()}
    if len({choice.scheme for choice in fits.values()}) > 1:
        raise FlowError(
            "the recipe gives experts of the model different schemes: readers look for experts of one kind; write "
            "patterns that match all experts or none"
        )
    storages = {module: Storage(choice.scheme) for module, choice in fits.items()}
    structure.choices |= fits
    reasons = {module: storages[module].declines(source.entry(tensor)) for tensor, module in experts.items()}
    declined = next(((module, why) for module, why in reasons.items() if why is not None), None)
    if declined is None:
        structure.linears |= experts
    else:
        structure.left |= dict.fromkeys(reasons, f"{EXPERTS}, of which {declined[0]} does not fit: {declined[1]}")


def _name_the_rest(structure: Structure, source: Checkpoint, handled: set[str]) -> None:
    """List all other float matrices as left: a server may have an nn.Linear for them and must know that."""
    for tensor in source.where:
        entry = source.entry(tensor)
        if tensor in handled or entry.dtype not in FLOATS or len(entry.shape) < 2:
            continue
        module = tensor.removesuffix(".weight")
        if module not in structure.left:
            what = EXPERTS if "expert" in module else "not an nn.Linear of the model"
            structure.left[module] = f"{what}, shape {list(entry.shape)}"


def _from_rules(source: Checkpoint, why: str) -> Structure:
    structure = Structure(f"names and shapes, since {why}: {RULES}")
    for tensor in source.where:
        entry = source.entry(tensor)
        if len(entry.shape) != 2 or not tensor.endswith(".weight"):
            continue
        module = tensor.removesuffix(".weight")
        if entry.dtype not in FLOATS:
            structure.left[module] = f"its elements are {entry.dtype}; it is carried over as it is"
        elif _NOT_LINEAR.search(tensor) or min(entry.shape) < 16:
            structure.left[module] = NO_LINEAR
        else:
            structure.linears[tensor] = module
    return structure
