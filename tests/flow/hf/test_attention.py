"""Attention of transformers models by our kernel: who takes it, the same text, one answer, what stays with torch."""

from __future__ import annotations

import copy
import html
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import models
import pytest
import torch

import baracuda
from baracuda.dispatch.attention import attention as dispatched
from baracuda.flow import quantize_checkpoint
from baracuda.models import fuse_producers
from baracuda.nn import attention
from baracuda.nn.attention import FASTER, MARK, ORDERED

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
FUNCTION: Any = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the queries that our kernel computes."""
    seen: list[tuple[int, ...]] = []

    def attend(query: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.append(tuple(query.shape))
        return kernel(query, *args)

    kernel = attention.attend
    monkeypatch.setattr(attention, "attend", attend)
    return seen


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("attention")
    models.save("llama", directory / "model")
    quantize_checkpoint(directory / "model", directory / "out")
    return directory / "out"


def generated(model: Any, ids: torch.Tensor = IDS, **options: Any) -> Any:
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, **(given | options), output_logits=True, return_dict_in_generate=True)


def test_a_loaded_model_computes_with_our_kernel_and_says_the_same(checkpoint: Path, calls: list[Any]) -> None:
    ours, torchs = baracuda.load(checkpoint), baracuda.load(checkpoint, attn_implementation="sdpa")
    assert ours.config._attn_implementation == "sdpa"  # a name that models compare
    assert not fuse_producers(torchs).attention
    calls.clear()
    expected = generated(torchs)
    assert not calls
    made = generated(ours)
    prompt, token = (1, 4, IDS.shape[1], 16), (1, 4, 1, 16)
    assert set(calls) == {prompt, token} and calls.count(prompt) == 2 and calls.count(token) == 2 * 5  # by layers
    assert torch.equal(made.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(made.logits), torch.stack(expected.logits), rtol=1e-3, atol=1e-3)
    calls.clear()
    generated(baracuda.load(checkpoint, fuse=False))
    assert not calls


@pytest.mark.parametrize("name", sorted(set(models.CONFIGS) - {"bert", "gpt2"}))
def test_every_architecture_says_the_same(name: str, calls: list[Any]) -> None:
    model = models.build(name)
    baracuda.quantize_model(model)
    expected = generated(model)
    before = model.config._attn_implementation
    report = fuse_producers(model)
    made = generated(model)
    assert bool(calls) is bool(report.attention)
    # transformers 5.0 gives OPT a mask of floats and Gemma 2 a cap of the scores, which torch's attention ignores.
    assert calls or before != "sdpa" or (name in ("opt", "gemma2") and transformers.__version__ < "5.2")
    assert torch.equal(made.sequences, expected.sequences)


def test_a_batch_with_padding_decodes_to_the_text_of_each_alone(checkpoint: Path, calls: list[Any]) -> None:
    model = baracuda.load(checkpoint)
    alone = generated(model).sequences[0, IDS.shape[1] :]
    ids = torch.tensor([[0, 0, 0, *IDS[0].tolist()], list(range(20, 30))])
    both = generated(model, ids, attention_mask=(ids != 0).long()).sequences
    assert (2, 4, 1, 16) in calls
    assert torch.equal(both[0, ids.shape[1] :], alone)


def test_the_report_names_it_and_a_second_pass_changes_nothing() -> None:
    model = models.build("llama")
    report = baracuda.quantize_model(model, fuse=True)
    assert list(report.attention) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    said = "is computed by baracuda's kernel"
    assert f"attention: {said}" in str(report) and said in html.unescape(report._repr_html_())
    assert fuse_producers(model).attention == report.attention
    assert not fuse_producers(models.build("llama")).attention  # nothing of it is quantized
    chosen = models.build("llama", attn_implementation="eager")
    assert not baracuda.quantize_model(chosen, fuse=True).attention


def test_saved_and_copied_models_load_anywhere(checkpoint: Path, tmp_path: Path) -> None:
    model = baracuda.load(checkpoint)
    model.save_pretrained(tmp_path / "saved")
    with models.transformers_alone():
        theirs = type(model).from_pretrained(tmp_path / "saved")
    assert MARK not in vars(theirs.model.layers[0].self_attn)
    copied = copy.deepcopy(model)
    assert vars(copied.model.layers[0].self_attn)[MARK] == FASTER
    assert torch.equal(generated(copied).sequences, generated(model).sequences)


def test_another_model_of_the_same_config_keeps_its_own() -> None:
    teacher = models.build("llama")
    student = type(teacher)(teacher.config).eval()
    before = teacher(IDS).logits
    baracuda.deterministic(student)
    assert torch.equal(teacher(IDS).logits, before) and MARK not in vars(teacher.model.layers[0].self_attn)


def test_what_is_out_of_the_ordinary_is_torchs(checkpoint: Path, calls: list[Any]) -> None:
    query, key = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 5, 16)
    module: Any = torch.nn.Module()
    module.num_key_value_groups = 2

    def differs(q: torch.Tensor = query, k: torch.Tensor = key, **options: Any) -> bool:
        calls.clear()
        FUNCTION(module, q, k, k, options.pop("mask", None), **options)
        return not calls

    assert differs()
    module.__dict__[MARK] = FASTER

    assert not differs() and not differs(scaling=0.5) and not differs(mask=torch.ones(1, 1, 1, 5, dtype=torch.bool))
    assert not differs(query.expand(1, 4, 2, 16)) and differs(query.double(), key.double()) and differs(dropout=0.5)
    assert differs(mask=torch.zeros(1, 1, 1, 5)) and differs(mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))
    assert differs(query, key.expand(3, 2, 5, 16))
    assert differs(torch._neg_view(query)) and differs(query, torch._neg_view(key))
    assert differs(query.clone().requires_grad_())
    with torch.no_grad():
        assert not differs(query.clone().requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        assert differs()
    with suppress(ValueError):  # of newer transformers: torch's attention knows none
        assert differs(softcap=30.0)
    assert not calls
    assert differs(position_bias=torch.zeros(1, 4, 1, 5))


def test_prompts_in_bf16_stay_with_torch_where_the_cpu_has_a_matrix_unit(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, calls: list[Any]
) -> None:
    monkeypatch.setattr("baracuda.backends.cpu.attention.HAS_MATRIX_UNIT", True)
    generated(baracuda.load(checkpoint, dtype=torch.bfloat16))
    assert set(calls) == {(1, 4, 1, 16)}
    generated(baracuda.load(checkpoint, dtype=torch.float32))
    assert (1, 4, IDS.shape[1], 16) in calls


class Graphs(list[Any]):
    """A backend of torch.compile that computes eagerly; the graphs that it was given."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.append(graph)
        return graph

    def kernels(self) -> int:
        """How often our kernel is in the graphs."""
        return sum(node.target is dispatched for graph in self for node in graph.graph.nodes)


