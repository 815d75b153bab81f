"""How much each layer matters: the divergence of a model in which only this layer is quantized.

The float model runs once on a few tokens. Then each unit of layers is quantized alone, at 4 and at 8 bits, and the rest
of the model runs again from its block on. Nothing is random: the same data gives the same figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...schemes import Choice, checkpoint_scheme, get_method
from ..checkpoint.directory import Checkpoint
from ..checkpoint.fusion import fused_with
from ..checkpoint.storage import Storage
from ..errors import FlowError
from ..hf.blocks import find_chain
from ..hf.forward import arguments, float_model, generates
from ..hf.layers import Structure
from .activations import input_rule
from .allocate import Unit
from .data import read_for
from .options import Options, Progress

#: Tokens of a unit's measurement, in sequences of LENGTH: enough to rank layers.
TOKENS, LENGTH = 512, 128
#: Tokens of the measurement of the whole model.
WHOLE = 2048
#: The float model's log-probabilities are kept: at most this many bytes.
KEPT = 1 << 29


@dataclass
class Batch:
    """Sequences of one length and what the float model says of them."""

    tokens: Tensor
    exact: Tensor
    #: What each block reads, in the order of the chain.
    hidden: list[Tensor]


class Sensitivity:
    """A float model, and what becomes of its outputs when layers are quantized."""

    def __init__(
        self,
        source: Checkpoint,
        structure: Structure,
        data: Path,
        options: Options,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self.source, self.structure, self.device, self.progress = source, structure, device, progress
        self.model = float_model(source.directory, device).float()
        if not generates(self.model):
            raise FlowError(
                f"--budget and --max-kl compare next-token distributions; {type(self.model).__name__} has none: "
                "write a --recipe instead"
            )
        sequences = read_for(self.model, source.directory, data, options, "calibration", device, progress)
        names = {structure.modules.get(module, module): module for module in structure.linears.values()}
        self.linears = {module: name for name, module in names.items() if _is_linear(self.model, name)}
        few = sequences[0][None, :4].to(device)
        chain = find_chain(self.model, list(self.linears.values()), few, arguments(self.model))
        self.blocks = [] if isinstance(chain, str) else chain.names
        self.returns_tuple = not isinstance(chain, str) and chain.returns_tuple
        vocabulary = int(getattr(self.model.config, "vocab_size", 0) or 1)
        self.batches = list(self._batches(sequences, min(WHOLE, KEPT // (4 * vocabulary))))
        self.eight = Choice(checkpoint_scheme("w8a8")[0], get_method("rtn"))

    def _batches(self, sequences: list[Tensor], tokens: int) -> Iterator[Batch]:
        """Sequences from all over the data, in batches of TOKENS."""
        wanted = max(1, tokens // LENGTH)
        step = max(1, len(sequences) // wanted)
        cut = [sequence[:LENGTH] for sequence in sequences[::step] if len(sequence) > 1][:wanted]
        shortest = min(map(len, cut))
        rows = torch.stack([sequence[:shortest] for sequence in cut]).to(self.device)
        size = max(1, TOKENS // LENGTH)
        for first in range(0, len(rows), size):
            part = rows[first : first + size]
            hidden: list[Tensor] = []
            with self._recording(hidden, self.blocks if first == 0 else []):
                exact = functional.log_softmax(self._logits(part), -1)
            yield Batch(part, exact, hidden)

    @contextmanager
    def _recording(self, hidden: list[Tensor], blocks: list[str]) -> Iterator[None]:
        """Within, a forward notes what each block reads."""
        with ExitStack() as stack:
            for name in blocks:
                block = self.model.get_submodule(name)
                handle = block.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
                stack.callback(handle.remove)
            yield

    def _logits(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(input_ids=tokens, **arguments(self.model))[0]
        return logits.float()

    # -- one unit at a time -----------------------------------------------------------------------------------------

    def units(self) -> list[Unit]:
        """The 4-bit layers that may get 8 bits, measured one by one."""
        candidates = list(self._candidates())
        measured = []
        for index, unit in enumerate(candidates):
            small = self._alone(unit, self._small(unit))
            large = self._alone(unit, dict.fromkeys(unit.modules, self.eight))
            measured.append(replace(unit, kl_small=small, kl_large=large))
            self.progress("sensitivity", 1, len(candidates), f"layer {index + 1}: {unit.modules[0]}")
        return measured

    def _candidates(self) -> Iterator[Unit]:
        tensors = {module: tensor for tensor, module in self.structure.linears.items()}
        done: set[str] = set()
        for module, choice in self.structure.choices.items():
            family = tuple(name for name in fused_with(module) if name in self.structure.choices)
            if module in done or choice.scheme.weight.bits == 8 or not all(m in self.linears for m in family):
                continue
            done |= set(family)
            sizes = [self._bytes(m, tensors[m], self.structure.choices[m]) for m in family]
            eight = [self._bytes(m, tensors[m], self.eight) for m in family]
            yield Unit(family, sum(sizes), sum(eight))

    def _bytes(self, module: str, tensor: str, choice: Choice) -> int:
        return sum(entry.nbytes for entry in Storage(choice.scheme).entries(module, self.source.entry(tensor)))

    def _small(self, unit: Unit) -> dict[str, Choice]:
        nearest = get_method("rtn")
        return {m: Choice(self.structure.choices[m].scheme, nearest) for m in unit.modules}

    def _alone(self, unit: Unit, choices: Mapping[str, Choice]) -> float:
        first = self.batches[0]
        with self._quantized(choices), self._from_block_of(unit, first):
            return _divergence(first.exact, self._logits(first.tokens))

    @contextmanager
    def _from_block_of(self, unit: Unit, batch: Batch) -> Iterator[None]:
        """Within, a forward skips the blocks before the unit's: their outputs are known."""
        name = self.linears[unit.modules[0]]
        index = next((i for i, block in enumerate(self.blocks) if name.startswith(f"{block}.")), 0)
        if not index or not batch.hidden:
            yield
            return
        skipped = [self.model.get_submodule(block) for block in self.blocks[:index]]

        def known(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            return (batch.hidden[index],) if self.returns_tuple else batch.hidden[index]

        try:
            for block in skipped:
                block.forward = known  # an attribute of the instance, which hides the method of the class
            yield
        finally:
            for block in skipped:
                del block.forward

    # -- the whole model --------------------------------------------------------------------------------------------

    def whole(self, units: list[Unit], large: list[Unit], floats: list[Unit]) -> float:
        """The divergence with some units at 8 bits, some in floating point, and all others as they are chosen."""
        choices = {
            m: Choice(c.scheme, get_method("rtn")) for m, c in self.structure.choices.items() if m in self.linears
        }
        choices |= {module: self.eight for unit in large for module in unit.modules}
        for unit in floats:
            for module in unit.modules:
                del choices[module]
        with self._quantized(choices):
            found = [(_divergence(b.exact, self._logits(b.tokens)), b.tokens.numel()) for b in self.batches]
        self.progress("divergence", 1, 0, f"{len(large)} of {len(units)} at 8 bits")
        return sum(value * count for value, count in found) / sum(count for _, count in found)

    @contextmanager
    def _quantized(self, choices: Mapping[str, Choice]) -> Iterator[None]:
        """Within, these layers compute with the weights and inputs of their schemes."""
        kept: list[tuple[nn.Parameter, Tensor]] = []
        with ExitStack() as stack, torch.no_grad():
            for module, choice in choices.items():
                linear = self.model.get_submodule(self.linears[module])
                weight = linear.get_parameter("weight")
                kept.append((weight, weight.data))
                weight.data = self._stands_for(module, choice, weight.data)
                if (rule := input_rule(choice.scheme.activation, None)) is not None:
                    handle = linear.register_forward_pre_hook(lambda m, args, rule=rule: (rule(args[0]), *args[1:]))
                    stack.callback(handle.remove)
            try:
                yield
            finally:
                for weight, before in kept:
                    weight.data = before

    def _stands_for(self, module: str, choice: Choice, weight: Tensor) -> Tensor:
        storage = Storage(choice.scheme)
        tensor = next(t for t, m in self.structure.linears.items() if m == module)
        rows = storage.as_quantized_from(weight, self.source.entry(tensor).dtype)
        made = choice.method.quantize(rows, choice.scheme.weight)
        return made.dequantize(choice.scheme.weight, weight.shape[1]).to(weight.device)


def _divergence(exact: Tensor, logits: Tensor) -> float:
    """KL(float || quantized) of the next-token distributions, a token."""
    noisy = functional.log_softmax(logits, -1)
    each = functional.kl_div(noisy, exact, log_target=True, reduction="none").sum(-1)
    return max(0.0, float(each.double().mean()))


def _is_linear(model: nn.Module, name: str) -> bool:
    try:
        return isinstance(model.get_submodule(name), nn.Linear)
    except AttributeError:
        return False  # an expert that transformers stacks with others
