"""An attention whose linears are merged, beside the same one as it was, and a count of what was computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import baracuda
from baracuda.nn.siblings import Siblings
from baracuda.plans.plan import SelectedPlan

NAMES = ("q", "k", "v")


class Attention(nn.Module):
    def __init__(self, biases: tuple[bool, bool, bool] = (False, False, False)) -> None:
        super().__init__()
        for name, size, bias in zip(NAMES, (48, 16, 17), biases, strict=True):
            setattr(self, name, nn.Linear(32, size, bias))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(x), self.k(x), self.v(x)


SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "w8a8": ("w8a8", {}),
    "w8a8-asymmetric": ("w8a8-asymmetric", {}),
    "w4a8": ("w4a8", {}),
    "static": ("w8a8-smoothquant", {"input_scales": dict.fromkeys(NAMES, 0.02)}),
}


def attention(scheme: str = "w8a8", biases: tuple[bool, bool, bool] = (False, False, False)) -> Attention:
    torch.manual_seed(3)
    model = Attention(biases)
    name, options = SCHEMES[scheme]
    baracuda.quantize_model(model, name, **options)
    return model


def merged(*args: Any) -> tuple[Attention, Attention, Siblings]:
    """A model whose linears are merged, the same model as it was, and what it merged."""
    model, alone = attention(*args), attention(*args)
    made = Siblings(model, NAMES, [model.q, model.k, model.v])
    assert made.why_apart() is None
    return model, alone, made


@pytest.fixture
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of outputs of each product."""
    rows: list[int] = []
    compute = SelectedPlan.compute

    def noted(plan: SelectedPlan, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if "linear" in plan.problem.op.value:
            rows.append(plan.problem.shape[1])
        return compute(plan, inputs)

    monkeypatch.setattr(SelectedPlan, "compute", noted)
    return rows


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """To the bit, signs of zeros included."""
    kinds = {4: torch.int32, 2: torch.int16}
    return all(
        torch.equal(a.contiguous().view(kinds[a.element_size()]), b.contiguous().view(kinds[b.element_size()]))
        for a, b in zip(found, expected, strict=True)
    )


X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
