"""The bits of each layer, for --budget and --max-kl: measure, choose, and take the choice over."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from ...schemes import Choice, checkpoint_scheme
from ..checkpoint.directory import Checkpoint
from ..checkpoint.storage import Storage
from ..errors import FlowError
from ..hf.layers import Structure
from .allocate import Unit, within_budget, within_divergence
from .options import Options, Progress
from .sensitivity import Sensitivity


def choose_precision(
    source: Checkpoint,
    structure: Structure,
    data: Path,
    options: Options,
    device: torch.device,
    progress: Progress,
) -> dict[str, Any]:
    """Which modules get 8 bits and which stay float, with the figures that decided it; as JSON."""
    model = Sensitivity(source, structure, data, options, device, progress)
    units = model.units()
    if not units:
        raise FlowError(
            "--budget and --max-kl: none of the 4-bit layers is an nn.Linear of the model; write a --recipe"
        )
    floats: list[Unit] = []
    if options.budget is not None:
        large = within_budget(units, *_fixed(source, structure, units), options.budget)
        divergence = model.whole(units, large, floats)
    else:
        assert options.max_kl is not None
        large, floats, divergence = within_divergence(
            units, options.max_kl, lambda eight, left: model.whole(units, eight, left)
        )
    goal = {"budget": options.budget} if options.budget is not None else {"max_kl": options.max_kl}
    bits = {unit.modules: 8 for unit in large} | {unit.modules: 16 for unit in floats}
    return {
        **goal,
        "kl": divergence,
        "tokens": sum(batch.tokens.numel() for batch in model.batches),
        "units": [
            {
                "layers": list(unit.modules),
                "bits": bits.get(unit.modules, 4),
                "kl_4_bits": unit.kl_small,
                "kl_8_bits": unit.kl_large,
            }
            for unit in units
        ],
    }


def take_over(structure: Structure, found: dict[str, Any]) -> None:
    """Give the layers their schemes; those that stay float leave the list of Linears to quantize."""
    eight, _ = checkpoint_scheme("w8a8")
    tensors = {module: tensor for tensor, module in structure.linears.items()}
    for unit in found["units"]:
        for module in unit["layers"]:
            if unit["bits"] == 8:
                structure.choices[module] = Choice(eight, structure.choices[module].method)
            elif unit["bits"] == 16:
                del structure.choices[module], structure.linears[tensors[module]]
                structure.left[module] = f"--max-kl {found['max_kl']:g} is not kept with 8 bits there"
            if unit["bits"] != 4:
                structure.refitted.pop(module, None)
    if not structure.linears:
        raise FlowError(f"--max-kl {found['max_kl']:g}: all layers would stay in floating point; raise it")


def _fixed(source: Checkpoint, structure: Structure, units: list[Unit]) -> tuple[int, int]:
    """The bytes of the layers that have no choice, and the parameters of all."""
    choosing = {module for unit in units for module in unit.modules}
    fixed = parameters = 0
    for tensor, module in structure.linears.items():
        entry = source.entry(tensor)
        parameters += math.prod(entry.shape)
        if module not in choosing:
            storage = Storage(structure.choices[module].scheme)
            fixed += sum(stored.nbytes for stored in storage.entries(module, entry))
    return fixed, parameters
