"""Small random models of the architectures people quantize, with the outlier channels that make quantizing hard."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from baracuda.flow.checkpoint.tensorfile import write_tensors
from baracuda.flow.hf.packed import PackedLinear
from baracuda.flow.hf.skeleton import quiet

VOCABULARY = 160
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2}
_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

#: Model -> its config class and sizes.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "qwen2": ("Qwen2Config", _GROUPED),
    "qwen3": ("Qwen3Config", {**_GROUPED, "head_dim": 16}),
    "gemma": ("GemmaConfig", {**_GROUPED, "num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": ("Gemma2Config", {**_GROUPED, "head_dim": 16}),
    "opt": (
        "OPTConfig",
        {**_SIZES, **_TOKENS, "ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
    ),
    "gpt2": ("GPT2Config", {**_TOKENS, "vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "mixtral": ("MixtralConfig", {**_GROUPED, "num_local_experts": 4}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_GROUPED, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4},
    ),
    "bert": ("BertConfig", _SIZES),
}


def build(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    """The model with norms away from one and a few channels far out, biases away from zero."""
    import transformers

    kind, sizes = CONFIGS[name]
    torch.manual_seed(sum(map(ord, name)))
    with quiet():
        config = getattr(transformers, kind)(**{**sizes, **settings})
        auto = transformers.AutoModel if name == "bert" else transformers.AutoModelForCausalLM
        model: nn.Module = auto.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key.lower() or ".ln_" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
                if parameter.numel() == 64:
                    parameter[:3] += 8
            elif parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def pack(model: nn.Module) -> None:
    """Replace all linears but the head by weight-only ones, which hold random 4-bit weights in groups, in place."""
    torch.manual_seed(1)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            made = PackedLinear(
                module.in_features, module.out_features, module.bias is not None, 16, dtype=module.weight.dtype
            )
            made.weight_packed.random_(-(2**31), 2**31)
            made.weight_scale.uniform_(0.005, 0.02)
            made.bias = module.bias
            made.make_ready(name)
            model.set_submodule(name, made)


def save(
    name: str, directory: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB", **settings: Any
) -> nn.Module:
    model = build(name, dtype, **settings)
    with quiet():
        model.save_pretrained(directory, max_shard_size=shard)
    return model


@contextmanager
def transformers_alone() -> Iterator[None]:
    """transformers, quiet, with its own reader of compressed-tensors: baracuda gives way to it."""
    before = os.environ.get("BARACUDA_TRANSFORMERS")
    os.environ["BARACUDA_TRANSFORMERS"] = "0"
    try:
        with quiet():
            yield
    finally:
        del os.environ["BARACUDA_TRANSFORMERS"]
        if before is not None:
            os.environ["BARACUDA_TRANSFORMERS"] = before


def since(major: int, minor: int) -> bool:
    """Whether transformers is of this version or newer, for what is said of some of its versions."""
    import transformers

    from baracuda.core.versions import minor as numbers

    return (numbers(transformers.__version__) or (99, 0)) >= (major, minor)


def needs_readable_experts() -> None:
    """Skip a test that loads quantized experts where that raises, as `test_load` looks at."""
    if not since(5, 8):
        pytest.skip("transformers before 5.8 asks no quantizer how experts are stored; baracuda.load raises there")


def tokens(path: Path, sequences: int = 12, length: int = 24) -> Path:
    """A file of token sequences to calibrate with."""
    generator = torch.Generator().manual_seed(3)
    write_tensors(path, {"tokens": torch.randint(3, VOCABULARY, (sequences, length), generator=generator)})
    return path


def prompt() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(5))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """The distance of b from a, in units of a's size."""
    return float((a.double() - b.double()).norm() / a.double().norm())


def plain_checkpoint(directory: Path, shards: int = 2, layers: int = 3, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Weights without a model, for what needs none: unknown to transformers, with tokenizer-like files beside it."""
    import json

    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(7)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        tensors = {}
        for layer in range(layers):
            stem = f"model.layers.{shard * layers + layer}"
            tensors[f"{stem}.mlp.up_proj.weight"] = torch.randn(96, 64, generator=generator).to(dtype)
            tensors[f"{stem}.mlp.down_proj.weight"] = torch.randn(64, 96, generator=generator).to(dtype)
            tensors[f"{stem}.mlp.up_proj.bias"] = torch.randn(96, generator=generator).to(dtype)
            tensors[f"{stem}.norm.weight"] = torch.ones(64, dtype=dtype)
        if shard == 0:
            tensors["model.embed_tokens.weight"] = torch.randn(50, 64, generator=generator).to(dtype)
        write_tensors(directory / file, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps({"model_type": "nobody-knows", "torch_dtype": "bfloat16"}))
    (directory / "tokenizer.json").write_text('{"a": 1}')
    (directory / "sub").mkdir()
    (directory / "sub" / "settings.json").write_text("{}")
    (directory / "pytorch_model.bin").write_bytes(b"a pickle nobody may open")
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    """Every byte of a result, but for the timings in its report and the page drawn from it."""
    import json

    files = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != "baracuda_report.html":
            data = path.read_bytes()
            if path.name == "baracuda_report.json":
                report = json.loads(data)
                del report["run"]
                data = json.dumps(report).encode()
            if path.name == "baracuda.sha256":
                data = b"".join(line for line in data.splitlines(True) if b"baracuda_report." not in line)
            files[str(path.relative_to(directory))] = data
    return files


def reseal(directory: Path) -> None:
    """Write the checksums of a checkpoint anew, as somebody would who wants a change to go unnoticed."""
    from baracuda.flow.checkpoint.manifest import manifest

    (directory / "baracuda.sha256").write_text(manifest(directory, ".baracuda"))


def save_built(build: Callable[[], nn.Module], directory: Path) -> nn.Module:
    """A model that transformers made, as it saves it."""
    torch.manual_seed(1)
    with quiet():
        model = build().eval()
        model.save_pretrained(directory)  # type: ignore[operator]
    return model


def word_tokenizer(**options: Any) -> Any:
    """A fast tokenizer with a word for each token: w0, w1, ..."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, **options)


def quantized(folder: Path, name: str = "llama", source: str = "model", words: bool = False, **options: Any) -> Path:
    """A folder with a model (`words`: and its tokenizer), tokens, and in `out` what the options make of the model."""
    from baracuda.flow import quantize_checkpoint

    save(name, folder / source)
    if words:
        word_tokenizer().save_pretrained(folder / source)
    tokens(folder / "tokens.safetensors")
    quantize_checkpoint(folder / source, folder / "out", **options)
    return folder


def change_json(path: Path, **settings: Any) -> None:
    import json

    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
