"""llm-compressor on the same model and tokens, in an interpreter that has it: the peer of `bench accuracy`.

`python _llmcompressor.py MODEL TOKENS OUT SCHEME METHOD GROUP` prints one line of JSON: seconds and peak megabytes.
It imports nothing of baracuda, since its environment has none.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any


def recipe(scheme: str, method: str, group: int) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    if scheme == "w8a8":
        common: dict[str, Any] = {"scheme": "W8A8", "targets": "Linear", "ignore": ["lm_head"]}
        return QuantizationModifier(**common) if method == "rtn" else GPTQModifier(**common)
    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
    if method == "gptq":
        weights.actorder = "static"
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    modifier = GPTQModifier if method == "gptq" else QuantizationModifier
    return modifier(config_groups=groups, ignore=["lm_head"])


def main(model: str, tokens: str, out: str, scheme: str, method: str, group: str) -> None:
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    started = time.perf_counter()
    rows = load_file(tokens)["tokens"]
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(model)
    data = Dataset.from_dict({"input_ids": rows.tolist(), "attention_mask": torch.ones_like(rows).tolist()})
    samples = {"num_calibration_samples": len(rows), "max_seq_length": rows.shape[1]}
    more = {} if method == "rtn" else {"dataset": data, "shuffle_calibration_samples": False, **samples}
    oneshot(model=network, tokenizer=tokenizer, recipe=recipe(scheme, method, int(group)), **more)
    network.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)
    seconds = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_SELF)
    cost = {"seconds": seconds, "cpu_seconds": used.ru_utime + used.ru_stime, "peak_mb": used.ru_maxrss / 1024}
    print(json.dumps({**cost, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
