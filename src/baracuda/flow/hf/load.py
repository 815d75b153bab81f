"""baracuda.load: a quantized checkpoint as the transformers model it came from, its Linears computing in integers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.errors import BaracudaError
from ...core.patterns import flaw
from ...models.attention import keep_torchs_attention
from ...models.fuse import fuse_producers
from ...models.merge import merge_siblings
from ...plans.plan import resolve_device
from ..checkpoint.check import require_stored
from ..checkpoint.config import parse_config
from ..checkpoint.directory import Checkpoint, read_json, require_contained
from ..checkpoint.storage import STORED
from ..errors import CheckpointError, FlowError, require_quick, some
from .config import alone, model_config
from .hub import local_directory
from .skeleton import model_class, require_transformers, skeleton


def load(
    out: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    merge: bool = True,
    fuse: bool = True,
    device_map: Any = None,
    **options: Any,
) -> Any:
    """The model in `out`, ready to run: integers for w8a8 and w4a8, 4-bit weights times floats for w4a16.

    4-bit files of other tools in compressed-tensors' pack-quantized layout are read, too: with zero points, per channel
    or in groups, and with groups out of order. Packed experts are made float once, when they are loaded.

    `out` is a directory, or the id of a model on the Hugging Face Hub, taken from the local cache or downloaded.
    transformers itself builds the model and reads the weights, so whatever it knows about an architecture holds here.
    `dtype` is the type of what is not quantized; the checkpoint's own unless given. `merge` computes Linears that read
    the same tensor, such as q, k and v, as one, with the same bits; `baracuda.models.merge_siblings(model)` says which.
    `fuse` makes norms and gated MLPs one kernel, which quantizes what it makes where integer linears alone read it;
    their last bits are then not those of torch, and `baracuda.models.fuse_producers(model)` says which they are.
    Attention is then baracuda's kernel, too, unless `attn_implementation` is given: on a CPU, and on a GPU that of
    single tokens inside torch.compile.
    `device` is the CPU unless given, or unless `device_map` places the model; that and further options are those of
    transformers' `from_pretrained`.
    """
    if device is not None and device_map is not None:
        raise FlowError(f"baracuda.load: expected device or device_map, got both ({device}, {device_map}); drop one")
    directory, place = local_directory(out), resolve_device("cpu" if device is None else device)
    quantization = read_json(directory / "config.json").get("quantization_config")
    if quantization is None:
        raise FlowError(f"{directory}: its config.json has no quantization_config; transformers loads it as it is")
    try:
        recipe = parse_config(quantization)  # says what is unreadable before anything is loaded
    except FlowError as error:
        raise FlowError(
            f"{directory}: {error}; baracuda.load reads what `baracuda quantize` writes and compressed-tensors' "
            "pack-quantized files of 4 bits; load other checkpoints with transformers"
        ) from None
    require_transformers("baracuda.load builds transformers models")
    require_stored(directory, recipe, quantization["ignore"])
    from .quantizer import METHOD  # needs transformers, and registers our quantizer with it

    config = model_config(directory)
    config.quantization_config = {"quant_method": METHOD, "compressed_tensors": quantization, "checked": True}
    if device_map is not None:
        model = read_model(directory, config, dtype or "auto", device_map=device_map, **options)
    else:
        model = read_model(directory, config, dtype or "auto", **options).to(place)
    model = model.eval()
    if merge:
        merge_siblings(model)
    if options.get("attn_implementation") is not None:
        keep_torchs_attention(model)
    if fuse:
        fuse_producers(model)
    return model


def read_model(directory: Path, config: Any, dtype: torch.dtype | str, **options: Any) -> nn.Module:
    """The model as transformers reads it, from safetensors only. Raises where transformers would initialize a tensor.

    Float tensors that nothing reads are allowed: many checkpoints still have a head from their training.
    """
    require_contained(directory)
    if (directory / "adapter_config.json").exists():
        raise FlowError(
            f"{directory}: expected a model without an adapter, got adapter_config.json, with which transformers loads "
            "what that file names; merge the adapter into the model and save it, or move the file away"
        )
    require_size(directory)
    cls = model_class(config)
    if cls is None:
        raise FlowError(f"{directory}: expected a model that transformers has a class for; {type(config).__name__} "
                        "has none: quantize it without calibration")  # fmt: skip
    given = {
        "use_safetensors": True,
        "local_files_only": True,
        **options,
        "config": config,
        "dtype": dtype,
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    }
    model: nn.Module
    try:
        with alone():
            model, found = cls.from_pretrained(directory, **given)
    except (BaracudaError, torch.OutOfMemoryError, OSError):
        raise
    except Exception as error:  # files can be wrong in any way; transformers then raises anything
        raise FlowError(
            f"{directory}: transformers cannot load it: {type(error).__name__}: {str(error)[:300]}; download or make "
            "the checkpoint again, or install another version of transformers"
        ) from error
    missing, unread = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    shapes = {name: (stored, there) for name, stored, there in found["mismatched_keys"]}
    # Where there is a quantizer, transformers leaves shapes to it.
    expected = getattr(getattr(model, "hf_quantizer", None), "shapes", {})
    shapes |= {n: (t.shape, expected[n]) for n, t in model.state_dict().items() if t.shape != expected.get(n, t.shape)}
    mismatched = [f"{name} ({list(stored)}, not {list(there)})" for name, (stored, there) in sorted(shapes.items())]
    quantized = any(name.rpartition(".")[2] in set(STORED) - {"weight"} for name in unread)
    if missing or mismatched or quantized:
        problems = {"no file holds": missing, "have another shape": mismatched, "nothing reads": unread}
        raise FlowError(
            f"{directory}: the files do not fill transformers' {type(model).__name__}: "
            + "; ".join(f"{what} {some(names)}" for what, names in problems.items() if names)
            + "; make or download the checkpoint again"
        )
    return model


def require_size(directory: Path) -> None:
    """Raise where config.json makes a model that is far larger than the files: it would be allocated before it is read.

    A model without weights is built for that, on the meta device. A byte holds at most two weights.
    """
    with Checkpoint.open(directory) as stored:
        config, limit = stored.config, 2 * stored.nbytes + SLACK
        regexes = _regexes(config.get("quantization_config"))
        require_quick(regexes, stored.where, f"{directory}: quantization_config")  # other readers match them, too
    try:
        model, _ = skeleton(config)
    except CheckpointError:
        raise
    except Exception as error:  # a config can be wrong in any way; transformers then raises anything
        text = f"transformers cannot build the model of config.json: {type(error).__name__}: {str(error)[:200]}"
        raise FlowError(f"{directory}: {text}") from None
    sizes = {} if model is None else dict((*model.named_parameters(), *model.named_buffers()))
    if (total := sum(tensor.numel() for tensor in sizes.values())) > limit:
        largest, tensor = max(sizes.items(), key=lambda item: item[1].numel())
        raise CheckpointError(
            "bad-config",
            f"{directory}: config.json makes a model of {total} elements ({largest} is {list(tensor.shape)}), more "
            f"than the {stored.nbytes} bytes of its files can hold; correct config.json, or download the files again",
        )


def _regexes(value: Any) -> Iterator[str]:
    """The regular expressions at any depth of a quantization_config."""
    if isinstance(value, str) and value.startswith("re:") and flaw(value) is None:
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _regexes(inner)


#: Elements that a model may have beyond what its files hold: tables of positions, masks.
SLACK = 1 << 26
