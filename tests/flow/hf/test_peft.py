"""LoRA on top of a quantized model trains; the integers stay."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch

import baracuda
from baracuda.flow import FlowError, quantize_checkpoint, verify

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16", "w4a8"])
def test_an_adapter_trains_beside_integer_linears(scheme: str, tmp_path: Path) -> None:
    models.save("llama", tmp_path / "model")
    group = {} if scheme == "w8a8" else {"group_size": 32}
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", scheme=scheme, **group)
    base = baracuda.load(tmp_path / "out")  # with merged siblings and fused norms, as anybody would
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    torch.manual_seed(0)
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=True)
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 2
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(models.prompt(), labels=models.prompt()).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.05
    after = {name.replace(".base_layer", ""): t for name, t in model.base_model.model.state_dict().items()}
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items()), "the model itself has changed"
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(baracuda.load(tmp_path / "out"), tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(again.eval()(models.prompt()).logits, model.eval()(models.prompt()).logits)


def test_an_adapter_is_not_merged_into_integers(tmp_path: Path) -> None:
    models.save("llama", tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out")
    model = peft.get_peft_model(baracuda.load(tmp_path / "out", fuse=False), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(FlowError, match="cannot be merged into QuantizedLinear"):
        model.merge_and_unload()


def test_a_model_under_an_adapter_is_not_saved_with_the_adapters_names(tmp_path: Path) -> None:
    models.save("llama", tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out")
    model = peft.get_peft_model(baracuda.load(tmp_path / "out"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(FlowError, match=r"q_proj\.base_layer: a linear under an adapter.*unload\(\)"):
        model.get_base_model().save_pretrained(tmp_path / "again")
    model.unload().save_pretrained(tmp_path / "again")
    assert verify(tmp_path / "again", tmp_path / "model") == []


def test_a_device_map_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    from transformers import LlamaForCausalLM

    models.save("llama", tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out")
    own, given = LlamaForCausalLM.from_pretrained, []
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", lambda *a, **o: given.append(o) or own(*a, **o))
    model = baracuda.load(tmp_path / "out", device_map={"": "cpu"}, fuse=False)
    assert given[0]["device_map"] == {"": "cpu"}
    with torch.no_grad():
        assert torch.equal(
            model(models.prompt()).logits, baracuda.load(tmp_path / "out", fuse=False)(models.prompt()).logits
        )
