"""Which linears of a model are proved to read the same tensor, which are not, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

import baracuda
from baracuda.models.merge import merge_siblings
from baracuda.nn import QuantizedLinear
from baracuda.nn.siblings import siblings_of

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 24)
        self.how = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


class Odd(Tensor):
    pass


def block(forward: Callable[[Any, Tensor], Tensor]) -> Block:
    torch.manual_seed(2)
    return Block(forward).requires_grad_(False)


def summed(m: Any, x: Tensor) -> Tensor:
    return m.a(x) + m.b(x) + m.c(x)[..., :8]


INPUTS = (torch.randn(2, 3, 16),)


def test_the_report_names_what_was_merged_and_what_was_not() -> None:
    model = block(summed)
    expected = block(summed)
    baracuda.quantize_model(expected)
    report = baracuda.quantize_model(model, merge=True, inputs=INPUTS)
    assert report.merged == {"a": "a, b, c as one: 40 x 16"} and report.apart == {}
    assert "+ a  a, b, c as one: 40 x 16" in str(report)
    assert torch.equal(model(INPUTS[0]), expected(INPUTS[0]))
    again = merge_siblings(model, INPUTS)
    assert again.merged == report.merged and len(siblings_of(model)) == 1


def test_nothing_is_merged_unless_asked_for() -> None:
    model = block(summed)
    report = baracuda.quantize_model(model)
    assert report.merged == {} and report.apart == {} and siblings_of(model) == []


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "opt", "mixtral", "bert"])
def test_attention_and_gates_of_the_model_zoo_are_merged_with_the_same_bits(name: str) -> None:
    model, alone = models.build(name), models.build(name)
    for each in (model, alone):
        each.requires_grad_(False)
    report = baracuda.quantize_model(model, ignore=["lm_head"], merge=True)
    baracuda.quantize_model(alone, ignore=["lm_head"])
    attention = {"opt": "k_proj, v_proj, q_proj", "bert": "query, key, value"}.get(name, "q_proj, k_proj, v_proj")
    found = [what.split(" as one")[0] for what in report.merged.values()]
    assert found.count(attention) == 2
    assert found.count("gate_proj, up_proj") == (2 if name in ("llama", "qwen2", "gemma2") else 0)
    reasons = set(report.apart.values())
    assert reasons <= {"no other linear of its module reads the same tensor", "the pass did not reach it"}
    x = models.prompt()
    assert torch.equal(model(x)[0], alone(x)[0])


@pytest.mark.parametrize(
    ("forward", "merged", "reason"),
    [
        (lambda m, x: m.a(x) + m.b(x * 1), [], "no other linear of its module reads the same tensor"),
        (lambda m, x: m.a(x) + m.b(x.add_(1)), [], "no other linear of its module reads the same tensor"),
        (lambda m, x: m.a(x) + m.b(x) + m.b(x * 2), [], "no other linear of its module reads the same tensor"),
        (lambda m, x: m.a(x).view(2, -1) + m.b(x).view(2, -1), [], "the model does not take its output as a slice"),
        (lambda m, x: m.a(x).view(-1, 8) + m.b(x).reshape(-1, 8), ["a"], ""),
        (lambda m, x: m.a(x) + m.b(x) if x.sum() < 1e9 else x, ["a"], ""),  # which wants values
    ],
    ids=["copies", "written to", "called twice", "viewed", "viewed as a slice can be", "decided by data"],
)
def test_what_the_model_does_decides(forward: Callable[[Any, Tensor], Tensor], merged: list[str], reason: str) -> None:
    model = block(forward)
    report = baracuda.quantize_model(model, merge=True, inputs=(INPUTS[0].clone(),))
    assert list(report.merged) == merged
    assert report.apart.pop("c") == "the pass did not reach it"
    assert all(why.startswith(reason) for why in report.apart.values()) and bool(report.apart) is not bool(merged)


def test_linears_of_other_settings_are_merged_among_themselves() -> None:
    model = block(summed)
    model.b = QuantizedLinear.from_float(model.b, q_min=-7, q_max=7)
    report = baracuda.quantize_model(model, merge=True, inputs=INPUTS)
    assert report.merged == {"a": "a, c as one: 32 x 16"}
    assert "activation=s8[-7, 7]" in report.apart["b"] and report.apart["b"].endswith("beside it, a")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.b.register_forward_hook(lambda *_: None), "has hooks, or a forward of its own"),
        (lambda m: setattr(m, "d", m.b), "is also "),
        (lambda m: m.c.register_buffer("tied", m.b.weight), "shares a tensor with c"),
        (lambda m: setattr(m.b, "weight", m.b.weight.as_subclass(Odd)), "has tensors of a subclass"),
        (lambda m: m.b.to(torch.float64), "bias is torch.float64 on cpu, torch.float32 on cpu beside it, a"),
    ],
    ids=["hooks", "shared", "tied", "subclass", "another type"],
)
def test_what_cannot_be_merged_is_named_with_the_reason(change: Callable[[Any], Any], reason: str) -> None:
    model = block(summed)
    baracuda.quantize_model(model)
    change(model)
    found = merge_siblings(model, INPUTS)
    assert list(found.merged) in (["a"], []) and found.apart["b"].startswith(reason)


def test_a_model_that_cannot_be_run_is_left_as_it_is() -> None:
    report = baracuda.quantize_model(block(summed), merge=True)
    assert set(report.apart.values()) == {"there are no inputs to make a pass with: give `inputs`"}
    report = baracuda.quantize_model(block(summed), merge=True, inputs={"y": INPUTS[0]})
    assert "a pass of the model failed: TypeError" in report.apart["a"] and not report.merged


def test_the_pass_leaves_training_and_inputs_as_they_were() -> None:
    model = block(summed).train()
    model.a.eval()
    x = INPUTS[0].clone()
    baracuda.quantize_model(model, merge=True, inputs=(x,))
    assert model.training and not model.a.training and torch.equal(x, INPUTS[0])


@pytest.mark.parametrize("options", [{"scheme": "w8a8"}, {"scheme": "w4a8", "group_size": 32}], ids=str)
def test_a_loaded_checkpoint_is_merged(options: dict[str, Any], tmp_path: Path) -> None:
    from baracuda.flow import quantize_checkpoint

    models.save("llama", tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", **options)
    model, alone = baracuda.load(tmp_path / "out"), baracuda.load(tmp_path / "out", merge=False)
    assert len(merge_siblings(model).merged) == 4
    assert not any(siblings_of(module) for module in alone.modules())
    with torch.no_grad():
        assert torch.equal(model(models.prompt()).logits, alone(models.prompt()).logits)
    assert list(model.state_dict()) == list(alone.state_dict())
    mine, theirs = (each.generate(models.prompt(), max_new_tokens=6, do_sample=False) for each in (model, alone))
    assert torch.equal(mine, theirs)
