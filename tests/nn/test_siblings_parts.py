"""The parts of siblings as modules: every way in which they come apart and together again."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from merged_attention import NAMES, X, attention, merged, same
from torch import Tensor, nn
from torch.nn.utils import prune

from baracuda.nn import QuantizedLinear, SmoothQuantLinear
from baracuda.nn.siblings import Siblings, siblings_of

pytestmark = pytest.mark.usefixtures("inference")


def test_the_state_is_that_of_the_parts() -> None:
    model, alone, _ = merged("static", (True, False, True))
    mine, theirs = model.state_dict(), alone.state_dict()
    assert list(mine) == list(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in alone.named_modules()]
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in alone.named_buffers()]
    assert torch.equal(model.k.dequantized_weight(), alone.k.dequantized_weight())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("scheme", ["w8a8", "static"])
def test_loading_reaches_the_stacked_rows(scheme: str, assign: bool, computed: list[int]) -> None:
    model, alone, _ = merged(scheme, (True, False, True))
    state = {name: t.flip(0).clone() for name, t in alone.state_dict().items()}
    if scheme == "static":
        state |= {f"{name}.input_scale": torch.tensor([0.03]) for name in NAMES}
    alone.load_state_dict(state)
    model.load_state_dict({name: t.clone() for name, t in state.items()}, assign=assign)
    model.requires_grad_(False)
    found = model(X)
    assert computed == [81] and same(found, alone(X))


def test_scales_that_come_to_differ_part_static_siblings(computed: list[int]) -> None:
    model, alone, made = merged("static")
    for each in (model, alone):
        each.k.input_scale.fill_(0.05)
    assert same(model(X), alone(X)) and computed[:3] == [48, 16, 17]
    assert made.why_apart() == "an input_scale was changed"


def _saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": _saved,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_merged_for_themselves_and_parts_copied_alone_stand_alone(how: str, computed: list[int]) -> None:
    model, alone, made = merged("w8a8", (True, False, True))
    holder = nn.ModuleDict({"attention": model})
    copied = COPIES[how](holder)["attention"]
    (siblings,) = siblings_of(copied)
    assert siblings is not made and siblings.why_apart() is None and made.why_apart() is None
    copied.k.weight.neg_()
    assert same(model(X), alone(X)) and computed[0] == 81
    alone.k.weight.neg_()
    computed.clear()
    assert same(copied(X), alone(X)) and computed[0] == 81
    part = COPIES[how](model.k)
    assert part._member is None and part.weight.untyped_storage().nbytes() == 16 * 32
    assert torch.equal(part(X), model.k(X))
    assert len(pickle.dumps(model)) < len(pickle.dumps(alone)) + 3000  # no row is written twice


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: model.half().float(),
        lambda model: model._apply(lambda t: t.clone()),  # as to another device
        lambda model: model.to_empty(device="cpu"),
    ],
    ids=["bf16", "half and back", "moved", "emptied"],
)
def test_a_moved_model_is_stacked_again(move: Callable[[nn.Module], nn.Module], computed: list[int]) -> None:
    model, alone, made = merged("w8a8", (True, False, True))
    move(model)
    move(alone)
    alone.load_state_dict(model.state_dict())  # as memory that was just made holds anything
    x = X.to(model.q.bias.dtype)
    assert made.why_apart() is None
    found = model(x)
    assert computed == [81] and same(found, alone(x))


def test_a_part_that_moves_alone_leaves_the_others(computed: list[int]) -> None:
    model, alone, made = merged()
    model.v.to("meta")
    assert same((model.q(X), model.k(X)), (alone.q(X), alone.k(X))) and computed[:2] == [48, 16]
    assert made.why_apart() is not None


class Wrapper(nn.Module):
    """A low-rank adapter beside a linear."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 1  # type: ignore[no-any-return]


def test_a_wrapped_part_works_and_the_siblings_step_aside(computed: list[int]) -> None:
    model, alone, made = merged()
    model.q = Wrapper(model.q)
    expected = alone(X)
    computed.clear()
    q, k, v = model(X)
    assert same((q, k, v), (expected[0] + 1, *expected[1:]))
    assert computed == [48, 16, 17] and made.why_apart() == "q was replaced"
    model.q = model.q.base
    computed.clear()
    model(X)
    assert computed == [81]


def test_hooks_of_a_part_see_what_they_would_have_seen(computed: list[int]) -> None:
    model, alone, made = merged()
    seen: list[Tensor] = []
    handles = [
        model.k.register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
        model.k.register_forward_hook(lambda m, args, y: seen.append(y)),
    ]
    found = model(X)
    assert same(found, (alone.q(X), alone.k(X * 2), alone.v(X))) and same((seen[0],), (found[1],))
    assert computed[:3] == [48, 16, 17] and made.why_apart() == "k has hooks"
    for handle in handles:
        handle.remove()
    computed.clear()
    model(X)
    assert computed == [81]


def test_pruning_a_bias_parts_the_siblings(computed: list[int]) -> None:
    model, alone, made = merged("w8a8", (True, True, True))
    for each in (model, alone):
        prune.l1_unstructured(each.q, "bias", amount=0.5)
    assert same(model(X), alone(X)) and computed[:3] == [48, 16, 17]
    for each in (model, alone):
        prune.remove(each.q, "bias")
    assert same(model(X), alone(X)) and made.why_apart() is not None


def test_tensors_of_a_part_may_be_assigned_and_written_to(computed: list[int]) -> None:
    model, alone, made = merged("w8a8", (True, True, True))
    for each in (model, alone):
        each.v.weight[3:].neg_()
        each.q.bias.data.mul_(2)
    assert same(model(X), alone(X)) and computed[0] == 81
    for each in (model, alone):
        each.q.bias.data = each.q.bias.data * 2
    assert same(model(X), alone(X)) and made.why_apart() == "a bias was assigned"
    model, alone, made = merged()
    for each in (model, alone):
        each.k._buffers["weight_scale"] = each.k.weight_scale * 2  # behind the module's back
    assert same(model(X), alone(X)) and made.why_apart() == "a weight_scale was assigned"


def test_functional_call_computes_with_what_it_is_given() -> None:
    model, alone, made = merged()
    given = {"k.weight": -model.k.weight}
    expected = torch.func.functional_call(alone, given, (X,))
    assert same(torch.func.functional_call(model, given, (X,)), expected)
    assert made.why_apart() is None


def test_transforms_compute_each_linear_by_itself() -> None:
    model, alone, _ = merged()
    assert same(torch.func.vmap(model)(X), torch.func.vmap(alone)(X))


def test_linears_that_cannot_be_one_stay_apart() -> None:
    model = attention()
    model.k = SmoothQuantLinear.from_float(nn.Linear(32, 16), 0.1)
    assert Siblings(model, NAMES, [model.q, model.k, model.v]).why_apart() == "their tensors are not stacked"
    assert model(X)[1].shape == (2, 5, 16)
    assert isinstance(model.q, QuantizedLinear) and model.q._member.whole is None
