"""The Linear of w4a16 checkpoints: 4-bit weights in groups, multiplied as they are stored."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...backends.registry import Value
from ...core.host import multiplies_bf16
from ...core.problem import Spec
from ...core.scope import PerGroup
from ...core.types import Activation, BackendKind, ElementKind, QuantizeKind
from ...dispatch.eager import cached_plan
from ...dispatch.options import weight_only_spec
from ...functional import dequantize
from ...nn import QuantizedLinear
from ...nn.autocast import under_autocast
from ...nn.launches import Launches
from ...nn.linear import IntegerLinear
from ...nn.siblings import Sibling, Traced
from ...nn.traced import asks_siblings, bias_as, float_linear, share_traced
from ...schemes.search import split_factors
from ..checkpoint.nibbles import in_order, order_of_groups, unpack_rows
from ..errors import FlowError

#: On the CPU, up to this many tokens are multiplied by the packed weight: a token has the same bits in each such batch.
#: More are multiplied by the weight made float, which is faster then; torch chooses the order of those sums.
FEW_TOKENS = 32

#: Types that this processor multiplies more slowly than f32.
_SLOW = () if multiplies_bf16() else (torch.bfloat16, torch.float16)

#: The top bits of the eight integers in a word: flipping them turns q + 8 into two's complement, and back.
_TOP_BITS = -0x77777778

_is_traced = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack


def make_ready(model: nn.Module) -> nn.Module:
    """Prepare packed linears whose tensors are loaded; those of integer inputs become integer linears."""
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear) and module.integer_inputs:
            model.set_submodule(name, module.integer_linear(name))
        elif isinstance(module, PackedLinear):
            module.make_ready(name)
        elif isinstance(module, IntegerLinear) and module.weight_scale.dtype is not torch.float32:
            module.weight_scale = module.weight_scale.float()  # other tools store them in the model's type
    return model


class PackedLinear(Sibling):
    """y = x @ W.T + bias, W = (q - zero point) * scale in groups of columns; its state is what the checkpoint stores.

    Checkpoints store q + 8. Once it is loaded, a weight without zero points is kept in two's complement (`signed`),
    which the kernels multiply faster; its state_dict is as the checkpoint was.

    A few tokens are multiplied by the 4-bit weight as it lies in memory: up to 32 on the CPU, where a token has the
    same bits in every such batch; any number on a GPU that has a kernel for it. Other calls make the weight float.
    After `fix_order` every call multiplies the packed weight, so that a token has the same bits in every batch.

    A file whose groups are out of order (GPTQ's act-order) is put in order once it is loaded: `weight_packed` then has
    the columns of a group side by side, `input_order` says which input each of them multiplies, and the linear cannot
    be saved as a checkpoint again.
    """

    op: ClassVar[QuantizeKind] = QuantizeKind.WEIGHT_ONLY_LINEAR
    rowwise: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale", "zero_point", "bias")
    unread: ClassVar[tuple[str, ...]] = ("weight_shape", "weight_zero_point", "weight_g_idx")
    launched: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale", "zero_point")
    fixed_order: bool = False
    bias: nn.Parameter | None
    weight_packed: Tensor
    weight_scale: Tensor
    weight_shape: Tensor
    weight_zero_point: Tensor | None
    weight_g_idx: Tensor | None
    zero_point: Tensor | None
    input_order: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        group_size: int,
        *,
        zero_points: bool = False,
        act_order: bool = False,
        integer_inputs: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        #: Whether inputs are quantized too: an integer linear then takes the place of this one, once it is loaded.
        self.integer_inputs = integer_inputs
        groups = in_features // group_size
        self._buffer("weight_packed", torch.zeros(out_features, in_features // 8, dtype=torch.int32, device=device))
        # Those of integer linears are integer multiples of each other, which rounding to the model's type would end.
        scales = torch.float32 if integer_inputs else dtype
        self._buffer("weight_scale", torch.ones(out_features, groups, dtype=scales, device=device))
        shape = torch.tensor([out_features, in_features], dtype=torch.int64, device=device)
        self._buffer("weight_shape", shape)
        words = torch.zeros((out_features + 7) // 8, groups, dtype=torch.int32, device=device) if zero_points else None
        self._buffer("weight_zero_point", words)
        indices = torch.arange(in_features, dtype=torch.int32, device=device) // group_size if act_order else None
        self._buffer("weight_g_idx", indices)
        self.register_buffer("zero_point", None, persistent=False)
        self._buffer("input_order", None)
        zeros = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", zeros)
        self.signed = False
        self._launches = Launches()

    def _buffer(self, name: str, value: Tensor | None) -> None:
        self.register_buffer(name, value)

    def make_ready(self, name: str = "") -> None:
        """Once the tensors are loaded: unpack the zero points, and put the columns of a group side by side."""
        if self.weight_packed.is_meta:
            return
        with torch.no_grad(), torch.inference_mode(False):
            if self.weight_g_idx is not None:
                order = order_of_groups(self.weight_g_idx, self.group_size, name or "weight_g_idx")
                if order is not None:
                    self.weight_packed = in_order(self.weight_packed, order)
                    self.input_order = order
                self.weight_g_idx = None
            self.zero_point = self._zero_points()
            if not self.signed and self.zero_point is None:
                self.weight_packed, self.signed = self.weight_packed ^ _TOP_BITS, True

    def _zero_points(self) -> Tensor | None:
        """The zero point of each group, as the stored integers see it; None where a weight has none."""
        words = self._buffers.get("weight_zero_point")  # siblings as one have what follows from it alone
        return None if words is None else unpack_rows(words, self.out_features).to(torch.int32)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.signed:
            destination[prefix + "weight_packed"] = self.weight_packed ^ _TOP_BITS

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        stored = state_dict.get(prefix + "weight_packed")
        if self.signed and stored is not None:
            state_dict[prefix + "weight_packed"] = stored ^ _TOP_BITS
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.zero_point = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight_zero_point" and self._buffers.get("zero_point") is not None:
            self.zero_point = None

    # -- the weight --------------------------------------------------------------------------------------------------

    def dequantized_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The float weight these integers stand for, its columns in the order of the inputs."""
        weight = self._whole(dtype)
        return weight if self.input_order is None else torch.empty_like(weight).index_copy_(1, self.input_order, weight)

    def _whole(self, dtype: torch.dtype) -> Tensor:
        scale = self.weight_scale if self.weight_scale.dtype is dtype else self.weight_scale.float()
        weight, _, zero_point = self._operands()[:3]
        kind = self._element
        return dequantize(weight, scale, zero_point, scope=PerGroup(self.group_size), element=kind, dtype=dtype)

    def integer_linear(self, name: str) -> QuantizedLinear:
        """The integer linear of these weights; raises unless the scales of a row are integer multiples of one."""
        split = split_factors(self.weight_scale)
        if split is None:
            raise FlowError(
                f"{name}: expected group scales that are 1 to 15 times a scale of their row, as baracuda writes "
                "them for w4a8; other group scales are computed with float activations only: load it as w4a16"
            )
        made = QuantizedLinear(
            self.in_features, self.out_features, False, weight_element="s4", weight_group=self.group_size
        )
        made.weight = (self.weight_packed if self.signed else self.weight_packed ^ _TOP_BITS).view(torch.uint8)
        made.weight_scale, made.weight_factor = split[0].unsqueeze(1), split[1]
        made.bias = self.bias
        return made

    @property
    def weight(self) -> Tensor:
        """The weight in the type of the scales, dequantized on each access: model code reads its type or shape.

        It is marked as loaded, as transformers does it, so that no initialization writes to it.
        """
        dtype = self.weight_scale.dtype
        if self.weight_scale.is_meta:
            weight = torch.empty(self.out_features, self.in_features, dtype=dtype, device="meta")
        else:
            weight = self.dequantized_weight(dtype)
        weight._is_hf_initialized = True  # type: ignore[attr-defined]
        return weight

    # -- the product -------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        if (y := self._shared(x)) is not None:
            return y
        order = self._buffers["input_order"]
        if order is not None:
            x = x.index_select(-1, order)
        packed = self._multiplies_packed(x)
        if packed and not _is_traced() and (y := self._launches(self, x)) is not None:
            return y
        x, bias = under_autocast(x), self.bias
        if not packed:
            math = torch.float32 if x.is_cpu and x.dtype in _SLOW else x.dtype
            y = nn.functional.linear(x.to(math), self._whole(math), bias if bias is None else bias.to(math))
            return y.to(x.dtype)
        weight, scale, zero_point = self._operands()[:3]
        scale, added = scale if scale.dtype in (torch.float32, x.dtype) else scale.float(), bias_as(bias, x.dtype)
        return float_linear(x, weight, scale, zero_point, added, "s4" if self.signed else "u4")

    def _shared(self, x: Tensor) -> Tensor | None:
        """Its columns of what it computes with its siblings, if it does."""
        member = self._member
        if member is None:
            return None
        if not _is_traced():
            return member.share(self, x)
        return share_traced(member, x, lambda x, *_: member.whole.forward(x)) if asks_siblings() else None  # type: ignore[union-attr]

    def traced_tensors(self) -> Traced:
        return ()

    def traced_settings(self) -> str:
        return ""

    def _multiplies_packed(self, x: Tensor) -> bool:
        if self.fixed_order:
            return True
        if x.is_cpu:
            return bool(x.numel() <= FEW_TOKENS * self.in_features)
        return bool(has_kernel(x.device, x.dtype, self.out_features, self.in_features, self._group, self.signed))

    @property
    def _group(self) -> int:
        """As problems name it: 0 for one group a row."""
        return self.group_size if self.group_size < self.in_features else 0

    @property
    def _element(self) -> ElementKind:
        return ElementKind.S4 if self.signed else ElementKind.U4

    def _spec(self, dtype: torch.dtype) -> Spec:
        return weight_only_spec(dtype, self._element, Activation.NONE, self._group)

    def _operands(self) -> tuple[Tensor, Tensor, Tensor | None, Any]:
        weight, scale, zero_point = self.weight_packed.view(torch.uint8), self.weight_scale, self.zero_point
        if zero_point is None and not self.signed:
            zero_point = self._zero_points()
            if zero_point is not None and not _is_traced() and not _dispatch_modes():
                self.zero_point = zero_point
            elif zero_point is None:  # not made ready yet
                zero_point = torch.full_like(scale, 8, dtype=torch.int32)
        return weight, scale, zero_point, self.bias

    def _inputs(self, x: Tensor, operands: tuple[Value, ...]) -> tuple[Value, ...]:
        return (x, *operands, None)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, group_size={self.group_size}"
        kinds = "" if self._buffers.get("weight_zero_point") is None else ", zero points"
        return sizes + kinds + ("" if self.input_order is None else ", groups put in order")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def has_kernel(device: torch.device, dtype: torch.dtype, n: int, k: int, group: int, signed: bool) -> bool:
    """Whether something faster than the reference multiplies floats by packed weights of this shape."""
    return _has_kernel(device, dtype, n, k, group, signed)


@lru_cache(maxsize=4096)
def _has_kernel(device: torch.device, dtype: torch.dtype, n: int, k: int, group: int, signed: bool) -> bool:
    spec = weight_only_spec(dtype, "s4" if signed else "u4", Activation.NONE, group)
    plans = [cached_plan(device, QuantizeKind.WEIGHT_ONLY_LINEAR, (m, n, k), spec) for m in (1, 2048)]
    return all(plan.kernel.backend is not BackendKind.REFERENCE for plan in plans)