@pytest.mark.parametrize("tokens", [1, 7])
def test_a_compiled_step_is_one_graph_with_our_kernel_in_it(checkpoint: Path, tokens: int) -> None:
    model, graphs = baracuda.load(checkpoint), Graphs()
    with torch.no_grad():
        compiled = torch.compile(model.forward, backend=graphs, fullgraph=True)(IDS[:, :tokens]).logits
        torch.testing.assert_close(compiled, model(IDS[:, :tokens]).logits, rtol=1e-3, atol=1e-3)
    assert len(graphs) == 1 and graphs.kernels() == 2
    embedded = torch.randn(1, tokens, model.config.hidden_size, requires_grad=True)
    torch.compile(model.forward, backend=graphs, fullgraph=True)(inputs_embeds=embedded)
    assert len(graphs) == 2 and graphs.kernels() == 2  # with gradients it is torch's


def test_the_operator_is_sound_and_its_values_are_the_kernels() -> None:
    query, key = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 9, 16)
    mask, half = torch.rand(1, 1, 5, 9) > 0.3, key.bfloat16()
    for given in ((query, key, key, mask, 0.5, False), (query.bfloat16(), half, half, None, None, True)):
        torch.library.opcheck(dispatched, given)
        assert torch.equal(dispatched(*given), attention.attend(*given))
    negated = torch._neg_view(query)
    assert torch.equal(dispatched(negated, key, key, None, None, False), attention.attend(-query, key, key, None, None))


