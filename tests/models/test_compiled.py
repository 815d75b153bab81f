"""The decode step of `generate` with a static cache: one graph, compiled once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters

import baracuda
from baracuda.models import fuse_producers, merge_siblings

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SCHEMES: dict[str, Any] = {
    "w8a8": {},
    "w4a8": {},
    "w8a8-asymmetric": {},
    "w8a8-smoothquant": {"static": True},
    "w4a16": {},
}


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def llama(scheme: str, *, merge: bool = True, fuse: bool = False) -> Any:
    model = models.build("llama")
    options: dict[str, Any] = {}
    if scheme == "w4a16":
        models.pack(model)
        assert not merge or len(merge_siblings(model).merged) == 4
        assert not fuse or len(fuse_producers(model).fused) == 7
        return model
    if SCHEMES[scheme].get("static"):
        linears = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
        options["input_scales"] = dict.fromkeys(linears, 0.05)
    report = baracuda.quantize_model(model, scheme, ignore=["lm_head"], merge=merge, fuse=fuse, **options)
    assert len(report.merged) == (4 if merge else 0)
    assert len(report.fused) == (7 if fuse else 0)
    return model


def generated(model: Any, batch: int, compiled: bool, backend: str = "inductor") -> torch.Tensor:
    ids = models.prompt()[:1, :7].expand(batch, -1)
    config = transformers.CompileConfig(fullgraph=True, backend=backend)
    config._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": config} if compiled else {}
    result: torch.Tensor = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, min_new_tokens=8, do_sample=False, **options
    )
    return result


@pytest.mark.parametrize("fuse", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_decode_step_is_one_graph_that_is_compiled_once(scheme: str, fuse: bool) -> None:
    """In full, so that a graph break raises; eight steps, and the graphs of one."""
    model = llama(scheme, fuse=fuse)
    expected = generated(model, 1, compiled=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = generated(model, 1, compiled=True, backend="aot_eager")
    assert torch.equal(found, expected)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_merged_siblings_leave_four_products_a_layer() -> None:
    products = {}
    for merge in (True, False):
        torch._dynamo.reset()
        graphs: list[torch.fx.GraphModule] = []

        def backend(graph: Any, _: Any, mode: str, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        model = llama("w8a8", merge=merge)
        tokens = generated(model, 2, compiled=True, backend=backend)  # type: ignore[arg-type]
        (graph,) = graphs
        products[merge] = sum("quantized_linear" in str(node.target) for node in graph.graph.nodes), tokens
    assert (products[True][0], products[False][0]) == (8, 14)
    assert torch.equal(products[True][1], products[False][1])


def guards_of(model: Any) -> str:
    """What compiled code checks before each step, while the device waits."""
    torch._dynamo.reset()
    generated(model, 1, compiled=True, backend="eager")
    texts, function = [], type(model).forward
    while function is not None:
        texts += [str(entry.guard_manager) for entry in _debug_get_cache_entry_list(function.__code__)]
        function = getattr(function, "__wrapped__", None)
    (text,) = texts
    return text


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_a_step_checks_no_more_tensors_one_by_one_than_that_of_the_float_model(scheme: str) -> None:
    """Buffers of modules that torch.compile does not know are compared with each other before each step."""
    floats, quantized = guards_of(models.build("llama")), guards_of(llama(scheme, fuse=True))
    assert floats.count("NO_TENSOR_ALIASING") == quantized.count("NO_TENSOR_ALIASING") > 0
    read = set(re.findall(r"source=G\['__import_(baracuda[^']*)", quantized))
    # Which calls of attention a kernel takes: once for all layers.
    attention = {"baracuda_dot_backends_dot_attention", "baracuda_dot_backends_dot_cpu_dot_attention"}
    assert {name.split("_dot_")[1] for name in read - attention} == {"nn"}, "a trace reads no tables of the library"


def test_inductor_compiles_it() -> None:
    model = llama("w8a8")
    assert torch.equal(generated(model, 1, compiled=True), generated(model, 1, compiled=False))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
