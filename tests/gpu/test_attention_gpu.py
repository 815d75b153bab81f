"""Attention on a real GPU: near f64, one answer for a row, and a decode step that takes the kernel inside its graph."""

from __future__ import annotations

import attending
import models
import pytest
import torch

import baracuda
from baracuda.backends.attention import declines
from baracuda.flow.hf.measure import forget_compiled
from baracuda.nn.attention import MARK

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", attending.TYPES, ids=str)
@pytest.mark.parametrize("shape", [*attending.SHAPES, (64, 8, 4, 1, 4096, 128, 128)], ids=str)
def test_it_is_near_torch_in_f64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    attending.assert_near_f64(shape, dtype, DEVICE)


@pytest.mark.parametrize("dtype", attending.TYPES, ids=str)
def test_a_row_has_the_same_bits_alone_padded_and_after_a_prompt(dtype: torch.dtype) -> None:
    attending.assert_one_answer(dtype, DEVICE, 2000)


def test_strided_operands_give_the_bits_of_dense_ones() -> None:
    attending.assert_strides_do_not_matter(DEVICE)


def test_special_values_end_as_in_torch() -> None:
    attending.assert_special_values(DEVICE)


def test_what_the_kernel_declines() -> None:
    q, k, v = attending.operands((1, 2, 2, 1, 9, 64, 64), torch.bfloat16, DEVICE)
    assert declines(q, k, v, None) is None
    assert "f16 or bf16" in str(declines(q.float(), k.float(), v.float(), None))
    wide = torch.zeros(1, 1, 1, 512, device=DEVICE, dtype=torch.bfloat16)
    assert "256" in str(declines(wide, wide, wide, None))
    assert "mask of bools" in str(declines(q, k, v, torch.zeros(1, 1, 1, 9, device=DEVICE)))


def test_a_compiled_decode_step_takes_the_kernel_and_an_eager_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from baracuda.backends.triton.attention import kernels, launch

    model = models.build("llama", torch.bfloat16).cuda()
    report = baracuda.quantize_model(model, ignore=["lm_head"], fuse=True)
    assert "inside torch.compile" in report.attention["model.layers.0.self_attn"]
    launched = []

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            launched.append(grid)
            return kernels.attend[grid]

    monkeypatch.setattr(launch, "kernels", type("K", (), {"attend": Recorded(), "merge": kernels.merge}))
    ids = models.prompt()[:2, :7].cuda()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    texts = []
    with torch.no_grad():
        for marked in (True, False):
            for module in model.modules():
                if not marked:
                    module.__dict__.pop(MARK, None)
            texts.append(model.generate(ids, **options))
            assert not launched
            texts.append(model.generate(ids, cache_implementation="static", **options))
            assert bool(launched) is marked
            launched.clear()
            forget_compiled(model)
    agreement = (texts[1] == texts[3]).float().mean()
    assert agreement > 0.8, agreement  # a tie of two tokens may break either way


def test_deterministic_attention_gives_a_sequence_the_same_logits_in_any_batch() -> None:
    model = models.build("llama", torch.bfloat16).cuda()
    found = baracuda.deterministic(model, quantize_head=True)
    assert "padding on the left" in found.replaced["model.layers.0.self_attn (attention)"]
    ids = models.prompt().cuda()
    with torch.no_grad():
        together = model(ids).logits
        for i in range(len(ids)):
            assert torch.equal(model(ids[i : i + 1]).logits[0], together[i])
        cache = None
        for t in range(ids.shape[1]):  # token by token
            out = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            assert torch.equal(out.logits[:, 0], together[:, t]), t
