"""make architectures: small random models of transformers' architectures, on the way that a user's model goes.

Each model is built with small sizes, saved, quantized (`--scheme w8a8`), verified against the original, loaded with
`baracuda.load`, compared with the original, run, saved again, and loaded again. A model works, or is refused with the
reason, or cannot be tried: many have no small form that these sizes make. Anything else is a failure and ends with 1.
What came of each is kept in tools/architectures.json, from which docs/reference/architectures.md is made.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

RECORD = Path(__file__).with_suffix(".json")
VOCABULARY, IMAGE, LENGTH = 160, 32, 12
#: Seconds for one architecture, and the parameters that a small one has at most.
SECONDS, LARGEST = 90, 150_000_000
#: The cosine between the logits of both models that one of random weights keeps, with routers that change their minds.
LEAST_COSINE = 0.8


class Family(NamedTuple):
    """Architectures that are built and run alike."""

    title: str
    #: The class of transformers that builds one, and the name of its table.
    auto: str
    table: str
    reads: tuple[str, ...] = ("input_ids",)
    generates: bool = False


FAMILIES = {
    "text": Family("Text", "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", generates=True),
    "images": Family(
        "Images and text, asked about text",
        "AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    ),
    "translation": Family(
        "Text to text",
        "AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", ("input_ids", "decoder_input_ids"),
    ),
    "encoders": Family("Encoders of text", "AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "vision": Family(
        "Images",
        "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", ("pixel_values",),
    ),
}  # fmt: skip

#: What configs call their sizes, and small ones.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size",), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim", "lru_width",
                     "out_hidden_size", "output_hidden_size", "projection_dim", "embed_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner",
                     "ffn_hidden_size", "hidden_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
                     "depth", "num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads", "mamba_expand"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
                     "decoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts",
                     "moe_num_experts", "linear_num_value_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "attention_head_size", "state_size", "mamba_d_head",
                     "mamba_head_dim", "mamba_d_state", "linear_key_head_dim", "linear_value_head_dim",
                     "num_mel_bins", "num_position_embeddings"), 16),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_intermediate_size",
                     "moe_ffn_hidden_size", "q_lora_rank", "kv_lora_rank", "sliding_window"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_shared_experts", "n_shared_experts",
                     "decoder_sparse_step", "num_hidden_groups", "temporal_patch_size", "spatial_merge_size"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 128),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    "num_nextn_predict_layers": 0, "fullatt_block_indexes": [1],
    "attn_layer_period": 2, "attn_layer_offset": 1, "attn_layer_indices": [1],
    "image_size": IMAGE, "patch_size": 8, "in_channels": 3, "num_channels": 3,
}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


#: Tokens that stand for images, or begin and end them.
_MARK = re.compile("(image|video|audio|vision|bo.|eo.)_.*(id|index)$")


class NotTried(Exception):
    """There is no small model of this architecture here."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", metavar="ARCHITECTURE", help="such as llama; all by default, and the record")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    import transformers

    asked = [(family, kind) for family in FAMILIES for kind in sorted(_table(family))]
    asked = [(family, kind) for family, kind in asked if not options.only or kind in options.only]
    if unknown := sorted(set(options.only) - {kind for _, kind in asked}):
        raise SystemExit(f"expected architectures of transformers {transformers.__version__}, got {', '.join(unknown)}")
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        rows = []
        for row in pool.map(outcome, *zip(*asked, strict=True)):
            rows.append(row)
            print(f"{row['family']:12} {row['architecture']:32} {row['outcome']:9} {row['reason']}"[:240], flush=True)
    counts = Counter(row["outcome"] for row in rows)
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    if not options.only:
        found = {"transformers": transformers.__version__, "not tried": counts["not tried"]}
        found["families"] = {name: family.title for name, family in FAMILIES.items()}
        found["rows"] = [row for row in rows if row["outcome"] != "not tried"]
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if counts["failed"] else 0


def outcome(family: str, kind: str) -> dict[str, Any]:
    """What becomes of one architecture, and why."""
    from baracuda.flow import FlowError

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    row: dict[str, Any] = {"family": family, "architecture": kind}

    def late(*_: object) -> None:
        raise TimeoutError(f"longer than {SECONDS} seconds")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with tempfile.TemporaryDirectory(prefix="baracuda-") as folder, redirect_stdout(StringIO()):
            return row | {"outcome": "works", "reason": ""} | try_out(FAMILIES[family], kind, Path(folder))
    except NotTried as error:
        return row | {"outcome": "not tried", "reason": str(error)}
    except FlowError as error:
        return row | {"outcome": "refused", "reason": _shown(error)}
    except Exception as error:  # of a hundred models' own code
        return row | {"outcome": "failed", "reason": f"{type(error).__name__}: {_shown(error)}"}
    finally:
        signal.alarm(0)


