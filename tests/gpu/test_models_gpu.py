"""Models on a GPU: merged siblings have the bits of each alone, and the decode step is one CUDA graph."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from torch._dynamo.utils import counters

import baracuda
from baracuda.flow.hf.measure import forget_compiled, step_seconds
from baracuda.nn.siblings import siblings_of

utils = pytest.importorskip("transformers.generation.utils")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
SCHEMES = ["w8a8", "w4a8", "w8a8-asymmetric", "w8a8-smoothquant"]


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def quantized(scheme: str, *, merge: bool = True) -> Any:
    model = models.build("llama", torch.bfloat16).cuda()
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    scales = {"input_scales": dict.fromkeys(names, 0.05)} if "smoothquant" in scheme else {}
    report = baracuda.quantize_model(model, scheme, ignore=["lm_head"], merge=merge, **scales)
    assert len(report.merged) == (4 if merge else 0)
    return model


@pytest.mark.parametrize("scheme", SCHEMES)
def test_merged_linears_have_the_bits_of_each_alone(scheme: str) -> None:
    merged, alone = quantized(scheme), quantized(scheme, merge=False)
    for rows in (1, 3, 16, 64, 300):
        x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16)
        for mine, theirs in zip(merged.model.layers, alone.model.layers, strict=True):
            for name in ("q_proj", "k_proj", "v_proj"):
                assert torch.equal(getattr(mine.self_attn, name)(x), getattr(theirs.self_attn, name)(x))
            assert torch.equal(mine.mlp.gate_proj(x), theirs.mlp.gate_proj(x))
            assert torch.equal(mine.mlp.up_proj(x), theirs.mlp.up_proj(x))


def test_siblings_are_merged_inside_a_captured_graph() -> None:
    model, alone = quantized("w8a8"), quantized("w8a8", merge=False)
    layers = model.model.layers[0].self_attn, alone.model.layers[0].self_attn
    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    for attention in layers:
        attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [layers[0].q_proj(x), layers[0].k_proj(x), layers[0].v_proj(x)]
    x.copy_(torch.randn_like(x))
    graph.replay()
    expected = [layers[1].q_proj(x), layers[1].k_proj(x), layers[1].v_proj(x)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_graph_break_no_recompilation_and_no_skipped_cuda_graph(
    scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = quantized(scheme)
    ids = models.prompt()[:1].cuda()
    with caplog.at_level(logging.WARNING, "torch._inductor"), torch._dynamo.config.patch(error_on_recompile=True):
        step_seconds(model, ids, 10, compiled=True)
    assert not [r.getMessage() for r in caplog.records if "skipping cudagraphs" in r.getMessage().lower()]
    assert counters["inductor"]["cudagraph_skips"] == 0 and not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


def test_stacked_weights_are_static_inputs_of_the_graph() -> None:
    """Inputs that are not static are copied before each replay."""
    model = quantized("w8a8")
    step_seconds(model, models.prompt()[:1].cuda(), 6, compiled=True)
    wholes = [siblings.members()[0]._member.whole for m in model.modules() for siblings in siblings_of(m)]  # type: ignore[union-attr]
    tensors = [t for whole in wholes if whole is not None for t in whole.buffers()]
    assert len(tensors) == 8 and all(getattr(t, "_dynamo_static_input_type", None) for t in tensors)


@pytest.mark.skipif(not hasattr(utils, "DeferredStopCheck"), reason="transformers before 5.17 checks in time")
@pytest.mark.parametrize("batch", [1, 3])
def test_a_late_check_gives_the_tokens_of_one_in_time(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("w8a8")
    ids = models.prompt()[:batch, :7].cuda()
    made = []
    check = utils.DeferredStopCheck.__init__
    monkeypatch.setattr(utils.DeferredStopCheck, "__init__", lambda *a, **k: (made.append(a), check(*a, **k))[1])

    def generated(**options: Any) -> torch.Tensor:
        given = {
            "max_new_tokens": 12,
            "do_sample": False,
            "pad_token_id": 0,
            "cache_implementation": "static",
            **options,
        }
        tokens: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
        return tokens

    free = generated()
    assert len(made) == 1
    for end in (0, 5, 11):
        eos = {"eos_token_id": sorted({int(row[7 + end]) for row in free})}
        late = generated(**eos)
        with monkeypatch.context() as patch:
            patch.setenv("BARACUDA_TRANSFORMERS", "0")
            count = len(made)
            assert torch.equal(late, generated(**eos)) and len(made) == count
    forget_compiled(model)


@pytest.mark.skipif(not hasattr(utils, "DeferredStopCheck"), reason="transformers before 5.17 checks in time")
def test_the_host_does_not_wait_for_a_token() -> None:
    model = quantized("w8a8")
    ids = models.prompt()[:1, :7].cuda()
    step_seconds(model, ids, 8, compiled=True)
    waits = []
    for tokens in (8, 24):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                step_seconds(model, ids, tokens, compiled=True)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(w.message) for w in caught))
    assert waits[0] == waits[1], waits
