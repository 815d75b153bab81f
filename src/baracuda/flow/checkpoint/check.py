"""What a quantized checkpoint must hold: every rule a server relies on. What breaks one becomes a finding."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...core.patterns import matches
from ...schemes import Recipe
from ..errors import CheckpointError, FlowError, require_quick
from .config import parse_config
from .directory import (
    INDEX,
    SINGLE,
    Checkpoint,
    inside,
    read_json,
    require_one_model,
    shard_names,
)
from .fusion import FUSED
from .nibbles import order_of_groups
from .storage import EIGHT_BIT_FLOATS, FLOATS, STORED, Storage
from .tensorfile import Entry, TensorFile

BLOCK_BYTES = 16 << 20
#: What quantization-aware training and observers leave in a state_dict.
_TRAINING = re.compile(r"fake_quant|activation_post_process|(^|[._])observer\b|_observer[._]")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: a code to look for, the file or tensor, and what was expected."""

    code: str
    where: str
    message: str


def require_stored(out: Path, recipe: Recipe, ignore: Collection[str] = ()) -> None:
    """Raise unless the shards hold what the schemes store. Only their headers are read."""
    with Checkpoint.open(out) as stored:
        require_quick([*ignore, *(pattern for pattern, _ in recipe.rules)], stored.where, f"{out}: quantization_config")
        check = Check(out, entries={name: stored.entry(name) for name in stored.where}, files=stored.shards)
        check.check_modules(recipe)
    if check.findings:
        first, more = check.findings[0], len(check.findings) - 1
        raise FlowError(
            f"{out}: {first.code}: {first.where}: {first.message}{f' (and {more} more)' if more else ''}; "
            "baracuda verify lists all that is wrong; quantize the model again"
        )


