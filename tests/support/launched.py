"""Launches of GPU kernels without a GPU: compiled for one, given to a driver that records them, and interpreted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import ptx
import pytest
import torch
from fake_cuda import Fake, build
from torch import Tensor

from baracuda import BackendKind, ElementKind, PlanPreference, QuantizeKind
from baracuda.core.optable import OPS
from baracuda.core.problem import Problem
from baracuda.plans.plan import SelectedPlan
from cases import Case, assert_same_bits, operands

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")

#: What a parameter may be filled with, by its declaration in PTX.
FILLS = {
    "u64": {"address", "constant", "f64"},
    "u32": {"constant", "i32"},
    "f32": {"constant", "f32"},
    "b8": {"matrix"},
}
#: Bytes of a parameter; the only one of single bytes is a map for TMA.
_SIZES = {"u64": 8, "u32": 4, "f32": 4, "b8": 128}
#: The first function's number: other tests of the driver have smaller ones.
_FIRST = 1000


class Launched:
    """The launches of one call: each kernel, and what the driver was given for its parameters."""

    def __init__(self, fake: Fake, monkeypatch: pytest.MonkeyPatch, processors: int = 132, arch: int = 90) -> None:
        import triton
        from triton.backends.compiler import GPUTarget

        from baracuda.backends.triton import launch
        from baracuda.backends.triton.linear.hopper import (
            direct_floats_launch,
            direct_launch,
            few_launch,
            packed_launch,
        )
        from baracuda.backends.triton.linear.hopper import launch as hopper_launch

        self.fake, self.kernels, self.compiled, self.interpreted = fake, [], [], 0
        fake.forget()
        active = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", arch, 32))
        monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
        monkeypatch.setattr(launch, "_driver", lambda: fake.driver)
        monkeypatch.setattr(launch, "loaded", self._loaded)
        for module in (hopper_launch, direct_launch, direct_floats_launch, few_launch, packed_launch):
            monkeypatch.setattr(module, "loaded", self._loaded)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        properties = SimpleNamespace(multi_processor_count=processors, L2_cache_size=60 * 2**20)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        # For the registry, which asks whether there is a GPU, and which.
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: divmod(arch, 10))

    @classmethod
    def afresh(
        cls, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, processors: int = 132
    ) -> Launched:
        """With a driver that has seen nothing: what a test takes as its fixture."""
        fake = build(tmp_path_factory)
        fake.set(0, 0, 0)
        return cls(fake, monkeypatch, processors)

    @property
    def ptx(self) -> list[str]:
        return [compiled.asm["ptx"] for compiled in self.compiled]

    def _loaded(self, compiled: Any, programs: int) -> Any:
        from baracuda import _host

        function = _FIRST + len(self.kernels)
        warps, _, shared = compiled.packed_metadata
        kernel = _host.Kernel(compiled.name, function, programs, 32 * warps, shared, compiled.metadata.launch_pdl)
        entry = re.search(r"\.entry [^(]*\(([^)]*)\)", compiled.asm["ptx"])
        assert entry
        declared = re.findall(r"\.param(?: \.align \d+)? \.(\w+)", entry.group(1))
        self.compiled.append(compiled)
        self.kernels.append((kernel, declared))
        self.fake.declare(function, [_SIZES[kind] for kind in declared])
        return kernel

    def check(self) -> None:
        """Every kernel's parameters are filled with what they are declared as."""
        assert self.kernels
        for kernel, declared in self.kernels:
            filled = kernel.parameters()
            assert len(filled) == len(declared)
            for fill, kind in zip(filled, declared, strict=True):
                assert fill in FILLS[kind], (filled, declared)

    def interpret(self, values: Sequence[object]) -> list[str]:
        """Run what was launched since the last time, in order, on these tensors of the host; the kernels' names."""
        buffers = {}
        for value in values:
            if isinstance(value, Tensor) and value.numel():
                assert value.is_contiguous()
                flat = value.view(-1).view(torch.uint8) if value.dim() else value.reshape(1).view(torch.uint8)
                buffers[value.data_ptr()] = flat.numpy()
        names = []
        launches = self.fake.launches()[self.interpreted :]
        self.interpreted += len(launches)
        for launch in launches:
            at = launch.function - _FIRST
            sizes = [_SIZES[kind] for kind in self.kernels[at][1]]
            ends = np.cumsum(sizes)
            raw = bytes(launch.bytes[: launch.size])
            parameters = [raw[end - size : end] for size, end in zip(sizes, ends, strict=True)]
            ptx.run(self.ptx[at], launch.programs, launch.threads, launch.shared, parameters, buffers)
            names.append(self.compiled[at].name)
        return names


def linear(
    op: QuantizeKind, m: int, n: int, k: int, weight: str = "s4", group: int = 0, element: str = "bf16"
) -> Problem:
    """A linear of activations of the type `element`, that quantizes them to all of s8 if it does."""
    p = Problem(op, (m, n, k), ElementKind.of(element), ElementKind.S8, -128, 127, weight=ElementKind.of(weight))
    return replace(p, weight_group=group)


def interpreted(launched: Launched, p: Problem, values: tuple[Any, ...]) -> list[str]:
    """Launch the problem's kernel on these operands and interpret what came of it; the names of its kernels."""
    from baracuda.backends.triton import KERNELS

    kernel = next(kernel for kernel in KERNELS if p.op in kernel.ops)
    workspace = torch.full((max(kernel.workspace(p, GPU), 1),), 0xA5, dtype=torch.uint8)
    kernel.bind(p, GPU)(values, workspace)
    return launched.interpret([*values, workspace])


def assert_reference_bits(launched: Launched, p: Problem, scale: str = "tensor", **given: Any) -> list[str]:
    """The interpreted launches give the reference's bits and leave their inputs alone; their kernels' names."""
    rows = [operand.name for operand in OPS[p.op].operands]
    values = dict(zip(rows, operands(Case(p, scale=scale)), strict=True)) | {"bias": None} | given
    copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in values.items()}
    names = interpreted(launched, p, tuple(values.values()))
    reference = SelectedPlan(p, CPU, PlanPreference(prefer_backend=BackendKind.REFERENCE))
    reference.launch(tuple(copies.values()), reference.allocate_workspace())
    tensors = [{name: v for name, v in x.items() if isinstance(v, Tensor)} for x in (values, copies)]
    assert_same_bits(*tensors, p)
    return names
