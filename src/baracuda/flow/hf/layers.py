"""What is known of the layers of a checkpoint: which are quantized and how, and why others are not."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ...schemes import Choice, Recipe
from ..checkpoint.groups import unserved_groups
from ..checkpoint.targets import layer_recipe
from ..errors import some
from .names import Names

EXPERT = re.compile(r"^(.*\.experts)\.\d+\.[^.]+$")
#: Reasons why layers stay in floating point.
NOT_STORED = "not stored"
HEAD_STAYS = "the output head"
IGNORED = "ignored on request"
NO_LINEAR = "not a Linear by its name or shape"
#: How the reasons of experts begin.
EXPERTS = "expert weights"


@dataclass(frozen=True)
class Head:
    """The output head, where it is quantized on request."""

    module: str
    #: The stored tensor that it is quantized from: its own weight, or that of the embedding it is tied to.
    tensor: str
    #: Whether the config ties it to the embedding. Such a tie is resolved.
    tied: bool
    #: What it takes in the result.
    nbytes: int = 0

    @property
    def is_added(self) -> bool:
        """Whether the original does not store it: the tensor that it is made from stays beside it."""
        return self.tensor != f"{self.module}.weight"

    def note(self) -> str:
        """What a reader of the checkpoint should know."""
        said = f"The output head {self.module} is stored as int8, with a scale per row and activations per token."
        if self.tied:
            said += (
                " The model ties it to its embedding: the tie is resolved (config.json has tie_word_embeddings false), "
                "and the embedding stays in floating point."
            )
        if self.is_added:
            said += f" The files hold {self.nbytes / 1e6:.1f} MB more than with the tied head."
        return (
            f"{said} baracuda.load, transformers and vLLM 0.32 compute it; older versions of vLLM, and other servers, "
            "may take its integers for floats and answer nonsense."
        )


@dataclass
class Structure:
    """`linears` maps the weight tensors to quantize to their module names; `left` says why others are not."""

    source: str
    linears: dict[str, str] = field(default_factory=dict)
    #: Module name -> the scheme and the method of each Linear to quantize.
    choices: dict[str, Choice] = field(default_factory=dict)
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
    #: What to know about quantized experts that it does not find.
    unread: str | None = None
    #: Module name -> the group size that was asked for, where it does not divide the columns and another was taken.
    refitted: dict[str, int] = field(default_factory=dict)
    #: The output head, where it is quantized. It is not among `linears`: calibration and budgets leave it alone.
    head: Head | None = None

    @property
    def quantized(self) -> dict[str, str]:
        """Every tensor that something is quantized from -> the module: the Linears and the head."""
        return self.linears if self.head is None else {**self.linears, self.head.tensor: self.head.module}

    @property
    def kept(self) -> frozenset[str]:
        """The tensors that are quantized into another module, and also stored as they are."""
        return frozenset({self.head.tensor} if self.head is not None and self.head.is_added else ())

    def recipe(self) -> Recipe:
        """The scheme of each layer, for the config: groups that were made to fit are layers of their own."""
        return layer_recipe({module: choice.scheme for module, choice in self.choices.items()}, self.modules)

    def notes(self) -> list[str]:
        """What a reader of the checkpoint should know."""
        notes = [] if self.head is None else [self.head.note()]
        if any(EXPERT.match(module) for module in self.left):
            notes.append(
                "The experts stay in floating point. baracuda.load and servers read them; transformers' own reader of "
                "compressed-tensors, from 5.13 on, looks for packed experts only: it starts with random ones, or "
                "raises. All of these read quantized ones: do not ignore them, and give 4-bit schemes a --group-size "
                "that divides their columns."
            )
        if self.unread is not None:
            notes.append(self.unread)
        if self.unopened is not None:
            notes.append(f"transformers' own reader of compressed-tensors cannot open this checkpoint: {self.unopened}")
        elif self.unstacked is not None:
            notes.append(
                "The experts stay in floating point, in a stack that baracuda.load and servers read. transformers' own "
                f"reader of compressed-tensors looks for single ones in place of {self.unstacked}, and fails or starts "
                "with random ones."
            )
        elif lost := [tensor for tensor in self.joined() if not EXPERT.match(tensor.removesuffix(".weight"))]:
            notes.append(
                f"transformers joins {some(lost)} with others when it loads them. They stay in floating point, which "
                "baracuda.load and servers read; its own reader of compressed-tensors, from 5.21 on, looks for "
                "quantized ones only, and would start with random values instead."
            )
        notes += self._group_notes()
        if (unserved := unserved_groups(c.scheme.weight.group_size for c in self.choices.values())) is not None:
            notes.append(unserved)
        return notes

    def _group_notes(self) -> list[str]:
        """Which layers have other groups than was asked for."""
        alike: dict[tuple[int, int], list[str]] = {}
        for module, asked in self.refitted.items():
            size = self.choices[module].scheme.weight.group_size or asked
            alike.setdefault((size, asked), []).append(module)
        return [
            f"Groups of {size} in {len(modules)} Linears, as {asked} does not divide their columns: {some(modules)}."
            for (size, asked), modules in sorted(alike.items())
        ]

    def joined(self) -> list[str]:
        """The float tensors that transformers makes others of by rules for weights alone."""
        rules = self.names.collected.items()
        weights = [tensor for tensor, sources in rules if all(name.endswith(".weight") for name in sources)]
        return [tensor for tensor in weights if tensor not in self.linears]

    def ignore(self) -> list[str]:
        """Names for the config: readers must not expect these to be quantized. Numbered families become patterns."""
        taken = {_family(module) for module in self.quantized.values()}
        taken |= {_family(self.modules.get(module, module)) for module in self.quantized.values()}
        names: set[str] = set()
        for module in self.left:
            if (experts := EXPERT.match(module)) is not None:
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