@dataclass
class Check:
    """A checkpoint under examination. Whatever its files hold, the result is a list of findings."""

    out: Path
    findings: list[Finding] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
    files: dict[str, TensorFile] = field(default_factory=dict)
    #: The names of all shards, those that cannot be read included.
    shards: list[str] = field(default_factory=list)
    #: Whether config.json names classes in code that comes with the model.
    own_code: bool = False
    #: What has a finding: tensors and files, and the modules of the tensors.
    flagged: set[str] = field(default_factory=set)
    #: Weights that could not be computed again: those whose rounding was checked, and those that only look alike.
    compared: dict[str, set[str]] = field(default_factory=lambda: {"rounded": set(), "alike": set()})
    #: Tensor -> its file, once somebody asks.
    _holders: dict[str, TensorFile] = field(default_factory=dict)
    #: Module -> the parts stored under its name.
    modules: dict[str, dict[str, Entry]] = field(default_factory=dict)

    def add(self, code: str, where: str, message: str) -> None:
        if code != "not-finite":  # that may be true of the original too, and is forgiven then
            self.flagged |= {where, where.rpartition(".")[0]}
        self.findings.append(Finding(code, where[:200], message[:400]))

    def read_config(self) -> tuple[dict[str, Any], Recipe | None]:
        """config.json, and the scheme of each layer by it; None where it has none that can be read. Files are open."""
        try:
            config = read_json(self.out / "config.json")
        except CheckpointError as error:
            self.add(error.code, "config.json", str(error))
            return {}, None
        self.own_code = bool(config.get("auto_map"))
        return config, self._recipe(config) if config else None

    def _recipe(self, config: dict[str, Any]) -> Recipe | None:
        quantization = config.get("quantization_config")
        if not isinstance(quantization, dict):
            self.add("not-quantized", "config.json", "it has no quantization_config: servers would load floats")
            return None
        try:
            return parse_config(quantization, self.entries)
        except FlowError as error:
            self.add("bad-config", "config.json", str(error))
            return None

    # -- files -----------------------------------------------------------------------------------------------

    def open_files(self, stack: ExitStack) -> None:
        """Open every shard that can be read; the stack closes them."""
        index: dict[str, Any] | None = None
        names = [SINGLE]
        if (self.out / INDEX).exists():
            try:
                index = read_json(self.out / INDEX)
                names = shard_names(index)
            except CheckpointError as error:
                self.add(error.code, INDEX, str(error))
                names = sorted(path.name for path in self.out.glob("*.safetensors"))
                index = None
        try:
            require_one_model(self.out, names)
        except CheckpointError as error:
            self.add(error.code, SINGLE, str(error))
        self.shards = names
        for name in names:
            try:
                file = stack.enter_context(TensorFile(inside(self.out, name)))
            except CheckpointError as error:
                self.add(error.code, name, str(error))
                continue
            self.files[name] = file
            for tensor, entry in file.entries.items():
                if tensor in self.entries:
                    self.add("duplicate-tensor", tensor, f"it is in {name} and in another shard")
                self.entries[tensor] = entry
        if index is not None:
            self._index(index)

    def _index(self, index: dict[str, Any]) -> None:
        weight_map = index["weight_map"]
        for tensor, shard in weight_map.items():
            if shard in self.files and tensor not in self.files[shard].entries:
                self.add("missing-tensor", tensor, f"the index places it in {shard}, which lacks it")
        for shard, file in self.files.items():
            for tensor in file.entries:
                if weight_map.get(tensor) != shard:
                    self.add("extra-tensor", tensor, f"it is in {shard}, where the index does not place it")
        metadata = index.get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        actual = sum(entry.nbytes for entry in self.entries.values())
        if total is not None and total != actual and len(self.files) == len(set(weight_map.values())):
            self.add("bad-index", INDEX, f"its total_size is {total}, the tensors have {actual} bytes")

    # -- tensors ---------------------------------------------------------------------------------------------

    def check_modules(self, recipe: Recipe) -> None:
        """Each quantized Linear has the tensors of its scheme."""
        for name, entry in self.entries.items():
            module, _, part = name.rpartition(".")
            if _TRAINING.search(name):
                self.add(
                    "extra-tensor", name, "left over from training: no reader has a place for it; use baracuda.save"
                )
            elif part in STORED:
                self.modules.setdefault(module, {})[part] = entry
        floats = (*FLOATS, *EIGHT_BIT_FLOATS)
        quantized = {m: p for m, p in self.modules.items() if set(p) != {"weight"} or p["weight"].dtype not in floats}
        self.modules = quantized
        for module, parts in quantized.items():
            self._module(module, parts, Storage(recipe.of(module).scheme))
        if not quantized and self.entries:
            self.add("missing-tensor", "config.json", "it promises quantized Linears, but no shard holds one")

    def _module(self, module: str, parts: dict[str, Entry], storage: Storage) -> None:
        main = parts.get(storage.integers)
        if main is None or len(main.shape) != 2:
            shape = "nothing" if main is None else f"shape {list(main.shape)}"
            code = "missing-tensor" if main is None else "shape-mismatch"
            return self.add(code, module, f"expected a matrix of quantized weights, got {shape}")
        k, size = storage.columns(main), storage.scheme.weight.group_size
        source = Entry(module, self._scale_dtype(parts), (main.shape[0], k))
        if size is not None and k % size:
            return self.add("shape-mismatch", module, f"{k} columns are not a multiple of {size}")
        for expected in storage.entries(module, source):
            part = expected.name.removeprefix(f"{module}.")
            stored = parts.pop(part, None)
            if stored is None:
                self.add("missing-tensor", expected.name, f"a {storage.format} Linear has one")
            elif stored.dtype != expected.dtype and not (part.endswith("scale") and stored.dtype in FLOATS):
                self.add("wrong-dtype", expected.name, f"expected {expected.dtype}, got {stored.dtype}")
            elif stored.shape != expected.shape:
                self.add("shape-mismatch", expected.name, f"expected {list(expected.shape)}, got {list(stored.shape)}")
            elif part == "weight_shape":
                self._weight_shape(module, expected.name, source)
            elif part == "weight_g_idx":
                self._groups(expected.name, size or k)
        for part in parts:
            name = f"{module}.{part}"
            self.add("extra-tensor", name, f"the scheme of config.json ({storage.format}) stores no {part}")
        return None

    def _scale_dtype(self, parts: dict[str, Entry]) -> torch.dtype:
        scale = parts.get("weight_scale")
        return scale.dtype if scale is not None and scale.dtype in FLOATS else torch.float32

    def _weight_shape(self, module: str, name: str, source: Entry) -> None:
        stored = self.file(name).read(name).tolist()
        if stored != list(source.shape):
            self.add("shape-mismatch", name, f"it says {stored}, the packed weight of {module} is {list(source.shape)}")

    def _groups(self, name: str, size: int) -> None:
        try:
            order_of_groups(self.file(name).read(name), size, name)
        except FlowError as error:
            self.add("bad-groups", name, str(error).removeprefix(f"{name}: "))

    def file(self, tensor: str) -> TensorFile:
        if not self._holders:
            self._holders = {name: file for file in self.files.values() for name in file.entries}
        return self._holders[tensor]

    def check_values(self, name: str) -> None:
        """Scales are finite and positive, all other floats are finite. Tensors are read in blocks, to bound memory."""
        entry = self.entries[name]
        if entry.dtype not in FLOATS or not entry.nbytes:
            return None
        scale = name.endswith((".weight_scale", ".input_scale"))
        for block in self.blocks(name, entry):
            if not bool(torch.isfinite(block).all()):
                return self.add("bad-scale" if scale else "not-finite", name, "it holds NaN or infinite values")
            if scale and not bool((block > 0).all()):
                return self.add("bad-scale", name, "a scale is zero or negative")
        return None

    def blocks(self, name: str, entry: Entry) -> Iterator[torch.Tensor]:
        file, step = self.file(name), BLOCK_BYTES
        for start in range(0, entry.nbytes, step):
            yield file.read_bytes(name, start, min(step, entry.nbytes - start)).view(entry.dtype)

    # -- what readers expect ---------------------------------------------------------------------------------

    def check_ignored(self, ignore: list[str]) -> None:
        """Readers take what config.json ignores for floats."""
        for module in self.modules:
            if any(matches(pattern, module) for pattern in ignore):
                self.add("config-mismatch", module, "config.json ignores it, but it is stored quantized")

    def stores(self, module: str) -> bool:
        return any(f"{module}.{part}" in self.entries for part in ("weight", "weight_packed"))

    def check_fused(self, recipe: Recipe) -> None:
        """Layers that servers fuse are quantized all or none, and have one input scale."""
        for module in list(self.modules):
            parent, _, leaf = module.rpartition(".")
            for family in FUSED:
                if leaf not in family:
                    continue
                siblings = [f"{parent}.{other}" for other in family if self.stores(f"{parent}.{other}")]
                if leaf != family[0] and f"{parent}.{family[0]}" in siblings:
                    continue
                floats = [s for s in siblings if s not in self.modules]
                if floats:
                    self.add("fused-mixed", floats[0], f"servers fuse it with {module}, which is quantized")
                scheme = recipe.of(module).scheme
                if other := [s for s in siblings if s in self.modules and recipe.of(s).scheme != scheme]:
                    self.add("fused-mixed", other[0], f"servers fuse it with {module}, which has another scheme")
                if scheme.activation.kind == "static":
                    self._same_input_scale(siblings)

    def _same_input_scale(self, modules: list[str]) -> None:
        scales = {}
        for module in modules:
            entry = self.entries.get(f"{module}.input_scale")
            if entry is not None and entry.shape == (1,):
                scales[module] = self.file(entry.name).read(entry.name).float().item()
        if len(set(scales.values())) > 1:
            self.add("fused-scales-differ", modules[0], f"servers fuse these and keep one input_scale: {scales}")