# -- one answer ----------------------------------------------------------------------------------------------------


def test_a_deterministic_model_gives_a_row_the_same_bits_alone_padded_and_step_by_step() -> None:
    model = models.build("llama")
    report = baracuda.deterministic(model, quantize_head=True)
    for name in ("model.layers.0.self_attn (attention)", "model.layers.1.self_attn (attention)"):
        assert "has one order" in report.replaced[name] and name not in report.dependent
    ids = torch.randint(3, 150, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = model(ids).logits
        for i in range(3):
            assert torch.equal(model(ids[i : i + 1]).logits[0], whole[i])
        # One token after the other, with a cache, as a server decodes what a trainer reads at once.
        cache = transformers.DynamicCache(config=model.config)
        steps = [model(ids[:1, t : t + 1], past_key_values=cache).logits[0] for t in range(40)]
        assert torch.equal(torch.cat(steps), whole[0])
        # Beside longer rows, behind padding.
        padded = torch.cat([torch.zeros(1, 9, dtype=torch.long), ids[:1]], 1)
        batch = torch.cat([padded, torch.randint(3, 150, (2, 49))])
        mask = torch.ones_like(batch)
        mask[0, :9] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        behind = model(batch, attention_mask=mask, position_ids=positions).logits[0, 9:]
        assert torch.equal(behind, whole[0])


def test_ordered_attention_has_torchs_gradients_and_our_value() -> None:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(2, heads, 9, 16, generator=generator) for heads in (4, 2, 2)]
    ours, theirs = ([x.clone().requires_grad_() for x in made] for _ in range(2))
    module: Any = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    expected = FUNCTION(module, *theirs, None)[0]
    module.__dict__[MARK] = ORDERED
    out = FUNCTION(module, *ours, None)[0]
    weights = torch.randn(out.shape, generator=generator)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.equal(out.detach(), attention.attend(*made, None, None, True))
    torch.testing.assert_close(out.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_ordered_attention_says_where_it_must_leave_a_call_to_torch() -> None:
    query = torch.randn(1, 2, 3, 16)
    module: Any = torch.nn.Module()
    module.__dict__[MARK] = ORDERED
    with pytest.warns(RuntimeWarning, match=r"a mask of bools .* got torch.float32"):
        FUNCTION(module, query, query, query, torch.zeros(1, 1, 3, 3))
    with pytest.warns(RuntimeWarning, match="dropout"):
        FUNCTION(module, query, query, query, None, dropout=0.1)


def test_modules_whose_calls_the_kernel_does_not_take_keep_torchs_and_are_named() -> None:
    """T5 adds a bias to its scores."""
    config = transformers.T5Config(
        vocab_size=160, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    if model.config._attn_implementation != "sdpa":
        pytest.skip("this transformers has no attention of torch's for T5")
    report = baracuda.deterministic(model)
    mine = [name for name, module in model.named_modules() if vars(module).get(MARK) == ORDERED]
    assert not any("SelfAttention" in name for name in mine)
    assert "the library splits" in report.dependent["encoder.block.0.layer.0.SelfAttention (attention)"]
    ids = torch.arange(3, 9)[None]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(input_ids=ids, decoder_input_ids=ids)


def test_a_deterministic_model_is_traced_whole_with_the_same_bits() -> None:
    model, graphs = models.build("llama"), Graphs()
    baracuda.deterministic(model, quantize_head=True)
    compiled = torch.compile(model.forward, backend=graphs, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(IDS).logits, model(IDS).logits)
    assert len(graphs) == 1 and graphs.kernels() == 2
    learned = compiled(IDS).logits
    assert torch.equal(learned, model(IDS).logits)
    learned.sum().backward()
