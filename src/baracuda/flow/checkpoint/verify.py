"""baracuda verify: every rule a server relies on. Whatever the files hold, the answer is a list of findings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...core.patterns import matches
from ..errors import CheckpointError, FlowError
from ..hf.names import match_names
from ..hf.structure import FUSED, skeleton, stay_float, tied_weights
from ..run.journal import FOLDER
from ..run.report import JSON
from .companions import companions
from .directory import FOREIGN_WEIGHTS, INDEX, SINGLE, Checkpoint, inside, read_json, require_one_model, shard_names
from .scheme import FLOATS, STORED, Scheme, parse_config
from .tensorfile import Entry, TensorFile

#: Enough to see what is wrong; a damaged file can produce one for every tensor.
MAX_FINDINGS = 200
BLOCK_BYTES = 16 << 20
#: Beside the weights, what programs read; what people read may be missing.
READ = (".json", ".jinja", ".model", ".safetensors", ".tiktoken", ".txt")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: a code to look for, the file or tensor, and what was expected."""

    code: str
    where: str
    message: str


def verify(out: str | Path, against: str | Path | None = None) -> list[Finding]:
    """What is wrong with the checkpoint in `out`; `against` also compares it with the one it was made from.

    Every element of every tensor is compared, but for those that smoothing has changed on purpose: `smoothed` has them.
    """
    check = _Check(Path(out))
    check.run(Path(against) if against is not None else None)
    return check.findings[:MAX_FINDINGS]


def require_stored(out: Path, scheme: Scheme) -> None:
    """Raise where the shards do not hold what the scheme stores, by their headers alone."""
    with Checkpoint.open(out) as stored:
        check = _Check(out, entries={name: stored.entry(name) for name in stored.where}, files=stored.shards)
        check._modules(scheme)
    if check.findings:
        first, more = check.findings[0], len(check.findings) - 1
        raise FlowError(
            f"{out}: {first.code}: {first.where}: {first.message}{f' (and {more} more)' if more else ''}; "
            "baracuda verify lists all that is wrong; quantize the model again"
        )


