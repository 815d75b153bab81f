"""Siblings computed as one: the bits of each alone, and every way in which they come apart and together again."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import baracuda
from baracuda.nn import QuantizedLinear, SmoothQuantLinear, traced
from baracuda.nn.siblings import Siblings, siblings_of
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


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
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


# -- the same bits, once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biases", [(False, False, False), (True, False, True), (True, True, True)], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_column_has_the_bits_of_its_own_linear_and_all_are_computed_at_once(
    scheme: str, biases: tuple[bool, bool, bool], dtype: torch.dtype, computed: list[int]
) -> None:
    model, alone, _ = merged(scheme, biases)
    model.to(dtype)
    alone.to(dtype)
    for shape in ((32,), (1, 32), (2, 5, 32), (70, 32)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
        computed.clear()
        found = model(x)
        assert computed == [81]
        assert same(found, alone(x))


def test_a_missing_bias_changes_no_sign_of_a_zero() -> None:
    """A product that underflows to -0.0 stays that; adding 0.0 would make it 0.0."""
    model, alone, _ = merged("w8a8", (True, False, False))
    for each in (model, alone):
        each.k.weight_scale.fill_(1e-38)
    x = X * 1e-12
    assert bool(torch.signbit(alone(x)[1]).any()) and not bool(alone(x)[1].any())
    assert same(model(x), alone(x))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_compiled_into_one_graph_with_one_product(scheme: str) -> None:
    model, alone, _ = merged(scheme, (True, False, True))
    products: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        products.append(sum("_linear" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert same(compiled(X), alone(X)) and products == [1]
    assert traced._TRACED == {}
    model.k.weight = model.k.weight.clone()  # no longer among the stacked rows: compiled anew, each by itself
    model.k.weight.neg_()
    alone.k.weight.neg_()
    assert same(compiled(X), alone(X)) and products == [1, 3]


def test_one_compilation_serves_every_layer_of_a_kind() -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for _ in range(3):
        layer, alone, _ = merged()
        layer.compile(backend=backend, fullgraph=True)
        layer.v.weight.neg_()
        alone.v.weight.neg_()
        assert same(layer(X), alone(X))
    assert len(graphs) == 1


def test_inference_tensors_are_shared_too(computed: list[int]) -> None:
    model, alone, _ = merged()
    with torch.inference_mode():
        x = X + 0
        assert same(model(x), alone(x)) and computed == [81, 48, 16, 17]


def test_autocast_is_that_of_each_call(computed: list[int]) -> None:
    model, alone, _ = merged()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(X)
        assert found[0].dtype is torch.bfloat16 and computed == [81]
        q = model.q(X)
    assert q.dtype is torch.bfloat16 and model.k(X).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(found, alone(X))


# -- what is not the same input ----------------------------------------------------------------------------------


def test_a_tensor_that_was_written_to_is_another_input() -> None:
    model, alone, _ = merged()
    x = X.clone()
    q = model.q(x)
    x.add_(1)
    assert same((q, model.k(x)), (alone.q(X), alone.k(X + 1)))


def test_equal_tensors_are_not_the_same_tensor(computed: list[int]) -> None:
    model, alone, _ = merged()
    assert same((model.q(X), model.k(X.clone())), (alone.q(X), alone.k(X)))
    assert computed[:2] == [81, 81]


def test_gradients_flow_as_if_nothing_were_merged(computed: list[int]) -> None:
    model, alone, _ = merged("w8a8", (True, False, True))
    grads = []
    with torch.enable_grad():
        for each in (model, alone):
            x = X.clone().requires_grad_()
            sum(y.square().sum() for y in each(x)).backward()
            grads.append((x.grad, each.q.bias.grad))
        assert computed == [48, 16, 17] * 2
        assert same(*grads)  # type: ignore[arg-type]
        assert same(model(X), alone(X))  # a bias that learns
        assert computed == [48, 16, 17] * 4
        model.requires_grad_(False)
        model(X)
        assert computed[-1] == 81


def test_siblings_that_are_not_called_together_stop_computing_for_each_other(computed: list[int]) -> None:
    model, alone, _ = merged()
    for i in range(6):
        assert same((model.k(X + i),), (alone.k(X + i),))
    assert computed[::2] == [81, 81, 81, 16, 16, 16]
    computed.clear()
    model(X)  # together again: seen once, computed as one from then on
    model(X)
    assert computed == [48, 16, 17, 81]


def test_threads_do_not_take_each_others_results() -> None:
    model, alone, _ = merged()
    inputs = [X + i for i in range(4)]
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.no_grad():
            expected = alone(inputs[i])
            for _ in range(50):
                if not same(model(inputs[i]), expected):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- nothing is kept ---------------------------------------------------------------------------------------------


def test_no_activation_outlives_its_use() -> None:
    model, _, made = merged()
    model(X)
    assert made.thread.entry is None
    x = X.clone()
    model.q(x)  # the others are never called
    assert made.thread.entry.parts is not None
    del x
    assert made.thread.entry.parts is None


def test_a_model_is_freed_without_the_garbage_collector() -> None:
    model, _, made = merged()
    model(X)
    gone = [weakref.ref(model), weakref.ref(model.q), weakref.ref(made), weakref.ref(model.q._member.whole)]
    gc.collect()
    gc.disable()
    try:
        del model, made
        assert [ref() for ref in gone] == [None] * 4
    finally:
        gc.enable()


def test_rows_are_held_once() -> None:
    model, alone, _ = merged("w8a8", (True, False, True))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.buffers()}
    assert sum(storages.values()) == sum(t.nbytes for t in alone.buffers())


# -- the parts as modules ----------------------------------------------------------------------------------------


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
