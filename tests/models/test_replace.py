"""Whole models: which modules prepare_qat, convert and quantize_model replace, what they leave and what they refuse."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import baracuda
from baracuda.nn import QuantizedLinear, SmoothQuantLinear
from baracuda.nn.fake_quantize import Strategy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x + self.mlp(x))  # type: ignore[no-any-return]


def block() -> Block:
    torch.manual_seed(1)
    return Block()


def test_quantize_model_replaces_linears_and_says_what_it_left() -> None:
    model = block()
    report = baracuda.quantize_model(model, ignore=["head", "nothing.*"])
    assert list(report.replaced) == ["mlp.0", "mlp.2"]
    assert report.skipped["head"] == "ignored by 'head'"
    assert "NonDynamicallyQuantizableLinear" in report.skipped["attention.out_proj"]
    assert report.unmatched == ["nothing.*"]
    assert isinstance(model.mlp[0], QuantizedLinear) and type(model.head) is nn.Linear
    text = str(report)
    assert text.startswith("2 replaced, 2 left as they are") and "? 'nothing.*' matched no module" in text
    assert model(torch.randn(2, 3, 16)).isfinite().all()


@pytest.mark.parametrize("ignore", [["mlp.*"], ["re:mlp\\.[0-9]"], [nn.Sequential, "mlp.?"]], ids=str)
def test_modules_are_chosen_by_glob_regular_expression_or_type(ignore: list[Any]) -> None:
    model = block()
    assert list(baracuda.quantize_model(model, ignore=ignore).replaced) == ["head"]
    assert list(baracuda.quantize_model(block(), targets=["mlp.0"]).replaced) == ["mlp.0"]
    assert list(baracuda.quantize_model(block(), targets="Linear").replaced) == ["mlp.0", "mlp.2", "head"]


@pytest.mark.parametrize("option", ["targets", "ignore"])
def test_a_broken_regular_expression_is_an_error_before_anything_is_replaced(option: str) -> None:
    model = block()
    with pytest.raises(baracuda.InvalidProblem, match=r"'re:\(\[': expected a regular expression .* unterminated"):
        baracuda.quantize_model(model, **{option: ["re:(["]})
    assert type(model.head) is nn.Linear


def test_modules_that_cannot_be_quantized_are_left_alone_and_named() -> None:
    model = nn.ModuleDict(
        {
            "fine": nn.Linear(4, 4),
            "complex": nn.Linear(4, 4, dtype=torch.complex64),
            "tiny": nn.Linear(4, 4).to(torch.float8_e4m3fn),
            "broken": nn.Linear(4, 4),
            "watched": nn.Linear(4, 4),
            "conv": nn.Conv2d(2, 2, 1),
        }
    )
    model["broken"].weight.data[0, 0] = float("nan")
    model["watched"].register_forward_hook(lambda *_: None)
    before = dict(model.items())
    report = baracuda.quantize_model(model, targets=[nn.Linear, nn.Conv2d])
    assert list(report.replaced) == ["fine"]
    expected = {
        "complex": "weight is torch.complex64", "tiny": "weight is torch.float8_e4m3fn", "broken": "NaN or infinite",
        "watched": "has hooks", "conv": "expected an nn.Linear, got Conv2d",
    }  # fmt: skip
    for name, reason in expected.items():
        assert reason in report.skipped[name] and model[name] is before[name]


def test_a_static_scheme_wants_a_scale_for_each_linear() -> None:
    model = block()
    report = baracuda.quantize_model(
        model, "w8a8-smoothquant", input_scales={"mlp.0": 0.03, "head": torch.tensor(0.05)}
    )
    assert list(report.replaced) == ["mlp.0", "head"] and "input_scales" in report.skipped["mlp.2"]
    assert isinstance(model.head, SmoothQuantLinear) and model.head.input_scale.item() == pytest.approx(0.05)
    with pytest.raises(baracuda.InvalidProblem, match=r"expected a LinearScheme or one of w8a8, .* got 'w2a2'"):
        baracuda.quantize_model(model, "w2a2")
    with pytest.raises(baracuda.InvalidProblem, match=r"got 'w4a16'; .* `baracuda quantize`"):
        baracuda.prepare_qat(model, "w4a16")


def test_a_scale_no_linear_can_have_is_in_the_report() -> None:
    report = baracuda.quantize_model(block(), "w8a8-smoothquant", input_scales={"mlp.0": 0.0, "head": 0.05})
    assert list(report.replaced) == ["head"] and "input_scale: expected a number that is" in report.skipped["mlp.0"]


def test_a_module_held_twice_stays_one_module() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, shared)
    report = baracuda.quantize_model(model)
    assert len(report.replaced) == 2 and model[0] is model[1]


def test_the_model_itself_is_not_replaced() -> None:
    assert "use from_float" in baracuda.quantize_model(nn.Linear(3, 3)).skipped["Linear"]


def test_prepare_keeps_the_parameters_an_optimizer_holds_and_convert_ends_the_training() -> None:
    model, x = block(), torch.randn(4, 3, 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    report = baracuda.prepare_qat(model, "w4a8", ignore=["head"])
    assert list(report.replaced) == ["mlp.0", "mlp.2"]
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    expected = model.eval()(x)
    assert list(baracuda.convert(model).replaced) == ["mlp.0", "mlp.2"]
    assert isinstance(model.mlp[0], QuantizedLinear)
    torch.testing.assert_close(model(x), expected, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("name", ["activation_strategy", "weight_strategy"])
@pytest.mark.parametrize("strategy", ["static", "learned"])
def test_convert_leaves_a_linear_whose_scale_has_seen_nothing(name: str, strategy: Strategy) -> None:
    model = block()
    baracuda.prepare_qat(model, ignore=["head"], **{name: strategy})
    report = baracuda.convert(copy.deepcopy(model))
    if (name, strategy) == ("weight_strategy", "learned"):
        assert not report.skipped.keys() & {"mlp.0", "mlp.2"}, "a weight is there to learn from at once"
    else:
        assert "has seen nothing" in report.skipped["mlp.0"] and "mlp.0" not in report.replaced
    model(torch.randn(2, 3, 16))
    assert list(baracuda.convert(model).replaced) == ["mlp.0", "mlp.2"]


def test_convert_leaves_a_linear_whose_learned_zero_point_its_integers_cannot_hold() -> None:
    model, x = nn.Sequential(nn.Linear(12, 6)), torch.rand(3, 12)
    baracuda.prepare_qat(model, activation="u8", mode="asymmetric", activation_strategy="learned")
    model(x)
    zero_point = model[0].activation_fake_quantize.zero_point
    zero_point.data.fill_(-0.7)
    reason = baracuda.convert(model).skipped["0"]
    assert "zero point of its activations is -1, expected one in [0, 255]" in reason
    zero_point.data.fill_(-0.4)
    assert list(baracuda.convert(model).replaced) == ["0"] and model[0].input_zero_point.item() == 0


def test_checkpointing_a_qat_block_gives_the_same_gradients() -> None:
    model, x = block(), torch.randn(2, 3, 16)
    baracuda.prepare_qat(model, weight_strategy="learned")
    grads = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        model.zero_grad()
        run(x).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1]) > 8
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_strategy": "dynmic"}, "strategy: expected one of"),
        ({"observer_options": {"momentum": 7}, "activation_strategy": "static"}, r"momentum: expected a number in"),
        ({"scheme": baracuda.LinearScheme(q_min=-200)}, r"expected q_min and q_max inside s8's range"),
        ({"scheme": baracuda.LinearScheme(activation=baracuda.ElementKind.S4)}, "activations: expected one of s8, u8"),
        ({"scheme": baracuda.LinearScheme(weight=baracuda.ElementKind.U8)}, "the weight: expected one of s8, s4"),
        ({"scheme": baracuda.LinearScheme(q_min=5, q_max=3)}, "expected q_min <= q_max"),
    ],
)
def test_options_that_no_layer_takes_are_errors_and_nothing_is_replaced(options: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.raises(baracuda.BaracudaError, match=message):
        baracuda.prepare_qat(model, **options)
    if set(options) == {"scheme"}:
        with pytest.raises(baracuda.BaracudaError, match=message):
            baracuda.quantize_model(model, options["scheme"])
    assert type(model[0]) is type(model[2]) is nn.Linear


def test_a_static_scheme_needs_scales_that_are_there_and_takes_no_zero_points() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with pytest.raises(baracuda.InvalidProblem, match="input_scales: expected a calibrated scale for each"):
        baracuda.quantize_model(model, "w8a8-smoothquant")
    asymmetric = baracuda.LinearScheme(static=True, mode="asymmetric")
    with pytest.raises(
        baracuda.Unsupported, match="needs zero points, which input_scales does not carry; use prepare_qat"
    ):
        baracuda.quantize_model(model, asymmetric, input_scales={"0": 0.1, "1": 0.1})
    report = baracuda.quantize_model(model, "w8a8-smoothquant", input_scales={"0": 0.1, "2": 0.1})
    assert list(report.replaced) == ["0"] and list(report.skipped) == ["1"] and report.unmatched == ["2"]


def test_hooks_are_not_lost_without_a_word() -> None:
    """Pruning is a hook: without it a layer would become the weight of its last forward."""
    for hook in ("register_forward_hook", "register_full_backward_pre_hook", "register_state_dict_pre_hook"):
        model = nn.Sequential(nn.Linear(8, 8))
        getattr(model[0], hook)(lambda *args: None)
        assert "has hooks" in baracuda.prepare_qat(model).skipped["0"], hook
    model = nn.Sequential(nn.Linear(8, 8))
    baracuda.prepare_qat(model)
    prune.l1_unstructured(model[0], "weight", 0.5)
    assert "has hooks, which would be lost: remove them, as prune.remove" in baracuda.convert(model).skipped["0"]
    prune.remove(model[0], "weight")
    assert list(baracuda.convert(model).replaced) == ["0"]


def only_the_last(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and name == "2"


def test_targets_may_be_a_function_of_the_name_and_the_module() -> None:
    for targets in (only_the_last, [only_the_last]):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        assert list(baracuda.quantize_model(model, targets=targets).replaced) == ["2"]
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    report = baracuda.quantize_model(model, ignore=only_the_last)
    assert report.skipped == {"2": "ignored by 'only_the_last'"}
    report = baracuda.quantize_model(nn.Sequential(nn.Linear(8, 8)), targets=[nn.Linear, only_the_last])
    assert report.unmatched == ["only_the_last"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.output = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.output.weight = self.embedding.weight


@pytest.mark.parametrize("replace", [baracuda.quantize_model, baracuda.prepare_qat])
def test_heads_and_tied_weights_stay_float_unless_asked_for(replace: Callable[..., baracuda.Report]) -> None:
    report = replace(Tied())
    assert list(report.replaced) == ["body"]
    assert report.skipped == {
        "output": "shares its weight with an embedding: pass quantize_head=True to quantize it too"
    }
    assert set(replace(Tied(), quantize_head=True).replaced) == {"body", "output"}
    assert set(replace(Tied(), targets=["output"]).replaced) == {"output"}
    untied = Tied()
    untied.output = nn.Linear(8, 16)
    untied.get_output_embeddings = lambda: untied.output
    assert replace(untied).skipped["output"].startswith("the output head")


def test_a_report_is_a_table_in_notebooks_and_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="baracuda"):
        report = baracuda.quantize_model(nn.Sequential(nn.Linear(8, 8)), ignore=["<b>"])
    shown = report._repr_html_()
    assert "<td>0</td><td>replaced</td>" in shown and "&lt;b&gt;" in shown and "<b>" not in shown
    assert [record.getMessage() for record in caplog.records if record.name.startswith("baracuda")] == [
        "Sequential: 1 modules replaced, 0 left",
        "'<b>' matched no module of Sequential",
    ]
