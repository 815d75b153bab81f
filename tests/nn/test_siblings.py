"""Siblings computed as one: the bits of each alone, of what is the same input, and nothing kept."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from merged_attention import SCHEMES, X, merged, same

from baracuda.nn import traced

pytestmark = pytest.mark.usefixtures("inference")


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
