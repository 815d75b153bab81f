"""The step of a run that quantizes a model block by block, and keeps each block in the journal once it is done.

A run that was interrupted reads the blocks that are done, and moves the data through them: the rest gets the same input
and so the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.host import multiplies_bf16
from ...schemes import CalibrationData
from ..checkpoint.directory import Checkpoint
from ..checkpoint.storage import Storage
from ..checkpoint.tensorfile import TensorFile, write_tensors
from ..errors import FlowError
from ..hf.blocks import Chain, find_chain
from ..hf.forward import arguments, float_model
from ..hf.layers import Structure
from .activations import input_rule
from .changes import Changes
from .data import read_for
from .distributed import Team
from .journal import Journal
from .options import Options, Progress, weighable
from .sequential import Inputs, Sequential, Workers, replace_weight

#: Rows of a weight that are quantized together: fixed, so that the bytes depend on nothing else.
ROWS = 1024
#: Tokens that show how the blocks are called.
FEW = 4


@dataclass
class Blockwise:
    """One such step."""

    source: Checkpoint
    structure: Structure
    options: Options
    data: Path
    changes: Changes
    journal: Journal
    version: Any
    team: Team
    device: torch.device
    progress: Progress

    def run(self) -> None:
        """Quantize the blocks; afterwards the changes name the file that holds each of their linears."""
        model = float_model(self.source.directory, self.device)
        sequences = read_for(
            model, self.source.directory, self.data, self.options, "calibration", self.device, self.progress
        )
        names = {self.structure.modules.get(module, module): module for module in self.structure.linears.values()}
        linears = {n: m for n, m in names.items() if self._is_linear(model, n)}
        few = sequences[0][None, :FEW].to(self.device)
        chain = find_chain(model, linears, few, arguments(model))
        if isinstance(chain, str):
            raise FlowError(f"calibration block by block: {chain}; pass --one-shot to calibrate on the float model")
        chain.dtype = compute_dtype(model, self.device)
        self._change(model)
        inside = {block: [n for n in linears if n.startswith(f"{block}.")] for block in chain.names}
        covered = {name for held in inside.values() for name in held}
        self.changes.notes["blocks"] = {"count": len(chain.names), "samples": len(sequences),
                                        "tokens": sum(map(len, sequences)),
                                        "dtype": str(chain.dtype).removeprefix("torch."),
                                        "outside": sorted(names[n] for n in names.keys() - covered)}  # fmt: skip
        if weighed := sorted(m for n in covered if weighable(self.structure.choices[m := linears[n]])):
            self.changes.notes["weighed"] = weighed
        workers = Workers(self.device)
        with workers.pool() as pool:
            data = Sequential(chain, sequences, arguments(model), self.team, self.device, pool, workers.threads)
            for index, block in enumerate(chain.names):
                self._block(chain, data, index, {n: linears[n] for n in inside[block]}, pool)
                self.progress("calibrate", 1, len(chain.names), f"block {index + 1}")

    def _block(
        self, chain: Chain, data: Sequential, index: int, linears: dict[str, str], pool: ThreadPoolExecutor
    ) -> None:
        prefix = f"{chain.names[index]}."
        local = {name.removeprefix(prefix): module for name, module in linears.items()}
        inputs = Inputs({n: rule for n, m in local.items() if (rule := self._input_rule(m)) is not None})
        file = self.journal.made_from(self.version, f"block-{index}.safetensors")
        if self.team.gather(file.exists())[0]:
            self._restore(chain.prepare(index), local, file)
            data.advance(index, list(local), inputs)
        else:
            made: dict[str, Tensor] = {}
            # As the checkpoint has them: the block may compute in another type.
            originals = {n: chain.block(index).get_parameter(f"{n}.weight").detach() for n in local}

            def quantize(group: list[str], measured: CalibrationData) -> Mapping[str, Tensor]:
                stored = self._quantize({local[n]: originals.pop(n) for n in group}, measured, pool)
                made.update({f"{m}.{part}": t for m, parts in stored.items() for part, t in parts.items()})
                return {n: self._storage(local[n]).dequantize(stored[local[n]]) for n in group}

            data.quantize_block(index, list(local), inputs, quantize)
            if self.team.leads:
                temporary = self.journal.temporary(f"block-{index}")
                write_tensors(temporary, made)
                self.journal.publish(temporary, file)
            self.team.barrier()
        self.changes.quantized |= dict.fromkeys(local.values(), file)

    def _quantize(
        self, weights: dict[str, Tensor], data: CalibrationData, pool: ThreadPoolExecutor
    ) -> dict[str, dict[str, Tensor]]:
        """What is stored for some linears that read the same input; blocks of rows are dealt to all ranks."""
        tasks = [
            (module, first, self._rows(module, weight[first : first + ROWS]))
            for module, weight in weights.items()
            for first in range(0, weight.shape[0], ROWS)
        ]

        def one(index: int) -> dict[str, Tensor]:
            module, _, rows = tasks[index]
            choice = self.structure.choices[module]
            with torch.no_grad():
                made = choice.method.quantize(rows, choice.scheme.weight, data)
            return {part: value.cpu() for part, value in self._storage(module).store(made).items()}

        mine = [i for i in range(len(tasks)) if i % self.team.size == self.team.rank]
        done: dict[int, dict[str, Tensor]] = {}
        for part in self.team.gather(dict(zip(mine, pool.map(one, mine), strict=True))):
            done |= part
        return {
            module: {
                part: torch.cat([done[i][part] for i, (m, _, _) in enumerate(tasks) if m == module])
                for part in done[next(i for i, (m, _, _) in enumerate(tasks) if m == module)]
            }
            for module in weights
        }

    def _rows(self, module: str, rows: Tensor) -> Tensor:
        """As streaming would hand them to the method."""
        entry = next(self.source.shards[s].entries[t] for t, m in self.structure.linears.items() if m == module
                     for s in self.source.shards if t in self.source.shards[s].entries)  # fmt: skip
        return self._storage(module).as_quantized_from(rows, entry.dtype)

    def _restore(self, block: nn.Module, local: dict[str, str], file: Path) -> None:
        with TensorFile(file) as stored:
            for name, module in local.items():
                parts = {e.removeprefix(f"{module}."): stored.read(e) for e in stored.entries if _of(e, module)}
                replace_weight(block, name, self._storage(module).dequantize(parts))

    def _storage(self, module: str) -> Storage:
        return Storage(self.structure.choices[module].scheme)

    def _input_rule(self, module: str) -> Callable[[Tensor], Tensor] | None:
        """What the quantized model makes of a linear's input, as floats; None where it stays as it is."""
        activation = self.structure.choices[module].scheme.activation
        scale = float(self.changes.input_scales[module]) if activation.kind == "static" else None
        return input_rule(activation, scale)

    def _change(self, model: nn.Module) -> None:
        """Apply what calibration decided to the model in memory."""
        stored = self.structure.names.stored
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                tensor = stored.get(name, name)
                if tensor in self.changes.replaced:
                    parameter.data = self.changes.replaced[tensor].to(parameter.device, torch.float32)
                elif self.changes.touches(tensor):
                    parameter.data = self.changes.apply(tensor, 0, parameter.float())

    def _is_linear(self, model: nn.Module, name: str) -> bool:
        try:
            return isinstance(model.get_submodule(name), nn.Linear)
        except AttributeError:
            return False  # an expert that transformers stacks with others


def compute_dtype(model: nn.Module, device: torch.device) -> torch.dtype:
    """What blocks compute in: bf16 for models stored in it, on a CPU that multiplies it faster than f32; else f32."""
    fast = device.type == "cpu" and multiplies_bf16()
    return torch.bfloat16 if fast and {p.dtype for p in model.parameters()} == {torch.bfloat16} else torch.float32


def _of(entry: str, module: str) -> bool:
    return entry.rpartition(".")[0] == module
