"""The example that trains what it serves, and the report of what in a model depends on the batch."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import nn

import baracuda

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_answer.py"


def test_the_trainer_has_the_rollouts_probabilities_to_the_last_bit() -> None:
    train = runpy.run_path(str(EXAMPLE))["train"]
    found = train("integer", steps=4)
    assert found["largest gap of a log-probability"] == 0.0 and found["divergence"] == 0.0
    assert train("fake", steps=4)["largest gap of a log-probability"] > 1e-3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU()
        self.attention, self.down = nn.MultiheadAttention(64, 2), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.up(self.norm(x)))
        return self.down(h)  # type: ignore[no-any-return]


def test_a_report_says_what_depends_on_the_batch_and_why() -> None:
    model = nn.Sequential(nn.Embedding(10, 32), Block())
    before = baracuda.deterministic(model, replace=False)
    assert set(before.invariant) == {"0", "1.act"}
    assert {"1.norm", "1.up", "1.down", "1.attention"} <= set(before.dependent)
    assert "number of rows" in before.dependent["1.up"] and not before.replaced
    after = baracuda.deterministic(model)
    assert {"1.up", "1.down"} <= set(after.replaced) and {"1.up", "1.down"} <= set(after.invariant)
    assert "attention" in after.dependent["1.attention"]
    assert "1.attention" in str(after) and "depends on the batch" in str(after)
    tokens = torch.randint(10, (9,))
    assert isinstance(model[1].up, baracuda.nn.QuantizedLinear) and model(tokens).shape == (9, 32)


def test_a_model_of_quantized_linears_alone_is_invariant() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    report = baracuda.deterministic(model)
    assert not report.dependent and report.holds
    x = torch.randn(70, 32)
    assert all(torch.equal(model(x[:rows]), model(x)[:rows]) for rows in (1, 5, 33))


def test_a_head_stays_float_unless_asked() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.lm_head = nn.Linear(8, 8), nn.Linear(8, 20)

        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

    model = Language()
    assert "lm_head" in baracuda.deterministic(model).dependent
    assert not baracuda.deterministic(model, quantize_head=True).dependent


def test_what_is_not_known_counts_as_dependent() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0)

    report = baracuda.deterministic(nn.Sequential(Odd()), replace=False)
    assert "not known" in report.dependent["0"] and not report.holds


def test_a_scheme_that_is_none_is_refused() -> None:
    with pytest.raises(baracuda.InvalidProblem, match="scheme"):
        baracuda.deterministic(nn.Sequential(nn.Linear(2, 2)), "w9a9")


def test_a_weight_only_linear_is_not_called_invariant() -> None:
    from baracuda.flow.hf.packed import PackedLinear

    linear = PackedLinear(64, 8, bias=False, group_size=32)
    report = baracuda.deterministic(nn.Sequential(linear), replace=False)
    assert "beyond 32 rows" in report.dependent["0"] and not report.holds