@dataclass
class _Check:
    out: Path
    findings: list[Finding] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
    files: dict[str, TensorFile] = field(default_factory=dict)
    #: Module -> the parts stored under its name.
    modules: dict[str, dict[str, Entry]] = field(default_factory=dict)

    def add(self, code: str, where: str, message: str) -> None:
        self.findings.append(Finding(code, where[:200], message[:400]))

    def run(self, against: Path | None) -> None:
        if not self.out.is_dir():
            return self.add("missing-file", str(self.out), "expected a directory with a quantized checkpoint")
        with ExitStack() as stack:
            try:
                config = read_json(self.out / "config.json")
            except CheckpointError as error:
                config = {}
                self.add(error.code, "config.json", str(error))
            scheme = self._scheme(config) if config else None
            self._files(stack)
            self._surroundings()
            if scheme is not None:
                self._modules(scheme)
                self._config(config, scheme)
                self._fused(scheme, config)
            for name in self.entries:
                self._values(name)
            if against is not None:
                self._against(against, scheme)
        return None

    def _scheme(self, config: dict[str, Any]) -> Scheme | None:
        quantization = config.get("quantization_config")
        if not isinstance(quantization, dict):
            self.add("not-quantized", "config.json", "it has no quantization_config: servers would load floats")
            return None
        try:
            return parse_config(quantization)
        except FlowError as error:
            self.add("bad-config", "config.json", str(error))
            return None

    # -- files -----------------------------------------------------------------------------------------------

    def _files(self, stack: ExitStack) -> None:
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
        for name in names:
            try:
                path = inside(self.out, name)
                if not _stays(self.out.resolve(), path.resolve()):
                    raise CheckpointError("path-escape", f"{name}: a link that leads out of the directory")
                file = stack.enter_context(TensorFile(path))
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

    def _surroundings(self) -> None:
        if (self.out / FOLDER).exists():
            self.add("unfinished", FOLDER, "a run into this directory has not ended; --resume it")
        for path in sorted(self.out.rglob("*")):
            if path.suffix in FOREIGN_WEIGHTS:
                where = str(path.relative_to(self.out))
                self.add("foreign-weights", where, "weights that are not safetensors, and may run code when loaded")

    # -- tensors ---------------------------------------------------------------------------------------------

    def _modules(self, scheme: Scheme) -> None:
        for name, entry in self.entries.items():
            module, _, part = name.rpartition(".")
            if part in STORED:
                self.modules.setdefault(module, {})[part] = entry
        quantized = {m: p for m, p in self.modules.items() if set(p) != {"weight"} or p["weight"].dtype not in FLOATS}
        self.modules = quantized
        for module, parts in quantized.items():
            self._module(module, parts, scheme)
        if not quantized and self.entries:
            self.add("missing-tensor", "config.json", "it promises quantized Linears, but no shard holds one")

    def _module(self, module: str, parts: dict[str, Entry], scheme: Scheme) -> None:
        main = parts.get("weight_packed" if scheme.packed else "weight")
        if main is None or len(main.shape) != 2:
            shape = "nothing" if main is None else f"shape {list(main.shape)}"
            code = "missing-tensor" if main is None else "shape-mismatch"
            return self.add(code, module, f"expected a matrix of quantized weights, got {shape}")
        k = main.shape[1] * (8 if scheme.packed else 1)
        source = Entry(module, self._scale_dtype(parts), (main.shape[0], k))
        if scheme.packed and k % scheme.group_size:
            return self.add("shape-mismatch", module, f"{k} columns are not a multiple of {scheme.group_size}")
        for expected in scheme.entries(module, source):
            part = expected.name.removeprefix(f"{module}.")
            stored = parts.pop(part, None)
            if stored is None:
                self.add("missing-tensor", expected.name, f"a {scheme.format} Linear has one")
            elif stored.dtype != expected.dtype and not (part.endswith("scale") and stored.dtype in FLOATS):
                self.add("wrong-dtype", expected.name, f"expected {expected.dtype}, got {stored.dtype}")
            elif stored.shape != expected.shape:
                self.add("shape-mismatch", expected.name, f"expected {list(expected.shape)}, got {list(stored.shape)}")
            elif part == "weight_shape":
                self._weight_shape(module, expected.name, source)
        for part in parts:
            self.add(
                "extra-tensor", f"{module}.{part}", f"the scheme of config.json ({scheme.format}) stores no {part}"
            )
        return None

    def _scale_dtype(self, parts: dict[str, Entry]) -> torch.dtype:
        scale = parts.get("weight_scale")
        return scale.dtype if scale is not None and scale.dtype in FLOATS else torch.float32

    def _weight_shape(self, module: str, name: str, source: Entry) -> None:
        stored = self._file(name).read(name).tolist()
        if stored != list(source.shape):
            self.add("shape-mismatch", name, f"it says {stored}, the packed weight of {module} is {list(source.shape)}")

    def _file(self, tensor: str) -> TensorFile:
        return next(file for file in self.files.values() if tensor in file.entries)

    def _values(self, name: str) -> None:
        """Scales are finite and positive; every other float is finite. Read in blocks: the size does not matter."""
        entry = self.entries[name]
        if entry.dtype not in FLOATS or not entry.nbytes:
            return None
        scale = name.endswith((".weight_scale", ".input_scale"))
        for block in self._blocks(name, entry):
            if not bool(torch.isfinite(block).all()):
                return self.add("bad-scale" if scale else "not-finite", name, "it holds NaN or infinite values")
            if scale and not bool((block > 0).all()):
                return self.add("bad-scale", name, "a scale is zero or negative")
        return None

    def _blocks(self, name: str, entry: Entry) -> Iterator[torch.Tensor]:
        file, step = self._file(name), BLOCK_BYTES
        for start in range(0, entry.nbytes, step):
            yield file.read_bytes(name, start, min(step, entry.nbytes - start)).view(entry.dtype)

    # -- what readers expect ---------------------------------------------------------------------------------

    def _config(self, config: dict[str, Any], scheme: Scheme) -> None:
        ignore = config["quantization_config"]["ignore"]
        for module in self.modules:
            if any(matches(pattern, module) for pattern in ignore):
                self.add("config-mismatch", module, "config.json ignores it, but it is stored quantized")
        try:
            model, _ = skeleton(config)
            names = match_names(model, map(_as_float, self.entries)) if model is not None else None
        except Exception as error:  # a config can be wrong in any way; transformers then raises anything
            return self.add(
                "bad-config", "config.json", f"transformers cannot build it: {type(error).__name__}: {error}"
            )
        if model is None or names is None:
            return None
        tied, floats = tied_weights(model), stay_float(model)
        for name, module in model.named_modules():
            if not isinstance(module, torch.nn.Linear) or f"{name}.weight" in tied:
                continue
            stored = names.module(name)
            if stored in self.modules and name in floats:
                self.add(
                    "config-mismatch", name, f"it is stored quantized, but must stay in floating point: {floats[name]}"
                )
            if names.origin(name) is None:
                self._linear(name, stored, module, ignore, scheme)
        return None

    def _known(self, module: str) -> bool:
        return any(f"{module}.{part}" in self.entries for part in ("weight", "weight_packed"))

    def _linear(
        self, name: str, stored: str | None, module: torch.nn.Linear, ignore: list[str], scheme: Scheme
    ) -> None:
        if stored is None:
            if not self._damaged():
                self.add("missing-tensor", f"{name}.weight", "the model has this Linear, no shard its weight")
            return
        ignored = any(matches(pattern, name) or matches(pattern, stored) for pattern in ignore)
        if not ignored and stored not in self.modules:
            self.add("config-mismatch", name, "config.json says it is quantized, but it is stored in floating point")
        entry = self.entries.get(f"{stored}.weight")
        if entry is not None and entry.shape != module.weight.shape:
            self.add(
                "shape-mismatch",
                entry.name,
                f"config.json makes it {list(module.weight.shape)}, got {list(entry.shape)}",
            )
        packed = self.entries.get(f"{stored}.weight_packed")
        if packed is not None and packed.shape != (module.out_features, module.in_features // 8):
            self.add("shape-mismatch", packed.name, f"config.json makes it {list(module.weight.shape)}, packed")

    def _damaged(self) -> bool:
        return any(f.code in ("truncated", "bad-offsets", "missing-file", "path-escape") for f in self.findings)

    def _fused(self, scheme: Scheme, config: dict[str, Any]) -> None:
        for module in list(self.modules):
            parent, _, leaf = module.rpartition(".")
            for family in FUSED:
                if leaf not in family:
                    continue
                siblings = [f"{parent}.{other}" for other in family if self._known(f"{parent}.{other}")]
                if leaf != family[0] and f"{parent}.{family[0]}" in siblings:
                    continue
                floats = [s for s in siblings if s not in self.modules]
                if floats:
                    self.add("fused-mixed", floats[0], f"servers fuse it with {module}, which is quantized")
                if scheme.activations == "static":
                    self._same_input_scale(siblings)

    def _same_input_scale(self, modules: list[str]) -> None:
        scales = {}
        for module in modules:
            entry = self.entries.get(f"{module}.input_scale")
            if entry is not None and entry.shape == (1,):
                scales[module] = self._file(entry.name).read(entry.name).float().item()
        if len(set(scales.values())) > 1:
            self.add("fused-scales-differ", modules[0], f"servers fuse these and keep one input_scale: {scales}")

    # -- the original ----------------------------------------------------------------------------------------

    def _against(self, directory: Path, scheme: Scheme | None) -> None:
        try:
            with Checkpoint.open(directory) as source:
                self._compare(source, scheme)
        except CheckpointError as error:
            self.add(error.code, str(directory), f"the original: {error}")

    def _compare(self, source: Checkpoint, scheme: Scheme | None) -> None:
        changed = smoothed(self.out)
        for name in source.where:
            module = name.removesuffix(".weight")
            if module in self.modules:
                if scheme is not None and name not in changed and not self._flagged(module):
                    self._compare_weight(source, name, module, scheme)
            elif name not in self.entries:
                self.add("missing-tensor", name, "the original has it")
            elif (mine := self.entries[name]).dtype != source.entry(name).dtype or mine.shape != source.entry(
                name
            ).shape:
                self.add("wrong-dtype" if mine.shape == source.entry(name).shape else "shape-mismatch", name,
                         f"the original is {source.entry(name).dtype} {list(source.entry(name).shape)}")  # fmt: skip
            elif self._same_bytes(source, name):
                self._forgive("not-finite", name)
            elif name not in changed:
                self.add("wrong-values", name, "it differs from the original, though the scheme leaves it as it is")
        for name in self.entries:
            module = name.rpartition(".")[0]
            if name not in source.where and module not in self.modules:
                self.add("extra-tensor", name, "the original does not have it")
        for module in self.modules:
            if f"{module}.weight" not in source.where:
                self.add("extra-tensor", module, "the original has no such Linear")
        for path in companions(source.directory, self.out):
            if path.suffix in READ and not (self.out / path).is_file():
                self.add("missing-file", str(path), "the original has it beside its weights")

    def _forgive(self, code: str, where: str) -> None:
        """What the original holds too, such as a mask of infinities, is not what is wrong with the result."""
        self.findings = [found for found in self.findings if (found.code, found.where) != (code, where[:200])]

    def _flagged(self, module: str) -> bool:
        return any(finding.where.startswith(module) for finding in self.findings)

    def _same_bytes(self, source: Checkpoint, name: str) -> bool:
        theirs, entry, step = source.shards[source.where[name]], self.entries[name], BLOCK_BYTES
        return all(
            torch.equal(block.view(torch.uint8), theirs.read_bytes(name, i * step, block.nbytes))
            for i, block in enumerate(self._blocks(name, entry))
        )

    def _compare_weight(self, source: Checkpoint, name: str, module: str, scheme: Scheme) -> None:
        """Rows dequantized, a block at a time: each element must be the original's, rounded."""
        entry = source.entry(name)
        rows = self.modules_rows(module, scheme)
        if len(entry.shape) != 2 or entry.shape[0] != rows:
            return self.add("shape-mismatch", name, f"the original is {list(entry.shape)}")
        parts = ("weight_packed", "weight_scale") if scheme.packed else ("weight", "weight_scale")
        step = max(1, BLOCK_BYTES // max(1, entry.row_bytes))
        for first in range(0, rows, step):
            last = min(rows, first + step)
            stored = {part: self._file(f"{module}.{part}").read(f"{module}.{part}", first, last) for part in parts}
            original = source.shards[source.where[name]].read(name, first, last).float()
            restored = scheme.dequantize(stored)
            if restored.shape != original.shape:
                return self.add("shape-mismatch", name, f"the original is {list(entry.shape)}")
            if not scheme.holds(original, restored, stored["weight_scale"]):
                return self.add("wrong-values", name, f"rows {first} to {last} are not the original's, quantized")
        return None

    def modules_rows(self, module: str, scheme: Scheme) -> int:
        return self.entries[f"{module}.weight_packed" if scheme.packed else f"{module}.weight"].shape[0]


def _stays(directory: Path, file: Path) -> bool:
    """Whether a file is in the directory, or where the cache of the Hugging Face Hub keeps those of a snapshot."""
    cached = directory.parent.name == "snapshots" and file.parent == directory.parent.parent / "blobs"
    return cached or directory in file.parents


def _as_float(name: str) -> str:
    """The name a packed weight had before."""
    return name.removesuffix("_packed") if name.endswith(".weight_packed") else name


def smoothed(out: Path) -> frozenset[str]:
    """The tensors that, by the report, smoothing has changed on purpose: not compared with the original's."""
    try:
        smoothing = read_json(out / JSON).get("smoothing")
        changed = smoothing["changed"] if isinstance(smoothing, dict) else []
        return frozenset(map(str, changed))
    except (CheckpointError, KeyError, TypeError):  # a report can hold anything
        return frozenset()