def _shown(error: Exception) -> str:
    """The message without its paths and numbers of layers' neighbours."""
    text = " ".join(str(error).split())
    return re.sub(r"/\S*?/(model|out)\b:? ?", "", text)


def try_out(family: Family, kind: str, folder: Path) -> dict[str, Any]:
    """Quantize, verify, load, run, save and load one model; raises where any of it is wrong."""
    import baracuda
    from baracuda.flow import quantize_checkpoint, verify

    inputs = {name: _input(name) for name in family.reads}
    before = _before(family, kind, folder / "model", inputs)
    report = quantize_checkpoint(folder / "model", folder / "out")
    if findings := verify(folder / "out", folder / "model"):
        raise AssertionError(f"verify finds {findings[0].code}: {findings[0].message}")
    model = baracuda.load(folder / "out")
    after = logits(model, inputs)
    cosine = float(nn.functional.cosine_similarity(before.flatten(), after.flatten(), 0))
    if not cosine > LEAST_COSINE:
        raise AssertionError(f"the cosine of its logits with the original's is {cosine:.3f}")
    if family.generates:
        with torch.no_grad():
            model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False, pad_token_id=0)
    model.save_pretrained(folder / "saved")
    again = logits(baracuda.load(folder / "saved"), inputs)
    # Convolutions of torch differ in the last bits from one place in memory to another.
    if not torch.allclose(again, after, rtol=1e-5, atol=1e-5):
        raise AssertionError(f"saved and loaded again, its logits differ by {float((again - after).abs().max()):.2g}")
    return {"linears": len(report["layers"])}


def _before(family: Family, kind: str, folder: Path, inputs: dict[str, Tensor]) -> Tensor:
    """Save a float model; its logits as transformers reads it from the files."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    auto = getattr(transformers, family.auto)
    try:
        config = small(transformers.CONFIG_MAPPING[kind])
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
        if size > LARGEST:
            raise NotTried(f"{size / 1e6:.0f} million parameters")
        torch.manual_seed(0)
        auto.from_config(config).save_pretrained(folder)
        before = logits(auto.from_pretrained(folder).eval(), inputs)
    except NotTried:
        raise
    except Exception as error:  # our sizes do not fit it
        raise NotTried(f"{type(error).__name__}: {_shown(error)}"[:160]) from None
    if not bool(torch.isfinite(before).all()) or float(before.std()) < 1e-6:
        raise NotTried("its logits are not finite, or all the same")
    return before


def small(kind: Any) -> Any:
    """The config with small sizes, and those that it is made of."""
    import transformers

    default = kind()
    parts = {
        name: small(type(part))
        for name in getattr(kind, "sub_configs", None) or {}
        if isinstance(part := _read(default, name), transformers.PretrainedConfig)
    }
    wanted = TOKENS if parts else {**SIZES, **TOKENS}
    sizes = {name: value for name, value in wanted.items() if _can_be_set(default, name)}
    if not parts and _read(default, "num_key_value_heads") == _read(default, "num_attention_heads"):
        sizes |= {"num_key_value_heads": SIZES["num_attention_heads"]} if "num_key_value_heads" in sizes else {}
    if "mrope_section" in getattr(kind, "ignore_keys_at_rope_validation", ()):
        sizes["rope_parameters"] = {**(default.rope_parameters or {}), "mrope_section": [2, 3, 3]}  # half a head
    for name in ("layer_types", "layers_block_type"):
        if isinstance(types := _read(default, name), list) and not parts and _can_be_set(default, name):
            sizes[name] = (sorted(set(types), key=types.index) * 2)[:2]
    if {"head_dim", "qk_rope_head_dim"} <= sizes.keys():  # the head that turns
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
    marks = [name for name, value in vars(default).items() if parts and _MARK.search(name) and isinstance(value, int)]
    return kind(**{**sizes, **{name: VOCABULARY - 1 - i for i, name in enumerate(marks)}, **parts})


def _can_be_set(config: Any, name: str) -> bool:
    computed = getattr(type(config), (config.attribute_map or {}).get(name, name), None)
    return _read(config, name) is not _read and not (isinstance(computed, property) and computed.fset is None)


def _read(config: Any, name: str) -> Any:
    """An attribute; this function where there is none, or a different one for each layer."""
    try:
        return getattr(config, name, _read)
    except Exception:  # transformers raises an error of its own
        return _read


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        made: Tensor = model(**inputs).logits
    return made.float()


def _input(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if name == "pixel_values":
        return torch.randn(1, 3, IMAGE, IMAGE, generator=generator)
    return torch.randint(3, VOCABULARY - 20, (1, LENGTH), generator=generator)


def _table(family: str) -> Sequence[str]:
    from transformers.models.auto import modeling_auto

    return list(getattr(modeling_auto, FAMILIES[family].table))


if __name__ == "__main__":
    sys.exit(main())
