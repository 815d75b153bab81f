"""Checkpoints small enough for a server on a CPU, and vLLM and baracuda.load asked for the same tokens."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import models
import torch

import baracuda
from baracuda.flow import quantize_checkpoint

#: Attention on vLLM's CPU build wants heads of 32, its 4-bit kernel columns and rows in multiples of 32.
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
#: Layers of all kinds beside each other, in the group sizes that every server takes.
RECIPE: dict[str, Any] = {
    "scheme": "w8a8",
    "layers": [
        {"match": "*.o_proj", "scheme": "w4a16", "group_size": 32},
        {"match": "*.down_proj", "scheme": "w4a8", "group_size": 128},
        {"match": "re:.*(gate|up)_proj", "scheme": "w4a16", "group_size": 64},
    ],
}
#: Every scheme that is written; those behind True need calibration.
SCHEMES: dict[str, tuple[dict[str, Any], bool]] = {
    "w8a8": ({"scheme": "w8a8"}, False),
    "w8a8-static": ({"scheme": "w8a8", "activations": "static"}, True),
    "smoothquant": ({"scheme": "w8a8-smoothquant"}, True),
    "smoothquant-static": ({"scheme": "w8a8-smoothquant", "activations": "static"}, True),
    "w4a16": ({"scheme": "w4a16", "group_size": 32}, False),
    "w4a8": ({"scheme": "w4a8", "group_size": 32}, False),
    "recipe": ({"recipe": RECIPE}, False),
}
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [20, 21, 22, 23, 24], [150, 3, 90])
NEW_TOKENS = 6


@dataclass
class Answer:
    """What a model says to a prompt: its tokens, and the log-probabilities of the likeliest at each step."""

    tokens: list[int]
    likely: list[dict[int, float]]


def checkpoint(name: str, scheme: str, directory: Path, experts: bool = True) -> Path:
    """A quantized model, with a tokenizer whose words are `w3`, `w4` and so on; made once for a directory.

    Without `experts` those of a mixture stay float: vLLM's kernels for quantized ones need a GPU, or a CPU with AMX.
    """
    source, out = directory / name, directory / f"{name}-{scheme}{'' if experts else '-float-experts'}"
    if not source.exists():
        models.save(name, source, **SIZES)
        tokenizer().save_pretrained(source)
        models.tokens(directory / "tokens.safetensors")
    if not out.exists():
        options, calibrated = SCHEMES[scheme]
        calibration = directory / "tokens.safetensors" if calibrated else None
        ignore = () if experts else ("*.experts.*",)
        quantize_checkpoint(source, out, calibration=calibration, ignore=ignore, allow_float=True, **options)
    return out


def with_float_activations(out: Path) -> Path:
    """A checkpoint of the same weights whose config leaves the activations of 4-bit weights in floating point."""
    copy = out.with_name(f"{out.name}-float-activations")
    if not copy.exists():
        shutil.copytree(out, copy)
        config = json.loads((copy / "config.json").read_text())
        for group in config["quantization_config"]["config_groups"].values():
            if group["weights"]["num_bits"] == 4:
                group["input_activations"] = None
        (copy / "config.json").write_text(json.dumps(config))
    return copy


def tokenizer() -> Any:
    return models.word_tokenizer(unk_token="w0", eos_token="w2")


@contextmanager
def served(out: Path, **options: Any) -> Iterator[Any]:
    """vLLM's engine over a checkpoint, in this process."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64, "max_num_seqs": 4, **options}
    llm = LLM(model=str(out), skip_tokenizer_init=True, disable_log_stats=True, **settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()  # now: an engine collected later would end the groups of the next one
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def answers(llm: Any) -> list[Answer]:
    """Greedy, with log-probabilities."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=5, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    found = [request.outputs[0] for request in llm.generate(prompts, greedy, use_tqdm=False)]
    return [
        Answer(list(one.token_ids), [{token: p.logprob for token, p in step.items()} for step in one.logprobs])
        for one in found
    ]


#: How far log-probabilities may be apart by the order of float sums alone, and where one activation was rounded the
#: other way: it lay so near to the middle of two integers, or of two experts, that a last bit decided.
TOLERANCES = {torch.float32: (2e-5, 0.01), torch.bfloat16: (0.05, 0.2)}


@cache
def int8_sums_saturate() -> bool:
    """Whether vLLM's own int8 kernel is wrong on this CPU: without VNNI, oneDNN adds pairs of products in 16 bits."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    x, weight, scale = torch.full((2, 64), 127, dtype=torch.int8), torch.full((64, 16), 127), torch.ones(16, 1)
    columns = weight.to(torch.int8).t().contiguous().t()
    product = ops.create_onednn_scaled_mm(columns, scale, torch.float32, True, False)
    out = ops.onednn_scaled_mm(product, x, torch.empty(2, 16), torch.ones(2, 1), None, None, None)
    return not torch.equal(out, torch.full_like(out, 64 * 127 * 127))


def assert_near(out: Path, given: Sequence[Answer], dtype: torch.dtype = torch.float32) -> None:
    """`baracuda.load` gives these answers: up to the order of sums, to one of the prompts up to a rounding."""
    *most, last = sorted(distances(out, given, dtype))
    near, far = TOLERANCES[dtype]
    print(f"{out.name} in {dtype}: log-probabilities at most {most[-1]:.1e} apart, {last:.1e} after one of the prompts")
    assert most[-1] < near and last < far


def distances(out: Path, given: Sequence[Answer], dtype: torch.dtype = torch.float32) -> list[float]:
    """How far the log-probabilities of `baracuda.load` are from those given, at most, for each prompt; in float32 with
    the same tokens.

    In fewer bits the two likeliest tokens can change places: each given one must then be as likely as ours.
    """
    model, found = baracuda.load(out, dtype=dtype, fuse=False), []
    for prompt, answer in zip(PROMPTS, given, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer.tokens[:-1]]])).logits[0, len(prompt) - 1 :]
        ours = logits.double().log_softmax(-1)
        assert dtype is not torch.float32 or ours.argmax(-1).tolist() == answer.tokens
        chosen = ours.gather(-1, torch.tensor(answer.tokens)[:, None])
        apart = [float((ours.amax(-1, keepdim=True) - chosen).max())]
        for step, likely in zip(ours, answer.likely, strict=True):
            apart += [abs(float(step[token]) - value) for token, value in likely.items()]
        found.append(max(apart))
    return found
