"""Tensor-parallel linears: DTensor placements whose results are those of one process, to the bit.

    parallelize_module(model, mesh, {"up": ColumnParallel(), "down": RowParallel()})

A column-parallel linear holds some rows of the weight, so each rank computes some of the outputs: nothing is summed
across ranks. A row-parallel one holds some columns. Its ranks first agree on each token's scale (a maximum over all of
its elements), then sum integers, and scale once at the end: what one process does, in another order of exact sums.
For inference: no gradient flows through either.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from .backends.formulas import canonical, linear
from .core.errors import InvalidProblem, Unsupported
from .core.packing import unpack_int4
from .core.scope import PerToken
from .core.types import ElementKind
from .functional import choose_qparams, quantize, smoothquant_linear
from .nn.autocast import under_autocast
from .nn.linear import IntegerLinear, QuantizedLinear, SmoothQuantLinear


class _Parallel(ParallelStyle):
    """Distributes the module's tensors, and wraps its forward so that it works on the local ones."""

    #: Where each tensor goes; what is not named is replicated.
    placements: ClassVar[dict[str, Placement]]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, IntegerLinear):
            raise Unsupported(
                f"{type(self).__name__}: expected a QuantizedLinear or SmoothQuantLinear, got {type(module).__name__}; "
                "quantize the model first"
            )
        self._require_even(module, device_mesh.size())
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = self._distribute(name, buffer, device_mesh)
        if module.bias is not None:
            bias = self._distribute("bias", module.bias.detach(), device_mesh)
            module.bias = nn.Parameter(bias, module.bias.requires_grad)
        forward = type(self)._forward
        object.__setattr__(module, "forward", lambda x: forward(self, module, device_mesh, x))
        return module

    def _distribute(self, name: str, value: Tensor, mesh: DeviceMesh) -> DTensor:
        return distribute_tensor(value, mesh, [self.placements.get(name, Replicate())])

    def _require_even(self, module: IntegerLinear, ranks: int) -> None:
        raise NotImplementedError

    def _forward(self, module: IntegerLinear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        raise NotImplementedError


class ColumnParallel(_Parallel):
    """Rows of the weight, its scales and the bias are split; x is replicated, y is split along its last axis.

    `gather_output` collects the whole y on every rank.
    """

    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(0), "weight_scale": Shard(0), "bias": Shard(0)}

    def __init__(self, *, gather_output: bool = False) -> None:
        super().__init__()
        self.gather_output = gather_output

    def _require_even(self, module: IntegerLinear, ranks: int) -> None:
        if module.out_features % ranks:
            raise InvalidProblem(
                f"ColumnParallel: expected out_features to be a multiple of {ranks} ranks, got {module.out_features}"
            )

    @torch.no_grad()
    def _forward(self, module: IntegerLinear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        local = copy.copy(module)
        local._buffers, local._parameters = _local(module._buffers), _local(module._parameters)
        y: Tensor = type(module).forward(local, _placed(x, mesh, Replicate()))
        if not self.gather_output:
            return y
        parts = [torch.empty_like(y) for _ in range(mesh.size())]
        dist.all_gather(parts, y.contiguous(), group=mesh.get_group())
        return torch.cat(parts, dim=-1)


class RowParallel(_Parallel):
    """Columns of the weight are split, and so is x along its last axis; y is whole on every rank."""

    placements: ClassVar[dict[str, Placement]] = {"weight": Shard(1)}

    def _require_even(self, module: IntegerLinear, ranks: int) -> None:
        pieces = 2 * ranks if module.weight_element.is_packed else ranks
        if module.in_features % pieces:
            raise InvalidProblem(
                f"RowParallel: expected in_features to be a multiple of {pieces} for {ranks} ranks, "
                f"got {module.in_features}"
            )

    @torch.no_grad()
    def _forward(self, module: IntegerLinear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        x = self._own_part(module, mesh, _placed(x, mesh, Shard(x.ndim - 1)))
        x = under_autocast(x) if x.is_floating_point() else x
        rows, tensors, group = x.reshape(-1, x.shape[-1]), _local(module._buffers), mesh.get_group()
        weight, element = tensors["weight"], module.weight_element
        q, scale, zero_point, dtype = _activations(module, rows, tensors, group)
        # Integers in f64: exact for every K, and a sum of them is the same in any order.
        acc = smoothquant_linear(q, weight, 1.0, 1.0, dtype=torch.float64, weight_element=element)
        if zero_point is not None:
            whole = unpack_int4(weight, element, rows.shape[1]) if element.is_packed else weight
            acc -= zero_point.double().reshape(-1, 1) * whole.double().sum(dim=1)
        dist.all_reduce(acc, group=group)
        bias = None if module.bias is None else _local({"bias": module.bias})["bias"]
        math = ElementKind.of(dtype).math.dtype
        y = canonical(linear(acc, scale.reshape(-1, 1), tensors["weight_scale"].view(-1), bias, math).to(dtype))
        return y.reshape(*x.shape[:-1], module.out_features)

    def _own_part(self, module: IntegerLinear, mesh: DeviceMesh, x: Tensor) -> Tensor:
        part = module.in_features // mesh.size()
        if x.shape[-1] == part:
            return x
        if x.shape[-1] == module.in_features:
            return x.narrow(-1, mesh.get_local_rank() * part, part)
        raise InvalidProblem(
            f"RowParallel: expected x of last axis {part}, this rank's part, or {module.in_features}, the whole, "
            f"got {list(x.shape)}"
        )


def _activations(
    module: IntegerLinear, rows: Tensor, tensors: dict[str, Any], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype]:
    """This rank's integers, with the scale and zero point of the whole tokens, and the type of the result."""
    if isinstance(module, SmoothQuantLinear):
        scale, zero_point, kind = tensors["input_scale"], tensors["input_zero_point"], module.activation
        if not rows.is_floating_point():
            return rows, scale, zero_point, module.dtype
        q = quantize(rows, scale, zero_point, dtype=kind, q_min=module.q_min, q_max=module.q_max)
        return q, scale, zero_point, rows.dtype
    assert isinstance(module, QuantizedLinear)
    options: dict[str, Any] = {"dtype": module.activation, "q_min": module.q_min, "q_max": module.q_max}
    scale, zero_point = choose_qparams(_ends(rows, group), mode=module.mode, include_zero=True, **options)
    return quantize(rows, scale, zero_point, scope=PerToken(), **options), scale, zero_point, rows.dtype


def _ends(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The extremes of every rank's part of each token. A scale follows from a token's extremes, so from these too."""
    if rows.numel() == 0:
        return rows
    ends = torch.stack([rows.amin(dim=1), rows.amax(dim=1)], dim=1)
    parts = [torch.empty_like(ends) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, ends, group=group)
    return torch.cat(parts, dim=1)


def _placed(x: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    return x.redistribute(mesh, [placement]).to_local() if isinstance(x, DTensor) else x


def _local(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in tensors.items()}
